"""Wrapping of text into lines, with the way back from a line to its tokens.

Owns the mapping token -> characters -> lines, so that any part of the text on the screen can be traced to its blocks.
Invariant: the slices that `wrap` returns are ascending. Together they contain every character except the blanks and
newlines at which lines were broken.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from rich.cells import cell_len, get_character_cell_size

from kvtop.text import safe_text


class Spelling:
    """The safe text of a sequence of tokens, and the index of each token's first character.

    A character whose bytes are in several tokens belongs to the last of them.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def add(self, pieces: Iterable[bytes]) -> None:
        """The next tokens."""
        parts: list[str] = []
        length = len(self._text)
        for piece in pieces:
            self.starts.append(length)
            text = safe_text(self._decoder.decode(piece), newlines=True)
            parts.append(text)
            length += len(text)
        self._text += "".join(parts)

    @property
    def text(self) -> str:
        """The whole text, with U+FFFD for an unfinished character."""
        rest, _ = self._decoder.getstate()
        return self._text + rest.decode("utf-8", "replace") if rest else self._text


def spelled(pieces: Iterable[bytes]) -> tuple[str, list[int]]:
    """(text, starts) of a whole sequence of tokens, as in Spelling."""
    spelling = Spelling()
    spelling.add(pieces)
    return spelling.text, spelling.starts


def wrap(text: str, width: int) -> list[tuple[int, int]]:
    """(start, end) of each line of at most `width` cells.

    Lines break at newlines and blanks, and inside a word only if it is too long. The text "" is one empty line.
    """
    lines: list[tuple[int, int]] = []
    if width < 1:
        return lines
    start = 0
    for paragraph in text.split("\n"):
        end = start + len(paragraph)
        if cell_len(paragraph) <= width:
            lines.append((start, end))
        else:
            lines += _broken(text, start, end, width)
        start = end + 1
    return lines


def _broken(text: str, start: int, end: int, width: int) -> list[tuple[int, int]]:
    lines: list[tuple[int, int]] = []
    while start < end:
        cells, stop = 0, start
        while stop < end:
            size = get_character_cell_size(text[stop])
            if cells + size > width:
                break
            cells += size
            stop += 1
        if stop == end:
            lines.append((start, end))
            break
        if stop == start:  # a character that is wider than the line
            stop += 1
        blank = text.rfind(" ", start, stop + 1)
        if blank > start:
            lines.append((start, blank))
            start = blank + 1
        else:
            lines.append((start, stop))
            start = stop
    return lines
