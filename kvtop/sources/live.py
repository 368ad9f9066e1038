"""LiveSource: the batches of an engine in this process.

Owns the queue between the engine's thread and the screen. The engine only appends. The queue is bounded: if the
screen hangs for so long that it overflows, the oldest batches are lost. The state counts them by the gap in `seq`,
and this source asks the engine for a PoolSnapshot, which repairs the blocks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.events import StepBatch

if TYPE_CHECKING:
    from engine import Engine
    from kvtop.state.dashboard import DashboardState

CAPACITY = 20_000
"""Batches: minutes of a busy engine, some tens of megabytes."""


class LiveSource:
    """Subscribes at once, so make it before `engine.start()`. It cannot be driven, and its batches are never late."""

    transport = None
    place = ""
    loading = None
    problem = None

    def __init__(self, engine: Engine, capacity: int = CAPACITY) -> None:
        self._engine = engine
        self._queue: deque[StepBatch] = deque(maxlen=capacity)
        self._next = 0
        self.lost = 0
        """Batches that fell out of the queue."""
        engine.subscribe(
            self._queue.append
        )  # appending to a deque is atomic, and the engine does nothing else

    def attach(self, state: DashboardState) -> None:
        """Nothing to do: this source never jumps."""

    def drain(self) -> list[StepBatch]:
        """Everything that has come. After a loss it asks the engine for a snapshot."""
        queue, out = self._queue, []
        for _ in range(len(queue)):
            out.append(queue.popleft())
        if out:
            missing = sum(
                b.seq - a for a, b in zip([self._next, *(b.seq + 1 for b in out)], out, strict=False)
            )
            self._next = out[-1].seq + 1
            if missing:
                self.lost += missing
                self._engine.request_snapshot()
        return out
