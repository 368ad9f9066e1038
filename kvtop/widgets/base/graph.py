"""Graphs in rows of text: bars of eighth blocks, lines of braille dots, levels and an axis.

Pure functions from columns of numbers to Rows. Invariants: one column of cells is one value (two for a line). NaN draws
nothing. A value above the low end of the axis is always visible. The axis ends in a round number, so that it seldom
changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from kvtop.widgets.base.lines import Row

Floats = NDArray[np.float64]
Cells = NDArray[np.uint32]
"""Code points, [rows, columns], top row first."""

EIGHTHS = np.array([ord(c) for c in " ▁▂▃▄▅▆▇█"], np.uint32)
_BLANK, _DOTTED, _BRAILLE = ord(" "), ord("┈"), 0x2800
GUTTER = 8
"""Cells for the axis' labels; narrower graphs than NARROW do without."""
NARROW = 32
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


# ------------------------------------------------------------------------------------------ scales


@dataclass(frozen=True, slots=True)
class Scale:
    """The axis: values from low (the foot) to high (the top), linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def fraction(self, values: Floats) -> Floats:
        """0 at the foot, 1 at the top, cut to that range; NaN stays NaN."""
        if self.log:
            foot, top = math.log(self.low), math.log(self.high)
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log(np.maximum(values, self.low))
        else:
            foot, top = self.low, self.high
        return np.clip((values - foot) / max(top - foot, 1e-12), 0.0, 1.0)


def linear(values: Floats, least: float = 0.0) -> Scale:
    """From 0 to a round number at or above the largest value (and at least `least`)."""
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    return Scale(0.0, round_up(max(top, least, 1e-9)))


def logarithmic(values: Floats) -> Scale:
    """From a power of ten below the smallest positive value (at least 1e-9) to one above the largest."""
    known = values[np.isfinite(values) & (values > 0)]
    if not known.size:
        return Scale(0.1, 1.0, log=True)
    low = 10.0 ** math.floor(math.log10(max(known.min(), 1e-9)) + 1e-9)
    high = 10.0 ** math.ceil(math.log10(max(known.max(), 1e-9)) - 1e-9)
    return Scale(low, high if high > low else low * 10, log=True)


def round_up(value: float) -> float:
    """The next round number: 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
        if value <= step * power * (1 + 1e-9):
            return step * power
    return 10.0 * power


# ---------------------------------------------------------------------------------------- columns


def last_values(values: Floats, columns: int) -> Floats:
    """The newest `columns` values, NaN before the first."""
    out = np.full(max(columns, 0), np.nan)
    tail = values[-columns:] if columns > 0 else values[:0]
    if len(tail):
        out[-len(tail) :] = tail
    return out


def quantile(ordered: Floats, q: float) -> float | None:
    """q in 0..1 of sorted values, linear between ranks as numpy's default; None without values. (np.percentile
    takes 50 us, most of what a small panel costs.)"""
    if not len(ordered):
        return None
    place = (len(ordered) - 1) * q
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def plot_width(width: int) -> int:
    """Columns left for values in a graph `width` cells wide."""
    return width - GUTTER if width >= NARROW else max(width, 0)


# ----------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True, slots=True)
class Curve:
    """values: one a column as bars, two a column as a line. styles: one a column, instead of `style`."""

    values: Floats
    style: Style
    kind: Literal["bars", "line"] = "bars"
    styles: Sequence[Style] | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """A dotted line across at a value, with a short name in the gutter."""

    value: float
    name: str
    style: Style


def bar_levels(values: Floats, rows: int, scale: Scale) -> NDArray[np.intp]:
    """Eighths of a cell that each bar is high, 0 to 8 * rows; 0 only for NaN and for the foot."""
    part = scale.fraction(values)
    eighths = np.where(np.isnan(part), 0.0, np.round(part * rows * 8))
    floor = np.where(values > (0 if scale.log else scale.low), 1, 0)
    return np.maximum(eighths, floor).astype(np.intp)


def bars(values: Floats, rows: int, scale: Scale) -> list[str]:
    """Bars as text, top row first."""
    return _text(_bars(values, rows, scale))


