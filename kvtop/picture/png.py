"""A Grid as PNG: Pillow, cell by cell.

Geometry glyphs are drawn from kvtop.glyphs, the rest with a monospace font at hand. Invariant: a glyph
stays inside its cells, and without any font every character still takes its place.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import get_character_cell_size

from kvtop.picture.cells import CELL, Grid, PictureError
from kvtop.picture.glyphs import Polygon, Rect, Shade, Stroke, shapes

if TYPE_CHECKING:
    from PIL import Image, ImageFont

_FONTS = (
    ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSansMono-Oblique.ttf"),
    ("JetBrainsMono-Regular.ttf", "JetBrainsMono-Bold.ttf", "JetBrainsMono-Italic.ttf"),
    ("NotoSansMono-Regular.ttf", "NotoSansMono-Bold.ttf", "NotoSansMono-Regular.ttf"),
    ("LiberationMono-Regular.ttf", "LiberationMono-Bold.ttf", "LiberationMono-Italic.ttf"),
    ("UbuntuMono-R.ttf", "UbuntuMono-B.ttf", "UbuntuMono-RI.ttf"),
    ("Menlo.ttc", "Menlo.ttc", "Menlo.ttc"),
    ("consola.ttf", "consolab.ttf", "consolai.ttf"),
    ("cour.ttf", "courbd.ttf", "couri.ttf"),
    ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf"),  # rare signs: control pictures
)
"""Regular, bold, italic; Pillow finds them by name in the system's font folders."""

_SUPERSAMPLE = 4


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
            room, needs = w * cells, font.getlength(char)
            if needs > room + 0.5:
                font = font.font_variant(size=font.size * room / needs)
                needs = room
            draw.text((max(0.0, (room - needs) / 2), h * 0.75), char, 255, font, anchor="ls")
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
