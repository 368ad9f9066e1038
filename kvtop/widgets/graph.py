"""Graphs in rows of text: bars of eighth blocks, lines of braille dots, levels and an axis.

Pure functions from columns of numbers to Rows; panels put them under their own figures. Invariants:
one column of cells is one value (two for a line), NaN draws nothing, a value above the axis' foot
is never invisible, and the axis ends in a round number so that the picture stays calm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from kvtop.widgets.lines import Row

Floats = NDArray[np.float64]

EIGHTHS = np.array(list(" ▁▂▃▄▅▆▇█"))
GUTTER = 8
"""Cells for the axis' labels; narrower graphs than NARROW do without."""
NARROW = 32
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], np.uint16)


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


def in_time(times: Floats, values: Floats, start: float, stop: float, columns: int) -> Floats:
    """Largest value in each of `columns` equal pieces of [start, stop), NaN where there is none."""
    out = np.full(max(columns, 0), -np.inf)
    if columns > 0 and len(times) and stop > start:
        place = np.floor((times - start) / (stop - start) * columns).astype(np.intp)
        inside = (place >= 0) & (place < columns) & np.isfinite(values)
        np.maximum.at(out, place[inside], values[inside])
    out[np.isneginf(out)] = np.nan
    return out


def last_values(values: Floats, columns: int) -> Floats:
    """The newest `columns` values, NaN before the first."""
    out = np.full(max(columns, 0), np.nan)
    tail = values[-columns:] if columns > 0 else values[:0]
    if len(tail):
        out[-len(tail) :] = tail
    return out


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
    base = (np.arange(rows)[::-1] * 8)[:, None]
    index = np.clip(bar_levels(values, rows, scale)[None, :] - base, 0, 8)
    return ["".join(row) for row in EIGHTHS[index]]


def sparkline(values: Floats, width: int, scale: Scale | None = None) -> str:
    """One row of bars over the newest `width` values."""
    shown = last_values(values, width)
    return bars(shown, 1, scale or linear(shown))[0]


def line(values: Floats, rows: int, scale: Scale) -> list[str]:
    """A line of braille dots (2 x 4 a cell) through values two a column; a gap where one is NaN."""
    columns = len(values) // 2
    grid = np.zeros((rows, columns), np.uint16)
    part = scale.fraction(values[: columns * 2])
    height = rows * 4 - 1
    previous: int | None = None
    for x, fraction in enumerate(part.tolist()):
        if math.isnan(fraction):
            previous = None
            continue
        y = round((1 - fraction) * height)
        first, last = (y, y) if previous is None else (min(previous, y), max(previous, y))
        # The neighbour's own dot is there already: join up to it only.
        if previous is not None and last - first > 1:
            first, last = (first + 1, last) if previous == first else (first, last - 1)
        else:
            first = last = y
        for step in range(first, last + 1):
            grid[step // 4, x // 2] |= _DOTS[step % 4, x % 2]
        previous = y
    return ["".join(chr(0x2800 + int(c)) if c else " " for c in row) for row in grid]


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
    chars = np.full((height, columns), " ", "<U1")
    looks: list[list[Style]] = [[axis] * columns for _ in range(height)]
    names = {0: label(scale.high), height - 1: label(scale.low)} if height > 1 else {0: label(scale.high)}
    for level in levels:
        fraction = float(scale.fraction(np.array([level.value]))[0])
        y = height - 1 - min(height - 1, int(fraction * height))
        chars[y, :] = "┈"
        looks[y] = [level.style] * columns
        names.setdefault(y, level.name)
    for curve in curves:
        _lay(curve, chars, looks, scale)
    gutter = GUTTER if columns < width else 0
    rows: list[Row] = []
    for y in range(height):
        name = names.get(y, "")[: max(0, gutter - 1)]
        margin = ((f"{name:>{gutter - 1}} ", axis),) if gutter else ()
        rows.append(margin + _runs(chars[y].tolist(), looks[y]))
    return rows


def _lay(curve: Curve, chars: NDArray[np.str_], looks: list[list[Style]], scale: Scale) -> None:
    height, columns = chars.shape
    text = (bars if curve.kind == "bars" else line)(curve.values, height, scale)
    styles = curve.styles or [curve.style] * columns
    for y, row in enumerate(text):
        for x, char in enumerate(row[:columns]):
            if char != " ":
                chars[y, x] = char
                looks[y][x] = styles[x]


def _runs(chars: list[str], looks: list[Style]) -> Row:
    parts: list[tuple[str, Style]] = []
    start = 0
    for x in range(1, len(chars) + 1):
        if x == len(chars) or looks[x] is not looks[start]:
            parts.append(("".join(chars[start:x]), looks[start]))
            start = x
    return tuple(parts) if chars else ()
