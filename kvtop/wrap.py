"""Wrapping of text that remembers where it came from.

Owns the mapping token -> characters -> lines, so that a stretch of text on the screen can be traced to its
blocks. Invariant: the slices that `wrap` returns are ascending and together hold every character but
the blanks and newlines at which lines were broken.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from rich.cells import cell_len, get_character_cell_size

from kvtop.text import safe_text


class Spelling:
    """Safe text of tokens that come one after the other, and for each the index of its first character.

    A character whose bytes are spread over tokens belongs to the one that completes it.
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
        """All of it, an unfinished character as U+FFFD."""
        rest, _ = self._decoder.getstate()
        return self._text + rest.decode("utf-8", "replace") if rest else self._text


def spelled(pieces: Iterable[bytes]) -> tuple[str, list[int]]:
    """(text, starts) of a whole sequence of tokens, as Spelling has them."""
    spelling = Spelling()
    spelling.add(pieces)
    return spelling.text, spelling.starts


def wrap(text: str, width: int) -> list[tuple[int, int]]:
    """(start, end) of each line of at most `width` cells; breaks at blanks, inside words only where one
    is too long. A newline always breaks; a text of "" is one empty line."""
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
        if stop == start:  # a character wider than the line: nothing else can be done
            stop += 1
        blank = text.rfind(" ", start, stop + 1)
        if blank > start:
            lines.append((start, blank))
            start = blank + 1
        else:
            lines.append((start, stop))
            start = stop
    return lines
