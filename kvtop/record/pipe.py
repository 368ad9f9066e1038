"""Pipe: batches on their way from the engine's thread to one reader.

Owns how many may wait. A live engine is never held up: its pipe has no bound, the reader keeps up or memory grows.
Where time is simulated as fast as possible, the engine waits for its reader instead: its time stands still meanwhile.
"""

from __future__ import annotations

import queue
import time

from engine.events import StepBatch

CAPACITY = 4096
"""Batches that may wait in a patient pipe."""
PAUSE_S = 0.002


class Pipe:
    """put in the engine's thread, get in the reader's."""

    def __init__(self, *, patient: bool = False, capacity: int = CAPACITY) -> None:
        self._queue: queue.SimpleQueue[StepBatch] = queue.SimpleQueue()
        self._capacity = capacity if patient else None
        self._open = True

    def put(self, batch: StepBatch) -> None:
        """Waits while a patient pipe is full and open."""
        if self._capacity is not None:
            while self._queue.qsize() >= self._capacity and self._open:
                time.sleep(PAUSE_S)
        self._queue.put(batch)

    def get(self) -> StepBatch:
        """The next batch; waits for it."""
        return self._queue.get()

    def close(self) -> None:
        """Nobody reads it any more: nobody is held up any more."""
        self._open = False
