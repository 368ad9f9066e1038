"""Throughput: tokens a second, decoded and prefilled.

Each has a graph with its own axis, because a prefill has many times the rate of a decode. Invariant: the rates are
those of the series (tokens of executed steps over the clock of the batches); nothing is smoothed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtop.state.series import Rate
from kvtop.units import count, rate, span
from kvtop.widgets.base.graph import Curve, Floats, graph, linear, plot_width
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.panel import Panel

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

LONGEST = 300.0
"""Longest time that a graph shows, seconds."""


class ThroughputPanel(Panel):
    """Decode above, prefill below."""

    TITLE = "throughput"
    FIGURES = (
        ("decode", "Output tokens per second, all sequences together, over the last 2 s."),
        (
            "prefill",
            "Prompt tokens computed per second over the last 2 s. Tokens from the cache are not computed.",
        ),
        ("peak", "Largest such rate since the start."),
        ("total", "Tokens since the start."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """One line of figures and a graph for each of the two."""
        rows: list[Row] = []
        series = state.series
        half = height // 2
        for name, source, tall in (
            ("decode", series.output, height - half),
            ("prefill", series.prefill, half),
        ):
            rows += self._one(name, source, now, width, tall)
        return rows

    def _one(self, name: str, source: Rate, now: float, width: int, height: int) -> list[Row]:
        if height < 1:
            return []
        ink = self.ink(name)
        seconds, values = history(source, now, plot_width(width))
        head = self.figures(
            width,
            (name, rate(source.now(now), "tok/s"), ink),
            ("peak", rate(source.peak(now), "tok/s"), None),
            ("total", count(source.total), None),
            ("last", span(seconds), None),
        )
        if height < 2:
            return [head]
        curve = Curve(values, ink)
        return [head, *graph(width, height - 1, [curve], linear(values, 1.0), _axis, self.ink("muted"))]


def _axis(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else f"{value / 1e3:,.0f}k"


def history(source: Rate, now: float, columns: int) -> tuple[float, Floats]:
    """(seconds shown, mean rate per column), the newest at the right: as many buckets a column as it
    takes to show the whole run, up to LONGEST; NaN before the run began."""
    if columns < 1:
        return 0.0, np.zeros(0)
    bucket = source.bucket
    per_column = max(1, int(np.ceil(min(now, LONGEST) / bucket / columns)))
    # Columns begin at multiples of their length, so that a bar never changes once its time is over.
    last = int(now / bucket) // per_column
    until = ((last + 1) * per_column - 1) * bucket + bucket / 2
    times, rates = source.points(until, columns * per_column * bucket)
    wanted = columns * per_column
    rates = np.concatenate([np.full(max(0, wanted - len(rates)), np.nan), rates])[-wanted:]
    times = np.concatenate([np.full(max(0, wanted - len(times)), -1.0), times])[-wanted:]
    rates[times < 0] = np.nan
    # A bucket that is not over yet would dip at the right edge in every frame.
    rates[times + bucket > now + 1e-9] = np.nan
    table = rates.reshape(columns, per_column)
    filled = np.isfinite(table)
    sums = np.where(filled, table, 0.0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / filled.sum(1)
    return columns * per_column * bucket, means
