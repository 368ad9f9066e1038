"""A Textual screen as text, SVG or PNG, exact to the cell and to the byte.

Takes the compositor's strips, which is what a terminal would be sent, and keeps the grid: a cell is
CELL pixels, its geometry glyphs come from kvtop.glyphs, the rest from a monospace font at hand.
The same strips give the same bytes on the same machine: no clock, no random ids, no blinking.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from rich.cells import get_character_cell_size
from rich.color import Color, ColorType
from rich.style import Style

from engine import SetupError
from kvtop.glyphs import Polygon, Rect, Shade, Shape, Stroke, shapes

if TYPE_CHECKING:
    from PIL import Image, ImageFont
    from rich.terminal_theme import TerminalTheme
    from textual.app import App
    from textual.strip import Strip

CELL = (10, 20)
"""Width and height of one cell, pixels (PNG) or user units (SVG)."""

FORMATS = ("txt", "svg", "png")

_FONTS = (
    ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSansMono-Oblique.ttf"),
    ("JetBrainsMono-Regular.ttf", "JetBrainsMono-Bold.ttf", "JetBrainsMono-Italic.ttf"),
    ("NotoSansMono-Regular.ttf", "NotoSansMono-Bold.ttf", "NotoSansMono-Regular.ttf"),
    ("LiberationMono-Regular.ttf", "LiberationMono-Bold.ttf", "LiberationMono-Italic.ttf"),
    ("UbuntuMono-R.ttf", "UbuntuMono-B.ttf", "UbuntuMono-RI.ttf"),
    ("Menlo.ttc", "Menlo.ttc", "Menlo.ttc"),
    ("consola.ttf", "consolab.ttf", "consolai.ttf"),
    ("cour.ttf", "courbd.ttf", "couri.ttf"),
)
"""Regular, bold, italic; Pillow finds them by name in the system's font folders."""

_SVG_FONTS = "'DejaVu Sans Mono','JetBrains Mono',Menlo,Consolas,'Liberation Mono',monospace"
_SUPERSAMPLE = 4

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


def grid(app: App[Any]) -> Grid:
    """What the running app would show now, modal screens and their dimmed background included."""
    from textual._context import visible_screen_stack

    token = visible_screen_stack.set(app._background_screens)
    try:
        strips = app.screen._compositor.render_strips()
    finally:
        visible_screen_stack.reset(token)
    return grid_of(strips, app.ansi_theme, *app.size)


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
    makers = {"txt": to_txt, "svg": to_svg, "png": to_png}
    if kind not in makers:
        raise PictureError(f"no such picture format: {kind[:40]!r}; take one of {', '.join(FORMATS)}")
    return makers[kind](grid(app))


# -------------------------------------------------------------------------------------------- txt


def to_txt(grid: Grid) -> bytes:
    """UTF-8 lines without trailing blanks, one a row."""
    lines = ("".join(run.text for run in row).rstrip() for row in grid.rows)
    return ("\n".join(lines) + "\n").encode()


# -------------------------------------------------------------------------------------------- svg


def to_svg(grid: Grid) -> bytes:
    """SVG 1.1 whose geometry glyphs are shapes and whose text is stretched to its cells."""
    w, h = CELL
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {grid.width * w} {grid.height * h}" '
        f'width="{grid.width * w}" height="{grid.height * h}" font-family="{_SVG_FONTS}" '
        f'font-size="{h * 0.83:g}" shape-rendering="crispEdges">',
        f'<rect width="100%" height="100%" fill="{_hex(grid.bg)}"/>',
    ]
    for y, row in enumerate(grid.rows):
        for run in row:
            if run.bg != grid.bg:
                out.append(
                    f'<rect x="{run.x * w}" y="{y * h}" width="{run.width * w}" height="{h}" '
                    f'fill="{_hex(run.bg)}"/>'
                )
            out += _svg_run(run, y)
    out.append("</svg>\n")
    return "\n".join(out).encode()


