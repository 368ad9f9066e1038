"""Pipe: a queue of batches from the engine's thread to one reader.

Owns how many batches may wait. A live engine never waits for a reader: its pipe has no limit, so memory grows if the
reader is too slow. An engine that simulates time as fast as possible waits for its reader. Its simulated time does not
pass while it waits.
"""

from __future__ import annotations

import queue

from engine.events import StepBatch

CAPACITY = 4096
"""Batches that may wait in a patient pipe."""


class Pipe(queue.Queue[StepBatch]):
    """The engine's thread puts, the reader's thread gets. patient: put waits while the pipe is full."""

    def __init__(self, *, patient: bool = False, capacity: int = CAPACITY) -> None:
        super().__init__(capacity if patient else 0)
        self._open = True

    def put(self, item: StepBatch, block: bool = True, timeout: float | None = None) -> None:
        """Add a batch. After `close` it is dropped."""
        if self._open:
            super().put(item, block, timeout)

    def close(self) -> None:
        """The reader stops. Waiting batches are dropped, so an engine that waits for room continues."""
        self._open = False
        while not self.empty():
            self.get_nowait()