def _bars(values: Floats, rows: int, scale: Scale) -> Cells:
    base = (np.arange(rows)[::-1] * 8)[:, None]
    return EIGHTHS[np.clip(bar_levels(values, rows, scale)[None, :] - base, 0, 8)]


def line(values: Floats, rows: int, scale: Scale) -> list[str]:
    """A line of braille dots (2 x 4 a cell) through values two a column; a gap where one is NaN."""
    return _text(_line(values, rows, scale))


def _line(values: Floats, rows: int, scale: Scale) -> Cells:
    columns = len(values) // 2
    grid = [[0] * columns for _ in range(rows)]
    heights = (1 - scale.fraction(values[: columns * 2])) * (rows * 4 - 1)
    previous: int | None = None
    for x, height in enumerate(heights.tolist()):
        if math.isnan(height):
            previous = None
            continue
        y = round(height)
        if previous is None or abs(y - previous) <= 1:
            steps = range(y, y + 1)
        else:  # up to the dot of the neighbour, which is there already
            steps = range(previous + 1, y + 1) if y > previous else range(y, previous)
        for step in steps:
            grid[step // 4][x // 2] |= _DOTS[step % 4][x % 2]
        previous = y
    dots = np.array(grid, np.uint32).reshape(rows, columns)
    return np.where(dots > 0, dots + _BRAILLE, _BLANK).astype(np.uint32)


def _text(cells: Cells) -> list[str]:
    little = np.ascontiguousarray(cells, "<u4")
    return [row.tobytes().decode("utf-32-le") for row in little]


def graph(
    width: int,
    height: int,
    curves: Sequence[Curve],
    scale: Scale,
    label: Callable[[float], str],
    axis: Style,
    levels: Sequence[Level] = (),
) -> list[Row]:
    """`height` rows, each `width` cells wide: the gutter with the axis' ends and the levels' names,
    then the plot. Later curves lie over earlier ones, levels under all."""
    if width <= 0 or height <= 0:
        return []
    columns = plot_width(width)
    cells = np.full((height, columns), _BLANK, np.uint32)
    looks = np.zeros((height, columns), np.intp)
    styles = [axis]
    names = {0: label(scale.high), height - 1: label(scale.low)} if height > 1 else {0: label(scale.high)}
    for level in levels:
        fraction = float(scale.fraction(np.array([level.value]))[0])
        y = height - 1 - min(height - 1, int(fraction * height))
        if y in names:  # the label of the axis would be read as the value of this line
            continue
        cells[y] = _DOTTED
        looks[y] = _look(styles, level.style)
        names[y] = level.name
    for curve in curves:
        drawn = (_bars if curve.kind == "bars" else _line)(curve.values, height, scale)[:, :columns]
        own = [_look(styles, style) for style in curve.styles or (curve.style,)]
        inked = drawn != _BLANK
        np.copyto(cells[:, : drawn.shape[1]], drawn, where=inked)
        np.copyto(looks[:, : drawn.shape[1]], np.array(own)[None, : drawn.shape[1]], where=inked)
    gutter = GUTTER if columns < width else 0
    rows: list[Row] = []
    for y, text in enumerate(_text(cells)):
        name = names.get(y, "")[: max(0, gutter - 1)]
        margin = ((f"{name:>{gutter - 1}} ", axis),) if gutter else ()
        rows.append(margin + _runs(text, looks[y], styles))
    return rows


def _look(styles: list[Style], style: Style) -> int:
    """Index of `style` in `styles`, where a new one is added. Compared by identity: a comparison by value costs more
    than an entry."""
    for place, known in enumerate(styles):
        if known is style:
            return place
    styles.append(style)
    return len(styles) - 1


def _runs(text: str, looks: NDArray[np.intp], styles: Sequence[Style]) -> Row:
    cuts = (np.flatnonzero(looks[1:] != looks[:-1]) + 1).tolist()
    starts, stops = [0, *cuts], [*cuts, len(text)]
    return tuple((text[a:b], styles[looks[a]]) for a, b in zip(starts, stops, strict=True) if b > a)
