"""Pasting: a bracketed paste stays one text, whatever characters it holds.

Textual's parser takes an escape character inside a paste for the start of a key: pieces of the text would act
as keys, and a later newline would send them. Owns the filter in front of that parser. Invariant: between
the paste's own brackets no escape character reaches it, also where the terminal delivers the text in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from textual._xterm_parser import XTermParser
from textual.message import Message

_START, _END = "\x1b[200~", "\x1b[201~"
_SHOWN = "␛"


class PasteParser(XTermParser):
    """In a paste an escape character is its symbol."""

    _inside = False
    _held = ""
    """Perhaps the beginning of a bracket, whose end has not come yet."""

    def feed(self, data: str) -> Iterable[Message]:
        """As XTermParser; "" is the end of input."""
        clean = self._clean(data)
        return super().feed(clean) if clean or not data else ()

    def _clean(self, data: str) -> str:
        text, out = self._held + data, list[str]()
        self._held = ""
        while text:
            if not self._inside:
                before, bracket, text = text.partition(_START)
                out += before, bracket
                self._inside = bool(bracket)
                continue
            before, bracket, rest = text.partition(_END)
            if bracket:
                out += before.replace("\x1b", _SHOWN), bracket
                self._inside, text = False, rest
                continue
            whole = len(text) - _begun(text)
            out.append(text[:whole].replace("\x1b", _SHOWN))
            self._held, text = text[whole:], ""
        return "".join(out)


def _begun(text: str) -> int:
    """Characters at the end of `text` with which the closing bracket may have begun."""
    return next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)


def install() -> None:
    """Have Textual's terminal drivers read through PasteParser; its classes offer no other way in."""
    with suppress(ImportError):  # not on this system
        from textual.drivers import linux_driver

        linux_driver.XTermParser = PasteParser  # type: ignore[attr-defined]
