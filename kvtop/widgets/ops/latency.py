"""TTFT and ITL: time to the first token, and from one token to the next.

Two panels over the state's series, which leave out steps in slow motion. Invariant: a request that read from the cache
differs from a cold one in glyph and in colour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from kvtop.state.series import LATEST
from kvtop.units import duration
from kvtop.widgets.base.graph import (
    Curve,
    Floats,
    Level,
    Scale,
    graph,
    last_values,
    linear,
    logarithmic,
    plot_width,
    quantile,
)
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.panel import Panel

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_WIDEST_BAR = 4


def axis_label(seconds: float) -> str:
    """An end of the axis, shorter than `duration`: 0, 500 ms, 2 s."""
    if seconds <= 0:
        return "0"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


class _Latency(Panel):
    """A graph of durations with p50 and p99, on a linear or logarithmic axis."""

    NEEDS = "timings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("l", "toggle_log", "log axis")]

    log_axis = False
    """Logarithmic axis."""

    def action_toggle_log(self) -> None:
        """Linear axis, logarithmic axis."""
        self.log_axis = not self.log_axis
        self.changed()

    def axis(self, values: Floats) -> Scale:
        """The axis for these durations."""
        return logarithmic(values) if self.log_axis else linear(values)

    def levels(self, values: Floats, height: int) -> list[Level]:
        """p50 and p99 as lines, if the graph is high enough."""
        if height < 4 or len(values) < 2:
            return []
        dim, ordered = self.ink("muted"), np.sort(values)
        return [
            Level(value, name, dim)
            for name, q in (("p99", 0.99), ("p50", 0.5))
            if (value := quantile(ordered, q)) is not None
        ]


class TtftPanel(_Latency):
    """One bar for each request, the newest at the right. Requests that hit have the mark ◆."""

    TITLE = "TTFT · time to first token"
    FIGURES = (
        (
            "TTFT",
            "Time to first token of one request, ms: from its arrival to its first token, waiting included.",
        ),
        ("◆ hit", "The request read part of its prompt from the prefix cache instead of computing it."),
        (
            "p50, p99",
            f"Half, and 99 in 100, of the latest {LATEST:,} requests took at most this long (ms); cold and hit: p50.",
        ),
        ("left out", "Requests whose first token came in a step in slow motion (F3)."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Figures, then bars, then the marks under them."""
        points = state.series.ttft.rows()[-LATEST:]
        if not len(points):
            return [self.say("no first token yet")]
        times, hit = points[:, 1], points[:, 2] > 0
        cold_ink, hit_ink = self.ink("ttft"), self.ink("hit")
        newest = hit_ink if hit[-1] else cold_ink
        ordered = np.sort(times)
        head = self.figures(
            width,
            ("last", duration(times[-1]) + (" ◆" if hit[-1] else ""), newest),
            ("p50", duration(quantile(ordered, 0.5)), None),
            ("p99", duration(quantile(ordered, 0.99)), None),
            ("cold", duration(quantile(np.sort(times[~hit]), 0.5)), cold_ink),
            ("◆ hit", duration(quantile(np.sort(times[hit]), 0.5)), hit_ink),
        )
        if height < 3:
            return [head, *self._graph(width, height - 1, times, hit)]
        return [head, *self._graph(width, height - 2, times, hit), self._marks(width, hit)]

    def _pitch(self, width: int, count: int) -> int:
        """Cells of one bar: more if there are few requests."""
        return max(1, min(_WIDEST_BAR, plot_width(width) // max(1, count)))

    def _graph(self, width: int, height: int, times: Floats, hit: np.ndarray) -> list[Row]:
        if height < 1:
            return []
        columns, pitch = plot_width(width), self._pitch(width, len(times))
        gap = pitch > 1
        spread = np.repeat(times, pitch)
        if gap:
            spread[pitch - 1 :: pitch] = np.nan
        values = last_values(spread, columns)
        cold_ink, hit_ink = self.ink("ttft"), self.ink("hit")
        kinds = last_values(np.repeat(hit.astype(float), pitch), columns)
        styles = [hit_ink if kind == 1 else cold_ink for kind in kinds.tolist()]
        curve = Curve(values, cold_ink, styles=styles)
        shown = times[-max(1, columns // pitch) :]
        scale = self.axis(shown)
        return graph(width, height, [curve], scale, axis_label, self.ink("muted"), self.levels(times, height))

    def _marks(self, width: int, hit: np.ndarray) -> Row:
        columns, pitch = plot_width(width), self._pitch(width, len(hit))
        mark = ("◆" if pitch < 3 else "◆◆" if pitch == 3 else "◆◆◆").ljust(pitch)
        text = "".join(mark if h else "·".ljust(pitch) if pitch > 1 else " " for h in hit.tolist())
        text = text[-columns:].rjust(columns) if columns else ""
        label = f"{'◆ = hit':>{width - columns - 1}} " if columns < width else ""
        return ((label, self.ink("muted")), (text, self.ink("hit")))


class ItlPanel(_Latency):
    """A line through the newest times between tokens of all sequences."""

    TITLE = "ITL · time between tokens"
    FIGURES = (
        ("ITL", "Inter-token latency, ms: from one token of a sequence to its next."),
        (
            "p50, p99, max",
            f"Half, 99 in 100, and all of the latest {LATEST:,} gaps were at most this long (ms).",
        ),
        ("left out", "Steps in slow motion (F3)."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Figures, then the line."""
        columns = plot_width(width)
        latest = state.series.itl.latest()
        if not len(latest):
            return [self.say("no second token yet")]
        values = latest[-max(1, 2 * columns) :]
        ordered = np.sort(latest)
        head = self.figures(
            width,
            ("last", duration(values[-1]), self.ink("itl")),
            ("p50", duration(quantile(ordered, 0.5)), None),
            ("p99", duration(quantile(ordered, 0.99)), None),
            ("max", duration(float(ordered[-1])), None),
        )
        if height < 2:
            return [head]
        curve = Curve(last_values(values, 2 * columns), self.ink("itl"), "line")
        levels = self.levels(latest, height - 1)
        axis = self.axis(values)
        return [
            head,
            *graph(width, height - 1, [curve], axis, axis_label, self.ink("muted"), levels),
        ]
