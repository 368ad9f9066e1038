"""Numbers as people read them: one way to write each unit, everywhere on the screen.

Invariants: a missing figure is NONE, never 0. A percentage is rounded down, so 100 % means all. Every text is ASCII
digits with a unit, and its width changes little from frame to frame.
"""

from __future__ import annotations

import math

NONE = "–"
"""There is no value yet, or no meaningful one (a rate of nothing)."""

NOT_HERE = "not in this source"
"""This source does not have the figure."""


def count(n: float | None) -> str:
    """1040 -> 1,040."""
    return NONE if n is None else f"{int(n):,}"


def duration(seconds: float | None) -> str:
    """0.0004 -> 0.4 ms, 0.041 -> 41 ms, 1.24 -> 1.24 s, 75 -> 75.0 s, 3725 -> 62 min."""
    if seconds is None or math.isnan(seconds):
        return NONE
    ms = seconds * 1000
    if ms < 9.95:
        return f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 599.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min"


def span(seconds: float) -> str:
    """Coarser than `duration`, for ages: 0.3 -> 0 s, 12.7 -> 12 s, 200 -> 3 min, 7300 -> 2 h."""
    if seconds < 120:
        return f"{int(seconds)} s"
    if seconds < 7200:
        return f"{int(seconds / 60)} min"
    return f"{int(seconds / 3600):,} h"


def size(number: float | None) -> str:
    """Bytes in binary units: 201326592 -> 192 MiB, 1288490188 -> 1.2 GiB."""
    if number is None:
        return NONE
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if unit != "B" and abs(value) < 9.95 else f"{value:,.0f} {unit}"


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """Rounded down: 1999 of 2000 is 99 %. NONE if the whole is 0 or unknown."""
    if part is None or not whole or math.isnan(part):
        return NONE
    return f"{math.floor(100 * part / whole + 1e-9)} %"


def rate(per_second: float | None, unit: str) -> str:
    """61.3 tok/s -> 61 tok/s. Below ten it has one digit after the point."""
    if per_second is None or math.isnan(per_second):
        return NONE
    return f"{per_second:.1f} {unit}" if 0 < per_second < 9.95 else f"{per_second:,.0f} {unit}"
