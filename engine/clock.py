"""The clock of an engine: real time, or a virtual clock for an engine that only simulates its steps.

Owns how time passes while the engine steps and while it waits. Only the engine's thread moves a virtual clock; any
thread may read it. Invariant: no reader ever sees a clock go back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

MOST_LAG = 0.1
"""Most seconds of real time that a paced clock catches up with. A longer delay (a pause, a slow machine) is dropped."""


class Clock(Protocol):
    """Seconds since the engine was created."""

    def now(self) -> float:
        """From any thread."""
        ...

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """The engine has nothing to do: let time pass until `wake` is set or the clock reaches `until`."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since this clock was created."""
        return time.perf_counter() - self._start

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """Sleep."""
        wake.wait(None if until is None else max(0.0, until - self.now()))


class _Flow(NamedTuple):
    """A stretch of time: it begins at `start` when real time is `since`, and stops at `end`."""

    start: float
    since: float
    end: float


class VirtualClock:
    """Each step takes the time that it would take on the simulated device: `speed` virtual seconds per real second.

    speed None: as fast as possible. Then no time passes while the engine waits for a request.
    """

    def __init__(self, speed: float | None = None, wall: Callable[[], float] = time.perf_counter) -> None:
        self.speed = speed
        self._wall = wall
        self._time = 0.0
        self._due = wall()
        """The real time at which the clock showed `_time`, or should have shown it."""
        self._flow: _Flow | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, at: float) -> None:
        """Start at this time, so that events stamped by another clock before stay in order."""
        self._time, self._due = at, self._wall()

    def now(self) -> float:
        """From any thread. During a step: how far it has come."""
        with self._lock:
            return self._now()

    def advance(self, seconds: float) -> None:
        """Runs a step of this many virtual seconds. Returns when it is over in real time too."""
        self._pass(self._time + seconds, self._closed)

    def wait(self, wake: threading.Event, until: float | None) -> None:
        """Nothing to do until `wake` is set or the clock reaches `until`."""
        if self.speed is None and until is None:
            wake.wait()
        elif until is None or until > self._time:
            self._pass(until, wake)

    def close(self) -> None:
        """From now on steps take no real time, because the engine shall end."""
        self._closed.set()

    def _now(self) -> float:
        flow = self._flow
        if flow is None or self.speed is None:
            return self._time
        return max(self._time, min(flow.end, flow.start + (self._wall() - flow.since) * self.speed))

    def _pass(self, end: float | None, early: threading.Event) -> None:
        """Move to `end`, or to the time at which `early` is set."""
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
