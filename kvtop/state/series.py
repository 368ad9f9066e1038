"""Time series for graphs: bounded rings of points and of rates, all on the batches' own clock.

Owns the buffers and their arithmetic (percentiles, per-second rates). A series depends on the events alone, so the same
recording gives the same curves at any replay speed. Latencies leave out steps in slow motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine import events as ev
from kvtop.state.part import Copied, Part, takes

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

LATEST = 1000
"""Every p50, p99 and max on the screen is that of this many newest points, whatever a graph shows."""

Floats = npt.NDArray[np.float64]


class Ring(Copied):
    """The last `capacity` rows (t, value, tag). They are read oldest first.

    t: seconds. tag: a second figure of the same point, for example the cached tokens of a TTFT.
    """

    __slots__ = ("_count", "_rows")

    def __init__(self, capacity: int = 2048) -> None:
        self._rows = np.zeros((capacity, 3))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._rows))

    @property
    def total(self) -> int:
        """Number of points added so far. A widget need not paint again while it does not change."""
        return self._count

    def add(self, t: float, value: float, tag: float = 0.0) -> None:
        """Add a point. The oldest is dropped when the ring is full."""
        self._rows[self._count % len(self._rows)] = (t, value, tag)
        self._count += 1

    def rows(self, since: float = -np.inf) -> Floats:
        """[points, 3] copies of (t, value, tag) with t >= since, oldest first."""
        n, size = self._count, len(self._rows)
        rows = self._rows[:n] if n <= size else np.roll(self._rows, -(n % size), axis=0)
        return rows[np.searchsorted(rows[:, 0], since) :].copy()

    def values(self, since: float = -np.inf) -> Floats:
        """[points] values, oldest first."""
        return self.rows(since)[:, 1]

    def last(self) -> float | None:
        """The newest value; None without points."""
        return float(self._rows[(self._count - 1) % len(self._rows), 1]) if self._count else None

    def latest(self, count: int = LATEST) -> Floats:
        """[at most `count`] The newest values, oldest first, for p50, p99 and max."""
        size, n = len(self._rows), min(count, len(self))
        first, values = (self._count - n) % size, self._rows[:, 1]
        if first + n <= size:
            return values[first : first + n].copy()
        return np.concatenate((values[first:], values[: first + n - size]))

    def percentile(self, q: float, since: float = -np.inf) -> float | None:
        """q in 0..100 over the points with t >= since; None without points."""
        return percentile(self.values(since), q)


class Rate(Copied):
    """Amounts per second, summed in buckets of `bucket` seconds."""

    __slots__ = ("_last", "_peak", "_start", "_sums", "bucket", "total")

    def __init__(self, bucket: float = 0.25, capacity: int = 2400) -> None:
        self.bucket = bucket
        self.total = 0.0
        """Sum of everything added so far."""
        self._peak = 0.0
        self._sums = np.zeros(capacity)
        self._last = -1
        self._start: float | None = None

    def add(self, t: float, amount: float) -> None:
        """Add an amount at time t (seconds, not decreasing)."""
        if self._start is not None and int(t / self.bucket) > self._last:
            self._peak = max(self._peak, self.now((self._last + 1) * self.bucket - 1e-9) or 0.0)
        i = self._advance(t)
        self._sums[i % len(self._sums)] += amount
        self.total += amount
        if self._start is None:
            self._start = t

    def now(self, t: float, window: float = 2.0) -> float | None:
        """Amount per second over the last `window` seconds before t. None before anything was added."""
        if self._start is None:
            return None
        span = min(window, max(t - self._start, self.bucket))
        return float(self.points(t, span)[1].mean())

    def peak(self, t: float) -> float | None:
        """The largest `now` until t, measured at the end of each bucket. None before anything was added."""
        now = self.now(t)
        return None if now is None else max(self._peak, now)

    def points(self, until: float, span: float) -> tuple[Floats, Floats]:
        """(starts of the buckets [n], values per second [n]) of the last `span` seconds before `until`, at most the
        length of the ring. 0 where nothing was added."""
        last = int(until / self.bucket)
        n = max(1, min(len(self._sums), round(span / self.bucket)))
        index = np.arange(last - n + 1, last + 1)
        known = (index >= 0) & (index <= self._last) & (index > self._last - len(self._sums))
        values = np.where(known, self._sums[index % len(self._sums)], 0.0)
        return (index * self.bucket).astype(np.float64), (values / self.bucket).astype(np.float64)

    def _advance(self, t: float) -> int:
        i = max(int(t / self.bucket), self._last)
        if self._last < 0:
            self._last = i
        size = len(self._sums)
        if i - self._last >= size:
            self._sums[:] = 0
        else:
            self._sums[np.arange(self._last + 1, i + 1) % size] = 0
        self._last = i
        return i


@dataclass(slots=True, eq=False)
class Series(Part):
    """Everything that a graph shows.

    ttft: (t of the first token, seconds since arrival, tokens read from the cache), without requests that had a slow
    step. itl: (t, seconds between two tokens of a sequence), without slow steps. hit_rate: (t of the look-up, hit
    tokens / prompt tokens so far, 0..1). step: (t, seconds of schedule + prepare + forward + sample, tokens), with slow
    steps, because their wait is not part of these seconds. output, prefill: tokens. evictions: blocks. util (percent),
    memory (bytes), power (W): what the device reports.
    """

    ttft: Ring = field(default_factory=Ring)
    itl: Ring = field(default_factory=lambda: Ring(4096))
    hit_rate: Ring = field(default_factory=Ring)
    step: Ring = field(default_factory=lambda: Ring(4096))
    output: Rate = field(default_factory=Rate)
    prefill: Rate = field(default_factory=Rate)
    evictions: Rate = field(default_factory=Rate)
    util: Ring = field(default_factory=Ring)
    memory: Ring = field(default_factory=Ring)
    power: Ring = field(default_factory=Ring)

    @takes(ev.BlocksEvicted)
    def _evicted(self, e: ev.BlocksEvicted, state: DashboardState) -> None:
        if e.why == "reallocated":
            self.evictions.add(state.stream.t, len(e.ids))

    @takes(ev.DeviceSample)
    def _device(self, e: ev.DeviceSample, state: DashboardState) -> None:
        for ring, value in ((self.util, e.util), (self.memory, e.memory), (self.power, e.power)):
            if value is not None:
                ring.add(state.stream.t, value)

    @takes(ev.PrefixLookup)
    def _looked_up(self, e: ev.PrefixLookup, state: DashboardState) -> None:
        if not e.resumed:
            self.hit_rate.add(state.stream.t, state.cache.hit_tokens / max(1, state.cache.query_tokens))

    @takes(ev.StepScheduled)
    def _scheduled(self, e: ev.StepScheduled, state: DashboardState) -> None:
        if state.requests.prefill:
            self.prefill.add(state.stream.t, state.requests.prefill)

    @takes(ev.TokensSampled)
    def _sampled(self, e: ev.TokensSampled, state: DashboardState) -> None:
        t, (tokens, first, gaps) = state.stream.t, state.requests.sampled
        if tokens:
            self.output.add(t, tokens)
        for seconds, cached in first:
            self.ttft.add(t, seconds, cached)
        for seconds, times, computed in gaps:
            for _ in range(times):
                self.itl.add(t, seconds, computed)

    @takes(ev.StepCompleted)
    def _completed(self, e: ev.StepCompleted, state: DashboardState) -> None:
        seconds = e.t_schedule + e.t_prepare + e.t_forward + e.t_sample
        self.step.add(state.stream.t, seconds, e.decode_tokens + e.prefill_tokens)


def percentile(values: Floats | Sequence[float], q: float) -> float | None:
    """Linear interpolation between ranks, as numpy's default; None without values."""
    return float(np.percentile(values, q)) if len(values) else None
