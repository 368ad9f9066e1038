"""A Textual screen as text, SVG or PNG, exact to the cell and to the byte.

Owns what a picture is made of: the compositor's strips, which is what a terminal would be sent, as rows
of runs with their colours resolved. Invariants: the grid is kept, CELL pixels a cell, and the same strips
give the same bytes on the same machine: no clock, no random ids, no blinking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rich.cells import get_character_cell_size
from rich.color import Color, ColorType
from rich.style import Style

from kvtop.picture.cells import Grid, PictureError, Rgb, Run
from kvtop.terminal.textual_door import shown_strips

if TYPE_CHECKING:
    from rich.terminal_theme import TerminalTheme
    from textual.app import App
    from textual.strip import Strip

FORMATS = ("txt", "svg", "png")


def grid(app: App[Any]) -> Grid:
    """What the running app would show now, modal screens and their dimmed background included."""
    return grid_of(shown_strips(app), app.ansi_theme, *app.size)


def grid_of(strips: Sequence[Strip], theme: TerminalTheme, width: int, height: int) -> Grid:
    """Strips with their colours resolved; ANSI and default colours by the terminal theme."""
    bg = _rgb(None, theme, False)
    rows = tuple(tuple(_runs(strip, theme, width)) for strip in strips[:height])
    return Grid(width, height, rows, bg)


def _runs(strip: Strip, theme: TerminalTheme, width: int) -> Iterator[Run]:
    x = 0
    for text, style, control in strip:
        if control or not text:
            continue
        look = _look(style or Style.null(), theme)
        cells = sum(map(get_character_cell_size, text))
        yield Run(x, text, cells, *look)
        x += cells


@lru_cache(maxsize=4096)
def _look(style: Style, theme: TerminalTheme) -> tuple[Rgb, Rgb, bool, bool, bool, bool]:
    fg, bg = _rgb(style.color, theme, True), _rgb(style.bgcolor, theme, False)
    if style.reverse:
        fg, bg = bg, fg
    if style.dim:
        fg = tuple((a + b) // 2 for a, b in zip(fg, bg, strict=True))  # type: ignore[assignment]
    return fg, bg, bool(style.bold), bool(style.italic), bool(style.underline), bool(style.strike)


def _rgb(color: Color | None, theme: TerminalTheme, foreground: bool) -> Rgb:
    if color is None or color.type is ColorType.DEFAULT:
        red, green, blue = theme.foreground_color if foreground else theme.background_color
    else:
        red, green, blue = color.get_truecolor(theme, foreground)
    return red, green, blue


def render(app: App[Any], kind: str) -> bytes:
    """The app's screen in one of FORMATS. Raises PictureError on another format or a missing font."""
    match kind:
        case "txt":
            return to_txt(grid(app))
        case "svg":
            from kvtop.picture.svg import to_svg

            return to_svg(grid(app))
        case "png":
            from kvtop.picture.png import to_png

            return to_png(grid(app))
    raise PictureError(f"no such picture format: {kind[:40]!r}; take one of {', '.join(FORMATS)}")


def to_txt(grid: Grid) -> bytes:
    """UTF-8 lines without trailing blanks, one a row."""
    lines = ("".join(run.text for run in row).rstrip() for row in grid.rows)
    return ("\n".join(lines) + "\n").encode()