def _svg_run(run: Run, y: int) -> Iterator[str]:
    w, h = CELL
    fill = _hex(run.fg)
    for x, width, text in _pieces(run):
        drawn = shapes(text[0], w, h)
        if drawn is None:
            bold, italic = ' font-weight="bold"' * run.bold, ' font-style="italic"' * run.italic
            yield (
                f'<text x="{x * w}" y="{y * h + h * 0.75:g}" textLength="{width * w}" '
                f'lengthAdjust="spacingAndGlyphs" fill="{fill}" xml:space="preserve"{bold}{italic}>'
                f"{escape(text)}</text>"
            )
        elif isinstance(drawn[0], Rect) and _tiles_across(drawn, w):
            # One rectangle for a run of equal bars, so that no renderer leaves a seam.
            for shape in drawn:
                assert isinstance(shape, Rect)
                yield _svg_rect(x * w, y * h + shape.y0, width * w, shape.y1 - shape.y0, fill)
        else:
            for i in range(len(text)):
                for shape in drawn:
                    yield _svg_shape(shape, (x + i) * w, y * h, fill)
    if run.underline:
        yield _svg_rect(run.x * w, y * h + h - 2, run.width * w, 1, fill)
    if run.strike:
        yield _svg_rect(run.x * w, y * h + h // 2, run.width * w, 1, fill)


def _tiles_across(drawn: Sequence[Shape], w: int) -> bool:
    return all(isinstance(s, Rect) and s.x0 == 0 and s.x1 == w for s in drawn)


def _svg_rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _svg_shape(shape: Shape, x: int, y: int, fill: str) -> str:
    w, h = CELL
    match shape:
        case Rect():
            return _svg_rect(x + shape.x0, y + shape.y0, shape.x1 - shape.x0, shape.y1 - shape.y0, fill)
        case Shade():
            return (
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" '
                f'fill-opacity="{shape.density / 4:g}"/>'
            )
        case Polygon():
            points = " ".join(f"{x + px:.4g},{y + py:.5g}" for px, py in shape.points)
            return f'<polygon points="{points}" fill="{fill}" shape-rendering="auto"/>'
        case Stroke():
            points = " ".join(f"{x + px:.6g},{y + py:.6g}" for px, py in shape.points)
            return (
                f'<polyline points="{points}" fill="none" stroke="{fill}" stroke-width="{shape.width:g}" '
                f'shape-rendering="auto"/>'
            )


def _pieces(run: Run) -> Iterator[tuple[int, int, str]]:
    """Cuts a run into (x, cells, text): equal geometry glyphs, stretches of plain text, wide
    characters one by one; blanks are left out."""
    w, h = CELL
    x, start, text, kind = run.x, run.x, "", ""
    for char in run.text:
        cells = get_character_cell_size(char)
        if cells == 0:
            if text:
                text += char
            continue
        if char == " " and kind != "text":
            this = ""
        elif shapes(char, w, h) is not None:
            this = char
        else:
            this = "text" if cells == 1 else f"wide {x}"
        if this != kind:
            if kind and text.strip():
                yield start, x - start, text
            start, text, kind = x, "", this
        text += char
        x += cells
    if kind and text.strip():
        yield start, x - start, text


def _hex(color: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)


# -------------------------------------------------------------------------------------------- png


def to_png(grid: Grid) -> bytes:
    """PNG of width x CELL[0] by height x CELL[1] pixels. Raises PictureError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise PictureError("a png picture needs Pillow: pip install pillow, or take --format svg") from None

    w, h = CELL
    image = Image.new("RGB", (max(1, grid.width) * w, max(1, grid.height) * h), grid.bg)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(grid.rows):
        for run in row:
            if run.bg != grid.bg:
                draw.rectangle((run.x * w, y * h, (run.x + run.width) * w - 1, y * h + h - 1), run.bg)
            x = run.x
            for char in run.text:
                cells = get_character_cell_size(char)
                if char != " " and cells:
                    mask = _mask(char, cells, run.bold, run.italic)
                    image.paste(run.fg, (x * w, y * h), mask)
                x += cells
            for level, wanted in ((h - 2, run.underline), (h // 2, run.strike)):
                if wanted:
                    draw.rectangle((run.x * w, y * h + level, x * w - 1, y * h + level), run.fg)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


@lru_cache(maxsize=8192)
def _mask(char: str, cells: int, bold: bool, italic: bool) -> Image.Image:
    """Coverage of one glyph, 0 to 255, in a box of `cells` cells."""
    from PIL import Image, ImageDraw

    w, h = CELL
    drawn = shapes(char, w, h)
    if drawn is None:
        return _text_mask(char, cells, bold, italic)
    if isinstance(drawn[0], Shade) if drawn else False:
        return _shade_mask(drawn[0].density)  # type: ignore[union-attr]
    s = _SUPERSAMPLE
    big = Image.new("L", (w * s, h * s), 0)
    draw = ImageDraw.Draw(big)
    for shape in drawn:
        match shape:
            case Rect():
                draw.rectangle((shape.x0 * s, shape.y0 * s, shape.x1 * s - 1, shape.y1 * s - 1), 255)
            case Polygon():
                draw.polygon([(x * s, y * s) for x, y in shape.points], 255)
            case Stroke():
                points = [(x * s - 0.5, y * s - 0.5) for x, y in shape.points]
                draw.line(points, 255, round(shape.width * s), joint="curve")
    return big.resize((w, h), Image.Resampling.BOX)


def _shade_mask(density: int) -> Image.Image:
    """A dot pattern that goes on across cells, as fonts draw shades: the glyph stays readable
    where its colour is not."""
    from PIL import Image

    lit = {1: ((0, 0),), 2: ((0, 0), (1, 1)), 3: ((0, 0), (1, 1), (1, 0))}[density]
    w, h = CELL
    dot = max(1, w // 10)
    mask = Image.new("L", CELL, 0)
    for y in range(h):
        for x in range(w):
            if ((x // dot) % 2, (y // dot) % 2) in lit:
                mask.putpixel((x, y), 255)
    return mask


def _text_mask(char: str, cells: int, bold: bool, italic: bool) -> Image.Image:
    from PIL import Image, ImageDraw

    w, h = CELL
    mask = Image.new("L", (w * cells, h), 0)
    draw = ImageDraw.Draw(mask)
    for font in _fonts(bold, italic):
        if _has(font, char):
            left = max(0.0, (w * cells - font.getlength(char)) / 2)
            draw.text((left, h * 0.75), char, 255, font, anchor="ls")
            return mask
    # No font knows it: the outline that terminals draw for such a character.
    draw.rectangle((1, 4, w * cells - 2, h - 5), outline=160)
    return mask


@lru_cache(maxsize=4)
def _fonts(bold: bool, italic: bool) -> list[ImageFont.FreeTypeFont]:
    """Monospace fonts at hand, each at the size whose advance is one cell; Pillow's own face last."""
    from PIL import ImageFont

    found = []
    for names in _FONTS:
        try:
            font = ImageFont.truetype(names[1 if bold else 2 if italic else 0], 100)
        except OSError:
            continue
        size = min(CELL[0] / font.getlength("M") * 100, CELL[1] * 0.83)
        found.append(font.font_variant(size=size))
    fallback = ImageFont.load_default(CELL[1] * 0.7)
    if isinstance(fallback, ImageFont.FreeTypeFont):
        found.append(fallback)
    return found


def _has(font: ImageFont.FreeTypeFont, char: str) -> bool:
    """Whether the font draws something else than its box for unknown characters."""
    from PIL import Image, ImageDraw

    def ink(text: str) -> bytes:
        image = Image.new("L", (CELL[0] * 3, CELL[1] * 2), 0)
        ImageDraw.Draw(image).text((2, CELL[1]), text, 255, font, anchor="ls")
        return image.tobytes()

    return ink(char) != ink("\U0010fffe")
