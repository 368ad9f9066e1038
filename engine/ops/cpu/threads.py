"""How many threads a step on the CPU gets.

A decode step passes some 250 barriers, at which every thread waits for the slowest. On a quiet machine all threads
are fastest. Where another process has a core, each barrier waits until it gives the core back, and one thread can be
ten times as fast. FreeCores says how many cores others leave, at once; ThreadChoice also learns from what steps took,
because this process has other threads too (a dashboard that paints). Results never depend on the choice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.machine import ForeignLoad, cores

SMALL = 64
"""Tokens up to which a step is small. Larger ones compute rather than wait: they take all free cores."""
_TRIAL = 4
"""Steps for which another number of threads is tried."""
_HOPELESS = 1.25
"""A trial ends after a step that took this many times the present time: it shows as a gap between two tokens."""
_GAIN = 0.92
"""A trial must stay under this part of the present time."""
_SOONEST, _LATEST = 16, 512
"""Steps between trials. The number doubles while trials fail."""
_INTERVAL = 0.2
"""Seconds between two looks at the load: twenty ticks of the clock that it is counted in."""
_DOWN, _UP = 0.35, 0.2
"""Part of a core that others may use before it counts as taken, and under which it counts as free again."""


class FreeCores:
    """Cores that other processes leave to this one, looked up at most every _INTERVAL seconds."""

    def __init__(
        self,
        load: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        count: int | None = None,
    ) -> None:
        self._load = load or ForeignLoad()
        self._clock = clock
        self._cores = count or cores()
        self._free = self._cores
        self._at = clock()

    def __call__(self) -> int:
        """At least 1."""
        now = self._clock()
        if now - self._at >= _INTERVAL:
            self._at = now
            load = self._load()
            if load is not None:
                fewer, more = (max(1, int(self._cores - load + part)) for part in (_DOWN, _UP))
                self._free = fewer if fewer < self._free else max(self._free, more)
        return self._free


@dataclass(slots=True)
class _Size:
    """The choice for one size class of steps. During a trial `tried` differs from `chosen`."""

    chosen: int
    tried: int
    left: int = _SOONEST
    interval: int = _SOONEST
    up: bool = False
    times: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    trial: list[float] = field(default_factory=list)


class ThreadChoice:
    """most: a callable, because torch's number of threads may be set at any time."""

    def __init__(self, most: Callable[[], int], free: Callable[[], int] | None = None) -> None:
        self._setting = most
        self._free = free or FreeCores()
        self._sizes: dict[int, _Size] = {}
        self._last: _Size | None = None
        self.most = most()
        """Threads that the next operations may take."""

    def choose(self, tokens: int) -> int:
        """Threads for a step of this many tokens."""
        most = min(self._setting(), self._free())
        if most != self.most:
            self.most = most
            self._sizes.clear()  # what steps took under another load says nothing about this one
        self._last = None
        if tokens > SMALL or most == 1:
            return most
        self._last = size = self._sizes.setdefault(tokens.bit_length(), _Size(most, most))
        return size.tried

    def took(self, seconds: float) -> None:
        """What the step took for which `choose` was called last."""
        size = self._last
        self._last = None
        if size is None:
            return
        if size.tried != size.chosen:
            size.trial.append(seconds)
            hopeless = seconds > _HOPELESS * sum(size.times) / len(size.times)
            if hopeless or len(size.trial) == _TRIAL:
                self._judge(size)
            return
        size.times.append(seconds)
        size.left -= 1
        if size.left <= 0:
            other = min(size.chosen * 2, self.most) if size.up else max(size.chosen // 2, 1)
            size.up = not size.up
            if other != size.chosen:
                size.tried, size.trial = other, []

    def _judge(self, size: _Size) -> None:
        now = sum(size.times) / len(size.times)
        if len(size.trial) == _TRIAL and sum(size.trial) / _TRIAL < _GAIN * now:
            size.chosen = size.tried
            size.times = deque(size.trial, maxlen=8)
            size.interval = _SOONEST
        else:
            size.interval = min(2 * size.interval, _LATEST)
        size.tried, size.left = size.chosen, size.interval


class TorchThreads:
    """torch's own number of threads: what it was set to, or less while others use the cores."""

    def __init__(self, free: Callable[[], int] | None = None) -> None:
        self._free = free or FreeCores()
        self._most = self._set = torch.get_num_threads()

    def follow(self) -> None:
        """Before a step."""
        now = torch.get_num_threads()
        if now != self._set:  # somebody else set it
            self._most = now
        self._set = min(self._most, self._free())
        if self._set != now:
            torch.set_num_threads(self._set)
