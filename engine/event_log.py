"""EventLog: collects events and cuts them into StepBatches.

Owns the numbers of the stream. Invariant: `seq` and `first_event` are contiguous from the first ModelLoading to
EngineStopped. Only the engine thread appends. The sink is called with each batch and must return at once.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.events import Event, StepBatch


class EventLog:
    """clock: seconds, monotonic. `emit` appends an event to the next batch. Pool, scheduler and core get only this
    function."""

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
        """Give the sink a batch of all pending events, with `last` at its end. None if there are none."""
        if last is not None:
            self.emit(last)
        if not self._pending:
            return None
        events = self._pending[:]
        self._pending.clear()  # in place, because `emit` appends to this list
        batch = StepBatch(self._num_batches, self.clock(), self.step, self._num_events, events)
        self._num_batches += 1
        self._num_events += len(events)
        self._sink(batch)
        return batch
