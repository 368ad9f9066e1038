"""Kernels: the time of each kernel in a profiled step, and the part of the roofline that it reached.

Owns the arithmetic of the roofline. The least time of a kernel is the longer of two: its bytes at the measured
bandwidth, and its operations at the measured rate. Invariant: the lines add up to the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtop.text import safe_text
from kvtop.units import NONE, count, duration, percent
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.panel import Panel
from kvtop.widgets.base.table import Cell, Column, fit, progress, table

if TYPE_CHECKING:
    from engine.events import KernelsProfiled
    from kvtop.state.dashboard import DashboardState

_BAR = 4
"""Least cells of a bar."""
_PERCENT = 6


class KernelsPanel(Panel):
    """One line for each kernel, the longest first."""

    TITLE = "device · kernels of one step"
    FIGURES = (
        (
            "tokens",
            "Of the step that was timed, with its sequences: every 10 s one that only decodes and one with a prompt.",
        ),
        ("forward", "Time of its forward pass, kernel by kernel (ms). On a GPU it runs without a graph."),
        (
            "roofline",
            "Least time that the kernel's bytes and operations take at the measured rates, of the time it took; over "
            "100 % where a cache gave more than memory, or the rates were measured while the machine was busy. "
            "bandwidth: the same, where only that rate is known.",
        ),
        ("copy, read", "Bytes a second of a plain copy (GPU) or read (CPU), measured at the start."),
        (
            "kernel",
            "All layers together. norm: RMSNorm and the residual's sum; qkv_prepare: QK-norm, RoPE, the write into "
            "blocks.",
        ),
        ("ms, share", "Time on the device, and its part of the forward."),
        ("GB/s", "Bytes that the kernel must read and write at least, a second."),
        ("TFLOP/s", "Multiplications and additions that it must do, a second."),
        ("other", "The rest of the forward: time between kernels, and kernels without a line here."),
    )
    NEEDS = "timings"

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """The step, then the kernels that fit, and one line for the rest."""
        profile = state.engine.profile
        if profile is None:
            return [self.say("no step was profiled yet")]
        gpu = state.started is not None and state.started.device.startswith("cuda")
        limit = limit_of(profile)
        head = self.figures(
            width,
            ("tokens", count(profile.tokens), None),
            ("sequences", count(profile.sequences), None),
            ("forward", duration(profile.forward), self.ink("itl")),
            (limit, percent(of_roofline(profile)), self.ink("device")),
            ("copy" if gpu else "read", _rate(profile.bandwidth, 1.0, 1e9) + " GB/s", None),
        )
        return [head, *self._table(profile, limit, width, height - 1)][:height]

    def _table(self, p: KernelsProfiled, limit: str, width: int, height: int) -> list[Row]:
        columns = (
            Column("kernel", 11, keep=9),
            Column("ms", 6, right=True, keep=8),
            Column("share", _BAR + _PERCENT, grow=1, keep=6),
            Column("GB/s", 6, right=True, keep=5),
            Column("TFLOP/s", 7, right=True, keep=1),
            Column(limit, len(limit), right=True, keep=7),
        )
        largest = sorted(range(len(p.names)), key=lambda i: -p.seconds[i])
        shown = largest[: max(0, height - 2)]
        bar = max(0, fit(columns, width)[2] - _PERCENT)
        rows = [self._kernel(p, i, bar) for i in shown]
        left = max(0.0, p.forward - sum(p.seconds[i] for i in shown))
        muted = self.ink("muted")
        rows.append([("other", muted), (_ms(left), muted), self._share(left, p, bar), *[(NONE, muted)] * 3])
        return table(columns, rows, width, muted)

    def _kernel(self, p: KernelsProfiled, i: int, bar: int) -> list[Cell]:
        text, seconds = self.ink("text"), p.seconds[i]
        needed = _least(p, p.bytes[i], p.flops[i])
        return [
            (safe_text(p.names[i]), text),
            (_ms(seconds), text),
            self._share(seconds, p, bar),
            (_rate(p.bytes[i], seconds, 1e9), text),
            (_rate(p.flops[i], seconds, 1e12), text),
            (percent(needed, _real(seconds)), self.ink("device")),
        ]

    def _share(self, seconds: float, p: KernelsProfiled, bar: int) -> Cell:
        part = seconds / p.forward if _real(p.forward) else 0.0
        return ((progress(part, bar), self.ink("device")), (percent(part).rjust(_PERCENT), self.ink("text")))


def limit_of(p: KernelsProfiled) -> str:
    """What kernels are compared with."""
    return "roofline" if p.peak else "bandwidth"


def of_roofline(p: KernelsProfiled) -> float | None:
    """Least time of all kernels / time of the forward: 0 to 1, or more where caches help. None without rates."""
    least = [_least(p, b, f) for b, f in zip(p.bytes, p.flops, strict=True)]
    known = [seconds for seconds in least if seconds is not None]
    return sum(known) / p.forward if known and _real(p.forward) else None


def _least(p: KernelsProfiled, moved: int, flops: int) -> float | None:
    times = [n / rate for n, rate in ((moved, p.bandwidth), (flops, p.peak)) if rate]
    return max(times, default=None)


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.2f}" if ms < 999.995 else f"{ms:,.0f}"


def _real(seconds: float) -> float | None:
    """None for a time that is too short for any clock: it cannot be a divisor."""
    return seconds if seconds > 1e-12 else None


def _rate(amount: float | None, seconds: float, unit: float) -> str:
    """Two decimals below 10, one below 100."""
    if not amount or not _real(seconds):
        return NONE
    value = amount / seconds / unit
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
