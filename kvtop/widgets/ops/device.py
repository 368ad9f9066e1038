"""Device: how busy it is and what is in its memory.

Invariants: a figure that no DeviceSample has is NOT_HERE. Memory is split into weights and KV, which the engine knows,
and the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtop.text import safe_text
from kvtop.units import NOT_HERE, percent, size
from kvtop.widgets.base.graph import Curve, Scale, graph, last_values, plot_width
from kvtop.widgets.base.lines import Part, Row
from kvtop.widgets.base.panel import Panel
from kvtop.widgets.base.table import cut, progress
from kvtop.widgets.ops.budget import shares
from kvtop.widgets.ops.kernels import limit_of, of_roofline

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

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
        (
            "traffic",
            "Bytes a second between one GPU's memory and its cores; only a simulated device reports it.",
        ),
        ("power", "Watts drawn now, from the driver. CPUs do not report it."),
        (
            "roofline",
            "Least time that the latest profiled step's bytes and operations take at rates measured here, of the time "
            "it took. bandwidth: by its bytes alone, where no rate of operations is known.",
        ),
        (
            "graphs",
            "Decode steps of up to this number of sequences run as one CUDA graph, captured at first use.",
        ),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """One line for each figure, then the graph of use."""
        started = state.started
        assert started is not None
        known = "device" in started.capabilities
        series = state.series
        util = series.util.last() if known else None
        sample = state.engine.device if known else None
        rows: list[Row] = [
            self._line("use", percent(util, 100), width, None if util is None else util / 100, known),
            *self._memory(state, width, known),
            self._line("power", _watts(sample.power if sample else None), width, None, known),
        ]
        if state.engine.profile is not None and (part := of_roofline(state.engine.profile)) is not None:
            rows.append(self._line(limit_of(state.engine.profile), percent(part), width, part, True))
        if sample is not None and sample.bandwidth is not None:
            rows.append(self._line("traffic", f"{sample.bandwidth / 1e9:,.0f} GB/s", width, None, True))
        if sample is not None and sample.temperature is not None:
            rows.append(self._line("temperature", f"{sample.temperature:.0f} °C", width, None, True))
        if state.engine.graphs:
            sizes = " ".join(map(str, state.engine.graphs))
            rows.append((("graphs".ljust(_LABEL), self.ink("muted")), (sizes, self.ink("text"))))
        rows.append(
            (("runs on", self.ink("muted")), (" " * (_LABEL - 7), self.ink("muted")), self._runs_on(state))
        )
        left = height - len(rows)
        values = series.util.values()
        if known and left >= 3 and len(values) > 1:
            curve = Curve(last_values(values, plot_width(width)), self.ink("device"))
            axis = Scale(0.0, 100.0)
            rows += graph(width, min(left, 8), [curve], axis, lambda v: f"{v:.0f} %", self.ink("muted"))
        return [tuple(cut(row, width)) for row in rows]

    def _runs_on(self, state: DashboardState) -> Part:
        started = state.started
        assert started is not None
        through = " · transformers" if started.knobs.ops == "transformers" else ""
        return f"{safe_text(started.device)} · {safe_text(started.dtype)}{through}", self.ink("text")

    def _line(self, name: str, value: str, width: int, part: float | None, known: bool) -> Row:
        muted = self.ink("muted")
        label = (name.ljust(_LABEL), muted)
        if not known or value == NOT_HERE:
            return (label, (NOT_HERE, muted))
        room = min(24, width - _LABEL - len(value) - 2)
        if part is None or room < 4:
            return (label, (value, self.ink("text")))
        return (label, (progress(part, room) + "  ", self.ink("device")), (value, self.ink("text")))

    def _memory(self, state: DashboardState, width: int, known: bool) -> list[Row]:
        started, sample = state.started, state.engine.device
        assert started is not None
        weights, kv = started.weights_bytes, started.num_blocks * started.bytes_per_block
        used = sample.memory if sample is not None and known else None
        total = sample.memory_total if sample is not None else None
        muted, text = self.ink("muted"), self.ink("text")
        split: list[Part] = [
            ("  █", self.ink("device")),
            (" weights ", muted),
            (size(weights), text),
            ("  ▓", self.ink("cached")),
            (" KV ", muted),
            (size(kv), text),
        ]
        if used is None:
            return [self._line("memory", NOT_HERE, width, None, known), tuple(split)]
        value = size(used) + (f" of {size(total)}" if total else "")
        rows = [self._line("memory", value, width, used / total if total else None, True)]
        other = used - weights - kv
        # Weights may be mapped and blocks not yet written: then they are not in use, and nothing is split.
        if other >= 0:
            cells = shares((weights, kv, other), max(3, min(24, width - _LABEL)))
            looks = (("█", "device"), ("▓", "cached"), ("▒", "muted"))
            bars = [(glyph * n, self.ink(name)) for n, (glyph, name) in zip(cells, looks, strict=True)]
            rows.append((("  of it".ljust(_LABEL), muted), *bars))
            rest: list[Part] = [("  ▒ other ", muted), (size(other), text)]
            if sum(len(word) for word, _ in split + rest) <= width:
                split += rest
        return [*rows, tuple(split)]


def _watts(power: float | None) -> str:
    return NOT_HERE if power is None else f"{power:.0f} W"
