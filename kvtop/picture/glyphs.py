"""The glyphs that must sit exactly on a cell's grid, as geometry instead of a font's idea of them.

Blocks, shades, braille, box drawing and the dashboard's marks are drawn from shapes in pixels of one
cell, so that a picture has no seams and looks the same whatever font is at hand. Everything else
is text. Invariant: edges shared by neighbouring cells fall on the same pixel.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """Filled rectangle [x0, x1) x [y0, y1)."""

    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class Shade:
    """The whole cell covered to density / 4."""

    density: int


@dataclass(frozen=True, slots=True)
class Polygon:
    """Filled polygon."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Stroke:
    """Open polyline of a given width."""

    points: tuple[Point, ...]
    width: float


Shape = Rect | Shade | Polygon | Stroke

_QUADRANTS = {
    "▖": "l",
    "▗": "r",
    "▘": "L",
    "▙": "Llr",
    "▚": "Lr",
    "▛": "LRl",
    "▜": "LRr",
    "▝": "R",
    "▞": "Rl",
    "▟": "Rlr",
}
_BRAILLE = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
_WEIGHTS = {"LIGHT": 1, "HEAVY": 2, "DOUBLE": 3}
_ARMS = {"LEFT": "l", "RIGHT": "r", "UP": "u", "DOWN": "d", "HORIZONTAL": "lr", "VERTICAL": "ud"}
_DASHES = {"DOUBLE": 2, "TRIPLE": 3, "QUADRUPLE": 4}


@lru_cache(maxsize=4096)
def shapes(char: str, w: int, h: int) -> tuple[Shape, ...] | None:
    """Shapes of `char` in a cell of w x h pixels; None when a font has to draw it."""
    code = ord(char)
    if 0x2580 <= code <= 0x259F:
        return _block(char, code, w, h)
    if 0x2800 <= code <= 0x28FF:
        return _braille(code - 0x2800, w, h)
    if 0x2500 <= code <= 0x257F:
        return _box(unicodedata.name(char).removeprefix("BOX DRAWINGS ").split(), w, h)
    return _mark(char, w, h)


