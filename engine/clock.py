"""Clocks that an engine lives by: the wall's, and a virtual one for engines that only pretend to compute.

Owns how time passes while the engine steps and while it waits. Only the engine's thread moves a virtual clock;
everybody may read it. Invariant: no reader ever sees a clock go back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

MOST_LAG = 0.1
"""Seconds of the wall that a paced clock catches up with; what is beyond (a pause, a slow machine) is let go."""


class Clock(Protocol):
    """Seconds since the engine was made."""

    def now(self) -> float:
        """From any thread."""
        ...

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """Let time pass until `wake` is set or the clock says `until`; the engine has nothing to do."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._start

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """Sleep."""
        wake.wait(None if until is None else max(0.0, until - self.now()))


class _Flow(NamedTuple):
    """Time that passes by itself from `start` at the wall's `since`, until it stands at `end`."""

    start: float
    since: float
    end: float


class VirtualClock:
    """Time that passes in steps of what they would take, `speed` virtual seconds a second of the wall.

    speed None: as fast as possible; time then stands still while the engine waits for somebody.
    """

    def __init__(self, speed: float | None = None, wall: Callable[[], float] = time.perf_counter) -> None:
        self.speed = speed
        self._wall = wall
        self._time = 0.0
        self._due = wall()
        """Where the wall stood, or should have stood, when the clock said `_time`."""
        self._flow: _Flow | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, at: float) -> None:
        """Begin there: what was told before by another clock stays in order."""
        self._time, self._due = at, self._wall()

    def now(self) -> float:
        """From any thread. While a step is under way: how far it has come."""
        with self._lock:
            return self._now()

    def advance(self, seconds: float) -> None:
        """A step of so many virtual seconds: returns when the wall has seen it, too."""
        self._pass(self._time + seconds, self._closed)

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """Nothing to do until `wake` is set or the clock says `until`."""
        if self.speed is None and until is None:
            wake.wait()
        elif until is None or until > self._time:
            self._pass(until, wake)

    def close(self) -> None:
        """Every step from now on takes no time on the wall: the engine is asked to end."""
        self._closed.set()

    def _now(self) -> float:
        flow = self._flow
        if flow is None or self.speed is None:
            return self._time
        return max(self._time, min(flow.end, flow.start + (self._wall() - flow.since) * self.speed))

    def _pass(self, end: float | None, early: threading.Event) -> None:
        """Move to `end`, or to wherever time has come when `early` is set."""
        if self.speed is None:
            assert end is not None, "time that does not pass by itself needs an end"
            self._time = end
            return
        start, wall = self._time, self._wall()
        if wall - self._due > MOST_LAG:
            self._due = wall
        since = self._due
        due = None if end is None else since + (end - start) / self.speed
        with self._lock:
            self._flow = _Flow(start, since, float("inf") if end is None else end)
        woken = early.wait(None if due is None else max(0.0, due - wall))
        with self._lock:
            if end is None or due is None or (woken and early is not self._closed):
                self._time, self._due = self._now(), self._wall()
            else:
                self._time, self._due = end, due
            self._flow = None
