"""Answer: the text of a request that still generates, decoded and wrapped as it grows.

Owns the part of an answer's layout that stays from frame to frame. Invariant: its passage and lines are those that
`spelled`, `safe_text` and `wrap` give for the whole text; only the tokens that are new are spelled, and only the
last line is broken again, so that a frame costs the same however long the answer is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.style import Style

from kvtop.text import DOTTED_CIRCLE, safe_text
from kvtop.widgets.base.lines import Part, Row
from kvtop.wrap import Spelling, wrap

INDENT = 3
"""Cells left of an answer."""


@dataclass(slots=True)
class Passage:
    """Text of consecutive tokens; `first` is the index of the first of them in the sequence."""

    text: str
    starts: list[int]
    first: int
    names: tuple[tuple[int, int], ...] = ()
    """Where the text has the name of a special token: (start, end) of each."""

    def token(self, char: int) -> int:
        """Index in the sequence of the token that character belongs to."""
        return self.first + max(0, bisect_right(self.starts, char) - 1)


@dataclass(slots=True)
class Line:
    """A line before styling: lead, then a slice of a passage or fixed parts."""

    lead: list[Part]
    parts: list[Part] = field(default_factory=list)
    passage: Passage | None = None
    start: int = 0
    end: int = 0
    style: Style = field(default_factory=Style.null)
    fold: bool = False
    """A click here folds or unfolds the attached page."""
    row: Row | None = None
    """The painted row while none of its blocks is pointed at."""


class Answer:
    """Lines of at most `room` cells (at least 1), behind the indent. Call `grow`, then read."""

    def __init__(self, room: int, first: int, style: Style) -> None:
        """first: index of the answer's first token in its sequence."""
        self.room, self.style = room, style
        self.passage = Passage("", [], first)
        self._ids: list[int] | None = None
        self._spelling = Spelling()
        self._text = self._safe = ""
        self._lines: list[Line] = []
        """All but the last, which may still change."""
        self._last = (0, 0)

    def continues(self, ids: list[int], text: str) -> bool:
        """This is the same answer as before, perhaps longer: a list of tokens is only ever appended to."""
        return (self._ids is None or ids is self._ids) and text.startswith(self._text)

    def grow(self, ids: list[int], piece: Callable[[int], bytes], text: str) -> None:
        """`ids` and `text` are the whole answer now; piece: bytes of a token id. Only if it `continues`."""
        self._ids, spelling = ids, self._spelling
        spelling.add(map(piece, ids[len(spelling.starts) :]))
        self._add(text)
        shown, before = self._safe.rstrip("\n"), self.passage.text
        # The engine decoded it differently (stripped blanks): the token of a character is not known.
        known = spelling.text.startswith(self._safe)
        self.passage.text = shown
        self.passage.starts = spelling.starts if known else spelling.starts[:1]
        if not shown.startswith(before) or not before.strip():
            start = len(shown) - len(shown.lstrip())
            self._lines, self._last = [], (start, start)
        at = self._last[0]
        *full, self._last = [(a + at, b + at) for a, b in wrap(shown[at:], self.room)]
        self._lines += [self._line(a, b) for a, b in full]

    def _add(self, text: str) -> None:
        """Make the new text safe; all of it where a mark or a line break may join what is there."""
        new = text[len(self._text) :]
        safe = safe_text(new, newlines=True)
        if self._text.endswith("\r") or safe.startswith(DOTTED_CIRCLE):
            self._safe = safe_text(text, newlines=True)
        else:
            self._safe += safe
        self._text = text

    def _line(self, start: int, end: int) -> Line:
        lead: list[Part] = [(" " * INDENT, self.style)]
        return Line(lead, passage=self.passage, start=start, end=end, style=self.style)

    def lines(self, cursor: Style | None) -> list[Line]:
        """All lines. After the last one a cursor, if there is a style for it."""
        last = self._line(*self._last)
        lines = [*self._lines, last]
        if cursor is not None:
            if cell_len(self.passage.text[last.start : last.end]) < self.room:
                last.parts = [("█", cursor)]
            else:
                lines.append(Line(list(last.lead), [("█", cursor)]))
        return lines
