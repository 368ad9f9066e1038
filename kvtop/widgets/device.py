"""Device: how busy it is and what its memory holds, as far as it tells.

Invariant: what no DeviceSample ever told reads NOT_HERE; memory is split into weights and KV, which
the engine knows, and the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtop.text import safe_text
from kvtop.units import NOT_HERE, percent, size
from kvtop.widgets.graph import Curve, Scale, graph, last_values, plot_width
from kvtop.widgets.lines import Part, Row
from kvtop.widgets.panel import Panel
from kvtop.widgets.table import bar, cut

if TYPE_CHECKING:
    from kvtop.state import DashboardState

_LABEL = 12


class DevicePanel(Panel):
    """Use, memory, power, temperature."""

    TITLE = "device"
    FIGURES = (
        (
            "use",
            "Percent. GPU: share of time in which a kernel ran. CPU: this process's share of all cores.",
        ),
        (
            "memory",
            "Bytes in use of those there are. GPU: of all programs on it. CPU: this process's resident set.",
        ),
        ("weights", "Bytes of the model's parameters as they are held."),
        ("KV", "Bytes of the block pool: blocks x bytes a block, reserved at the start, used or not."),
        ("other", "The rest of the memory in use: activations, libraries, other programs."),
        ("power", "Watts drawn now, as the driver tells; CPUs do not tell."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """A line a figure; the history of use takes what is left."""
        started = state.started
        assert started is not None
        tells = "device" in started.capabilities
        series = state.series
        util = series.util.last() if tells else None
        sample = state.device if tells else None
        rows: list[Row] = [
            self._line("use", percent(util, 100), width, None if util is None else util / 100, tells),
            *self._memory(state, width, tells),
            self._line("power", _watts(sample.power if sample else None), width, None, tells),
        ]
        if sample is not None and sample.temperature is not None:
            rows.append(self._line("temperature", f"{sample.temperature:.0f} °C", width, None, True))
        rows.append(
            (("runs on", self.ink("muted")), (" " * (_LABEL - 7), self.ink("muted")), self._runs_on(state))
        )
        left = height - len(rows)
        values = series.util.values()
        if tells and left >= 3 and len(values) > 1:
            curve = Curve(last_values(values, plot_width(width)), self.ink("device"))
            axis = Scale(0.0, 100.0)
            rows += graph(width, min(left, 8), [curve], axis, lambda v: f"{v:.0f} %", self.ink("muted"))
        return [tuple(cut(row, width)) for row in rows]

    def _runs_on(self, state: DashboardState) -> Part:
        started = state.started
        assert started is not None
        return f"{safe_text(started.device)} · {safe_text(started.dtype)}", self.ink("text")

    def _line(self, name: str, value: str, width: int, part: float | None, tells: bool) -> Row:
        muted = self.ink("muted")
        label = (name.ljust(_LABEL), muted)
        if not tells or value == NOT_HERE:
            return (label, (NOT_HERE, muted))
        room = min(24, width - _LABEL - len(value) - 2)
        if part is None or room < 4:
            return (label, (value, self.ink("text")))
        return (label, (bar(part, room) + "  ", self.ink("device")), (value, self.ink("text")))

    def _memory(self, state: DashboardState, width: int, tells: bool) -> list[Row]:
        started, sample = state.started, state.device
        assert started is not None
        kv = started.num_blocks * started.bytes_per_block
        used = sample.memory if sample else None
        total = sample.memory_total if sample else None
        muted, text = self.ink("muted"), self.ink("text")
        split: list[Part] = [
            ("  weights   ", muted),
            (size(started.weights_bytes), self.ink("device")),
            ("   KV ", muted),
            (size(kv), self.ink("cached")),
        ]
        if not tells or used is None:
            return [self._line("memory", NOT_HERE, width, None, tells), tuple(split)]
        other = used - started.weights_bytes - kv
        # The weights may be memory-mapped and the pool not yet touched: then they are not in use.
        if other >= 0:
            split += [("   other ", muted), (size(other), text)]
        value = size(used) + (f" of {size(total)}" if total else "")
        room = min(24, width - _LABEL - len(value) - 2)
        if not total or room < 4:
            return [self._line("memory", value, width, None, True), tuple(split)]
        edges = np.clip(np.array([started.weights_bytes, started.weights_bytes + kv, used]) / total, 0, 1)
        cells = (
            np.round(edges * room).astype(int).tolist() if other >= 0 else [0, 0, round(used / total * room)]
        )
        line: list[Part] = [
            ("memory".ljust(_LABEL), muted),
            ("█" * cells[0], self.ink("device")),
            ("▓" * (cells[1] - cells[0]), self.ink("cached")),
            ("▒" * (cells[2] - cells[1]), muted),
            ("·" * (room - cells[2]) + "  ", muted),
            (value, text),
        ]
        return [tuple(line), tuple(split)]


def _watts(power: float | None) -> str:
    return NOT_HERE if power is None else f"{power:.0f} W"
