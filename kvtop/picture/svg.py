"""A Grid as SVG: geometry glyphs as shapes, text stretched to its cells.

Invariant: whatever font a viewer has, nothing leaves its cell; equal glyphs of a run are one element, which
keeps the file small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from rich.cells import get_character_cell_size

from kvtop.picture.cells import CELL, Grid, Rgb, Run
from kvtop.picture.glyphs import Polygon, Rect, Shade, Shape, Stroke, shapes

_SVG_FONTS = "'DejaVu Sans Mono','JetBrains Mono',Menlo,Consolas,'Liberation Mono',monospace"


def to_svg(grid: Grid) -> bytes:
    """SVG 1.1 whose geometry glyphs are shapes and whose text is stretched to its cells."""
    w, h = CELL
    page = _page(grid)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {grid.width * w} {grid.height * h}" '
        f'width="{grid.width * w}" height="{grid.height * h}" font-family="{_SVG_FONTS}" '
        f'font-size="{h * 0.83:g}" shape-rendering="crispEdges" xml:space="preserve">',
        f'<rect width="100%" height="100%" fill="{_hex(page)}"/>',
    ]
    for y, row in enumerate(grid.rows):
        for run in row:
            if run.bg != page:
                out.append(_rect(run.x * w, y * h, run.width * w, h, _hex(run.bg)))
            out += _run(run, y * h)
    out.append("</svg>\n")
    return "\n".join(out).encode()


def _page(grid: Grid) -> Rgb:
    """The commonest background: only what differs from it needs an element."""
    cells: Counter[Rgb] = Counter()
    for row in grid.rows:
        for run in row:
            cells[run.bg] += run.width
    return cells.most_common(1)[0][0] if cells else grid.bg


def _run(run: Run, top: int) -> Iterator[str]:
    w, h = CELL
    fill = _hex(run.fg)
    stretches, glyphs = _parts(run)
    looks = "".join((' font-weight="bold"' * run.bold, ' font-style="italic"' * run.italic))
    for x, width, text in stretches:
        yield (
            f'<text x="{x * w}" y="{top + h * 0.75:g}" textLength="{width * w}" '
            f'lengthAdjust="spacingAndGlyphs" fill="{fill}"{looks}>{escape(text, quote=False)}</text>'
        )
    for glyph, places in glyphs.items():
        yield from _glyphs(shapes(glyph, w, h) or (), places, top, fill)
    for level, wanted in ((h - 2, run.underline), (h // 2, run.strike)):
        if wanted:
            yield _rect(run.x * w, top + level, run.width * w, 1, fill)


def _glyphs(drawn: Sequence[Shape], places: Sequence[int], y: int, fill: str) -> Iterator[str]:
    """The same glyph at several cells of a row, each kind of shape as one element."""
    w, h = CELL
    boxes, outlines, lines, thickness = [], [], [], 1.0
    for shape in drawn:
        match shape:
            case Rect() if shape.x0 == 0 and shape.x1 == w:
                # One rectangle for a row of bars, so that no renderer leaves a seam.
                boxes += [_box(x, y + shape.y0, wide, shape.y1 - shape.y0) for x, wide in _rows(places)]
            case Rect():
                across, down = shape.x1 - shape.x0, shape.y1 - shape.y0
                boxes += [_box(x * w + shape.x0, y + shape.y0, across, down) for x in places]
            case Shade():
                path = "".join(_box(x, y, wide, h) for x, wide in _rows(places))
                yield f'<path d="{path}" fill="{fill}" fill-opacity="{shape.density / 4:g}"/>'
            case Polygon():
                outlines += [_path(shape.points, x * w, y) + "z" for x in places]
            case Stroke():
                lines += [_path(shape.points, x * w, y) for x in places]
                thickness = shape.width
    if boxes:
        yield f'<path d="{"".join(boxes)}" fill="{fill}"/>'
    if outlines:
        yield f'<path d="{"".join(outlines)}" fill="{fill}" shape-rendering="auto"/>'
    if lines:
        yield (
            f'<path d="{"".join(lines)}" fill="none" stroke="{fill}" stroke-width="{thickness:g}" '
            f'shape-rendering="auto"/>'
        )


def _rows(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(x, width) in pixels of each row of neighbouring cells."""
    w = CELL[0]
    start = last = None
    for x in places:
        if last is not None and x == last + 1:
            last = x
            continue
        if start is not None and last is not None:
            yield start * w, (last - start + 1) * w
        start = last = x
    if start is not None and last is not None:
        yield start * w, (last - start + 1) * w


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z"


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _path(points: Sequence[tuple[float, float]], x: int, y: int) -> str:
    """Absolute start, then steps: half the bytes of absolute points."""
    steps = (f"{round(b[0] - a[0], 2):g} {round(b[1] - a[1], 2):g}" for a, b in pairwise(points))
    return f"M{round(x + points[0][0], 2):g} {round(y + points[0][1], 2):g}l{' '.join(steps)}"


def _parts(run: Run) -> tuple[list[tuple[int, int, str]], dict[str, list[int]]]:
    """(x, cells, text) of each stretch of text, wide characters on their own; and the places of each
    geometry glyph. Blanks are in neither, unless text goes on after one."""
    w, h = CELL
    stretches: list[tuple[int, int, str]] = []
    glyphs: dict[str, list[int]] = {}
    x = run.x
    going = False
    for char in run.text:
        cells = get_character_cell_size(char)
        if shapes(char, w, h) is not None:
            glyphs.setdefault(char, []).append(x)
            going = False
        elif going and cells < 2:
            start, width, text = stretches[-1]
            stretches[-1] = (start, width + cells, text + char)
        elif cells and char != " ":
            stretches.append((x, cells, char))
            going = cells == 1
        x += cells
    trimmed = [(at, width - len(text) + len(text.rstrip()), text.rstrip()) for at, width, text in stretches]
    return trimmed, glyphs


def _hex(color: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
