"""A picture as data: rows of runs of cells with their colours, before it becomes a file."""

from __future__ import annotations

from dataclasses import dataclass

from engine import SetupError

CELL = (10, 20)
"""Width and height of one cell, pixels (PNG) or user units (SVG)."""

Rgb = tuple[int, int, int]


class PictureError(SetupError):
    """A picture cannot be made; one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """Text in one look, starting at cell x."""

    x: int
    text: str
    width: int
    fg: Rgb
    bg: Rgb
    bold: bool
    italic: bool
    underline: bool
    strike: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """A screen as rows of runs; bg fills what no run covers."""

    width: int
    height: int
    rows: tuple[tuple[Run, ...], ...]
    bg: Rgb
