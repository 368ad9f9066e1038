"""EventLog: gathers what happens and cuts it into StepBatches.

Owns the stream's numbering, so `seq` and `first_event` stay contiguous from the first word of a load to
EngineStopped. Only the engine thread appends; a sink gets each batch and must return at once.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.events import Event, StepBatch


class EventLog:
    """clock: seconds, monotonic. `emit` appends one event to the batch in the making; pool, scheduler
    and core get that function and nothing else of the log."""

    __slots__ = ("_num_batches", "_num_events", "_pending", "_sink", "clock", "emit", "step")

    def __init__(self, clock: Callable[[], float], sink: Callable[[StepBatch], None]) -> None:
        self.clock = clock
        self._pending: list[Event] = []
        self.emit: Callable[[Event], None] = self._pending.append
        self.step = 0
        """Engine steps begun so far."""
        self._sink = sink
        self._num_batches = 0
        self._num_events = 0

    def cut(self, last: Event | None = None) -> StepBatch | None:
        """Hand over a batch of everything pending, `last` at its end; None if there is nothing."""
        if last is not None:
            self.emit(last)
        if not self._pending:
            return None
        events = self._pending[:]
        self._pending.clear()  # in place: `emit` appends to this very list
        batch = StepBatch(self._num_batches, self.clock(), self.step, self._num_events, events)
        self._num_batches += 1
        self._num_events += len(events)
        self._sink(batch)
        return batch
