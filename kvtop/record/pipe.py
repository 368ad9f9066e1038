"""Pipe: batches on their way from the engine's thread to one reader.

Owns how many may wait. A live engine is never held up: its pipe has no bound, the reader keeps up or memory grows.
An engine that simulates time as fast as possible waits for its reader instead; the simulated time does not pass
meanwhile.
"""

from __future__ import annotations

import queue

from engine.events import StepBatch

CAPACITY = 4096
"""Batches that may wait in a patient pipe."""


class Pipe(queue.Queue[StepBatch]):
    """put in the engine's thread, get in the reader's. patient: put waits while the pipe is full."""

    def __init__(self, *, patient: bool = False, capacity: int = CAPACITY) -> None:
        super().__init__(capacity if patient else 0)
        self._open = True

    def put(self, item: StepBatch, block: bool = True, timeout: float | None = None) -> None:
        """Drops the batch after `close`."""
        if self._open:
            super().put(item, block, timeout)

    def close(self) -> None:
        """The reader has left. What waits is dropped, which lets go of an engine that waits for room."""
        self._open = False
        while not self.empty():
            self.get_nowait()
