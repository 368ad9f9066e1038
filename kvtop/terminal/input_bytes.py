"""What a terminal sends, as text that Textual's parser can take.

Owns the decoding of the bytes on stdin. Invariants: no byte raises (what is not UTF-8 becomes U+FFFD); between
the brackets of a paste no escape character reaches the parser, which would take it for the start of a key;
neither depends on where the bytes were cut into pieces.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder

_START, _END = b"\x1b[200~", b"\x1b[201~"
_ESCAPE_SHOWN = "␛".encode()
_OLD_MOUSE = re.compile(rb"\x1b\[M(...)", re.DOTALL)
"""A mouse report as terminals without the SGR form send it: button, column and row, each plus 32, as bytes."""
_OLD_MOUSE_BEGUN = re.compile(rb"\x1b\[M.{0,2}\Z", re.DOTALL)


class InputDecoder:
    """Bytes in, text out. Call `decode` with each piece as it comes."""

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._in_paste = False
        self._held = b""
        """The beginning of something whose end has not come yet."""
        self._passed = b""
        """The last few bytes that were let through outside a paste: a bracket may have begun in them."""

    def decode(self, data: bytes) -> str:
        """The text of this piece, which may be less than was sent: an unfinished character is kept back."""
        return self._decode(self._clean(data))

    def _clean(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        out = b""
        while data:
            if self._in_paste:
                text, end, data = data.partition(_END)
                if not end:
                    keep = _begun(text, _END)
                    text, self._held = text[: len(text) - keep], text[len(text) - keep :]
                out += text.replace(b"\x1b", _ESCAPE_SHOWN) + end
                self._in_paste = not end
            else:
                # A bracket's first bytes may have passed with the piece before.
                seen = self._passed + data
                at = seen.find(_START)
                if at >= 0:
                    keys, data = data[: at + len(_START) - len(self._passed)], seen[at + len(_START) :]
                    self._in_paste = True
                else:
                    keys, data = data, b""
                out += self._keys(keys)
        return out

    def _keys(self, data: bytes) -> bytes:
        """Old mouse reports in the SGR form: their bytes may be part of no character, or of another one."""
        before, data = self._passed, self._passed + data
        out = _OLD_MOUSE.sub(_sgr_mouse, data)
        begun = None if self._in_paste else _OLD_MOUSE_BEGUN.search(out)
        if begun is not None:
            self._held, out = out[max(len(before), begun.start()) :], out[: max(len(before), begun.start())]
        self._passed = b"" if self._in_paste else out[-(len(_START) - 1) :]
        return out[len(before) :]


def _sgr_mouse(found: re.Match[bytes]) -> bytes:
    button, column, row = (max(0, byte - 32) for byte in found[1])
    released = button & 0b1100011 == 3 and not button & 32
    return b"\x1b[<%d;%d;%d%c" % (0 if released else button, column, row, b"m" if released else b"M")


def _begun(text: bytes, bracket: bytes) -> int:
    """Bytes at the end of `text` with which `bracket` may have begun."""
    return next((n for n in range(len(bracket) - 1, 0, -1) if text.endswith(bracket[:n])), 0)
