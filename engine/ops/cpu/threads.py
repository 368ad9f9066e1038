"""ThreadChoice: how many threads a small step gets.

A decode step passes some 250 barriers. On a quiet machine all threads are fastest; where something else
runs on a core, every barrier waits for it and one thread can be four times as fast. Owns the choice,
which follows what steps took. Results never depend on it: sums run in a fixed order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SMALL = 64
"""Tokens up to which a step is small. Larger ones compute rather than wait, and take all threads."""
_TRIAL = 4
"""Steps that another number of threads is tried for."""
_HOPELESS = 1.25
"""A trial ends with a step that took so many times the present time: it shows as a gap between two tokens."""
_GAIN = 0.92
"""Part of the present time that a trial must stay under."""
_SOONEST, _LATEST = 16, 512
"""Steps between trials: doubles while trials fail."""


@dataclass(slots=True)
class _Size:
    """Choice for one size class of steps. `tried` differs from `chosen` during a trial."""

    chosen: int
    tried: int
    left: int = _SOONEST
    interval: int = _SOONEST
    up: bool = False
    times: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    trial: list[float] = field(default_factory=list)


class ThreadChoice:
    """most: a callable, because torch's number of threads may be set at any time."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._last: _Size | None = None

    def choose(self, tokens: int) -> int:
        """Threads for a step of so many tokens."""
        most = self._most()
        self._last = None
        if tokens > SMALL or most == 1:
            return most
        key = (most, tokens.bit_length())
        self._last = size = self._sizes.setdefault(key, _Size(most, most))
        return size.tried

    def took(self, seconds: float) -> None:
        """The step last chosen for took so long."""
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
            other = min(size.chosen * 2, self._most()) if size.up else max(size.chosen // 2, 1)
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
