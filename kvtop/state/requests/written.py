"""Written: the tokens and the text that one branch has written so far.

Owns them in pieces. Invariant: no event copies what was written before it. New tokens are appended, and a fork shares
all pieces with its parent, because a shared piece never changes. Only reading joins the pieces, each of them once.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from kvtop.state.part import Copied


class Piece(NamedTuple):
    """What several branches have in common, and the piece before it."""

    before: Piece | None
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class Written(Copied):
    """See the module."""

    __slots__ = ("_before", "_ids", "_texts")

    def __init__(self, before: Piece | None = None) -> None:
        self._before = before
        self._ids: list[int] = []
        self._texts: list[str] = []

    @property
    def ids(self) -> list[int]:
        """All token ids. The list grows with the branch; readers must not change it."""
        if self._before is not None:
            self.join()
        return self._ids

    @property
    def text(self) -> str:
        """All visible text."""
        if self._before is not None or len(self._texts) > 1:
            self.join()
        return self._texts[0] if self._texts else ""

    def add(self, ids: list[int], text: str) -> None:
        """A step sampled these tokens, and this text became visible."""
        self._ids += ids
        if text:
            self._texts.append(text)

    def fork(self) -> Written:
        """A branch that begins with everything written here. Costs no more than what is new since the last fork or
        read."""
        if self._ids or self._texts:
            self._before = Piece(self._before, tuple(self._ids), tuple(self._texts))
            self._ids, self._texts = [], []
        return Written(self._before)

    def __repr__(self) -> str:
        other = self.copy()
        return f"Written({other.ids}, {other.text!r})"

    def join(self) -> None:
        """Make one piece of all of them. Afterwards reading changes nothing until more is added."""
        pieces: list[Piece] = []
        piece = self._before
        while piece is not None:
            pieces.append(piece)
            piece = piece.before
        pieces.reverse()
        text = "".join([*chain.from_iterable(p.texts for p in pieces), *self._texts])
        self._texts = [text] if text else []
        if pieces:
            self._ids = [*chain.from_iterable(p.ids for p in pieces), *self._ids]
            self._before = None

    def forget_ids(self) -> None:
        """Keep the text alone."""
        self.join()
        self._ids = []
