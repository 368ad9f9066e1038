"""Detokenizer: the visible text of a branch, token by token. Pieces: the bytes of each token, once.

A Detokenizer owns the bytes that are not yet a whole character and the text that may still become a stop string. It
shows neither. Invariants: visible text never changes, and a token costs O(its own length), because raw bytes are joined
and older ids are not decoded again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from engine.events import Event, TokenPieces

TokenBytes = Callable[[int], bytes]
"""Token id -> its raw UTF-8 bytes; empty for tokens that are not text (EOS and other control tokens)."""


class Detokenizer:
    """Text of one branch. `text` is all that was shown; `stopped` is set once a stop string came up."""

    __slots__ = ("_bytes_of", "_decoder", "_held", "_longest", "_stop", "stopped", "text")

    def __init__(self, token_bytes: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self._bytes_of = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Text that becomes visible with this token, possibly none. Without `may_stop` no stop string ends it."""
        text = self._decoder.decode(self._bytes_of(token_id))
        if not may_stop and not self.stopped:
            shown, self._held = self._held + text, ""
            self.text += shown
            return shown
        return self._show(text, final=False)

    def flush(self) -> str:
        """The end: what was held back, a cut character as U+FFFD."""
        return self._show(self._decoder.decode(b"", final=True), final=True)

    def fork(self) -> Detokenizer:
        """An independent copy for a child branch."""
        other = Detokenizer(self._bytes_of, self._stop)
        other._decoder.setstate(self._decoder.getstate())
        other._held, other.text, other.stopped = self._held, self.text, self.stopped
        return other

    def _show(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = [at for at in (held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            out, self._held = held[: min(found)], ""
        else:
            keep = 0 if final else self._may_become_stop(held)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += out
        return out

    def _may_become_stop(self, held: str) -> int:
        """Length of the longest end of `held` that a stop string begins with."""
        for n in range(min(self._longest - 1, len(held)), 0, -1):
            if any(s.startswith(held[-n:]) for s in self._stop):
                return n
        return 0


class Pieces:
    """Emits the raw bytes of a token at its first use, so that no reader needs a tokenizer. token_bytes: None where
    the source has no text; is_text: False for control tokens, whose bytes are in the event but never in a text."""

    def __init__(
        self,
        token_bytes: TokenBytes | None,
        is_text: Callable[[int], bool],
        vocab_size: int,
        emit: Callable[[Event], None],
    ) -> None:
        self._token_bytes = token_bytes
        self._is_text = is_text
        self._emit = emit
        self._seen = bytearray(vocab_size)

    def show(self, token_ids: Iterable[int]) -> None:
        """TokenPieces of those that come up for the first time."""
        if self._token_bytes is None:
            return
        seen = self._seen
        new = [t for t in dict.fromkeys(token_ids) if 0 <= t < len(seen) and not seen[t]]
        if new:
            for t in new:
                seen[t] = 1
            self._emit(TokenPieces(new, [self._token_bytes(t) for t in new]))

    def detokenizer(self, stop: tuple[str, ...]) -> Detokenizer | None:
        """For a new branch; None where the source has no text."""
        return None if self._token_bytes is None else Detokenizer(self._visible, stop)

    def _visible(self, token: int) -> bytes:
        assert self._token_bytes is not None
        return self._token_bytes(token) if self._is_text(token) else b""