def _block(char: str, code: int, w: int, h: int) -> tuple[Shape, ...]:
    if code == 0x2580:
        return (Rect(0, 0, w, h // 2),)
    if code <= 0x2588:
        return (Rect(0, h - round(h * (code - 0x2580) / 8), w, h),)
    if code <= 0x258F:
        return (Rect(0, 0, max(1, round(w * (0x2590 - code) / 8)), h),)
    if code == 0x2590:
        return (Rect(w // 2, 0, w, h),)
    if code <= 0x2593:
        return (Shade(code - 0x2590),)
    if code == 0x2594:
        return (Rect(0, 0, w, max(1, round(h / 8))),)
    if code == 0x2595:
        return (Rect(w - max(1, round(w / 8)), 0, w, h),)
    cut_x, cut_y = w // 2, h // 2
    corners = {
        "L": Rect(0, 0, cut_x, cut_y),
        "R": Rect(cut_x, 0, w, cut_y),
        "l": Rect(0, cut_y, cut_x, h),
        "r": Rect(cut_x, cut_y, w, h),
    }
    return tuple(corners[c] for c in _QUADRANTS[char])


def _braille(bits: int, w: int, h: int) -> tuple[Shape, ...]:
    dot = max(1, round(w / 4))
    columns, rows = w / 2, h / 4
    return tuple(
        Rect(x0, y0, x0 + dot, y0 + dot)
        for bit, (bx, by) in enumerate(_BRAILLE)
        if bits >> bit & 1
        for x0, y0 in [(int(columns * (bx + 0.5) - dot / 2), int(rows * (by + 0.5) - dot / 2))]
    )


def _box(words: list[str], w: int, h: int) -> tuple[Shape, ...] | None:
    """From the Unicode name: a weight, then arms. Names that mix weights are left to the font."""
    weight = _WEIGHTS.get(words[0])
    if weight is None or sum(word in _WEIGHTS for word in words) > 1 + ("DASH" in words):
        return None
    if "DIAGONAL" in words:
        return _diagonal(words, w, h)
    arms = "".join(_ARMS.get(word, "") for word in words)
    thin = max(1, round(w / 10))
    if "ARC" in words:
        return _arc(arms, w, h, thin)
    if "DASH" in words:
        return _dashed(arms, _DASHES[words[1]], thin * weight, w, h)
    if weight == 3:
        return _double(arms, thin, w, h)
    thick = thin * weight
    x0, y0 = (w - thick) // 2, (h - thick) // 2
    x1, y1 = x0 + thick, y0 + thick
    ends = {"l": (0, y0, x1, y1), "r": (x0, y0, w, y1), "u": (x0, 0, x1, y1), "d": (x0, y0, x1, h)}
    return tuple(Rect(*ends[a]) for a in arms)


def _diagonal(words: list[str], w: int, h: int) -> tuple[Shape, ...]:
    rising, falling = ((0.0, float(h)), (float(w), 0.0)), ((0.0, 0.0), (float(w), float(h)))
    width = max(1, round(w / 10))
    if "CROSS" in words:
        return (Stroke(rising, width), Stroke(falling, width))
    return (Stroke(rising if words[2:4] == ["UPPER", "RIGHT"] else falling, width),)


def _arc(arms: str, w: int, h: int, thin: int) -> tuple[Shape, ...]:
    x0, y0 = (w - thin) // 2, (h - thin) // 2
    cx, cy = x0 + thin / 2, y0 + thin / 2
    side, turn = (-1 if "l" in arms else 1), (-1 if "u" in arms else 1)
    # The last pixels before the cell's edges are straight, so that they meet the lines beside them.
    radius = max(1.0, min(x0, y0) - 1)
    middle_x, middle_y = cx + side * radius, cy + turn * radius
    bend = tuple(
        (middle_x - side * radius * math.cos(a), middle_y - turn * radius * math.sin(a))
        for a in (i * math.pi / 16 for i in range(9))
    )
    across = Rect(0, y0, middle_x, y0 + thin) if side < 0 else Rect(middle_x, y0, w, y0 + thin)
    down = Rect(x0, 0, x0 + thin, middle_y) if turn < 0 else Rect(x0, middle_y, x0 + thin, h)
    return (across, down, Stroke(bend, thin))


def _dashed(arms: str, count: int, thick: int, w: int, h: int) -> tuple[Shape, ...]:
    length = w if arms == "lr" else h
    gap = max(1, round(length / count / 3))
    pieces = []
    for i in range(count):
        start, stop = round(length * i / count) + gap // 2, round(length * (i + 1) / count) - (gap - gap // 2)
        across = ((h if arms == "lr" else w) - thick) // 2
        pieces.append(
            Rect(start, across, stop, across + thick)
            if arms == "lr"
            else Rect(across, start, across + thick, stop)
        )
    return tuple(pieces)


def _double(arms: str, thin: int, w: int, h: int) -> tuple[Shape, ...]:
    x0, y0 = (w - 3 * thin) // 2, (h - 3 * thin) // 2
    x1, y1 = x0 + 2 * thin, y0 + 2 * thin
    pieces: list[Shape] = []
    # A rail stops at the near rail of a crossing arm, else runs to the far side of the joint.
    for y, inner in ((y0, "u"), (y1, "d")):
        if "l" in arms:
            pieces.append(Rect(0, y, (x0 if inner in arms else x1) + thin, y + thin))
        if "r" in arms:
            pieces.append(Rect(x1 if inner in arms else x0, y, w, y + thin))
    for x, inner in ((x0, "l"), (x1, "r")):
        if "u" in arms:
            pieces.append(Rect(x, 0, x + thin, (y0 if inner in arms else y1) + thin))
        if "d" in arms:
            pieces.append(Rect(x, y1 if inner in arms else y0, x + thin, h))
    return tuple(pieces)


def _mark(char: str, w: int, h: int) -> tuple[Shape, ...] | None:
    cx, cy = w / 2, h / 2
    if char in "◆◇":
        rx, ry = w * 0.46, w * 0.6
        points = ((cx, cy - ry), (cx + rx, cy), (cx, cy + ry), (cx - rx, cy))
        return (Polygon(points),) if char == "◆" else (Stroke((*points, points[0]), max(1, w / 10)),)
    if char == "·":
        size = max(1, round(w / 5))
        x0, y0 = round(cx - size / 2), round(cy - size / 2)
        return (Rect(x0, y0, x0 + size, y0 + size),)
    if char == "×":
        r = w * 0.36
        width = max(1.0, w / 6)
        return (
            Stroke(((cx - r, cy - r), (cx + r, cy + r)), width),
            Stroke(((cx - r, cy + r), (cx + r, cy - r)), width),
        )
    if char in "●○":
        r = w * (0.42 if char == "●" else 0.38)
        ring = tuple(
            (cx + r * math.cos(a), cy + r * math.sin(a)) for a in (i * math.pi / 12 for i in range(24))
        )
        return (Polygon(ring),) if char == "●" else (Stroke((*ring, ring[0]), max(1, w / 8)),)
    return None
