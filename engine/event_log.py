"""EventLog: gathers what happens and cuts it into StepBatches.

Owns the stream's numbering, so `seq` and `first_event` stay contiguous from the first word of a load to
EngineStopped. Only the engine thread appends; a sink gets each batch and must return at once.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.events import Event, StepBatch


class EventLog:
    """events: what happened since the last batch, in order; clock: seconds, monotonic."""

    __slots__ = ("_num_batches", "_num_events", "_sink", "clock", "events", "step")

    def __init__(self, clock: Callable[[], float], sink: Callable[[StepBatch], None]) -> None:
        self.clock = clock
        self.events: list[Event] = []
        self.step = 0
        """Engine steps begun so far."""
        self._sink = sink
        self._num_batches = 0
        self._num_events = 0

    def emit(self, event: Event) -> None:
        """Append one event to the batch in the making."""
        self.events.append(event)

    def cut(self, last: Event | None = None) -> StepBatch | None:
        """Hand over a batch of everything pending, `last` at its end; None if there is nothing."""
        if last is not None:
            self.events.append(last)
        if not self.events:
            return None
        batch = StepBatch(self._num_batches, self.clock(), self.step, self._num_events, self.events[:])
        self._num_batches += 1
        self._num_events += len(batch.events)
        self.events.clear()  # in place: the pool appends to this very list
        self._sink(batch)
        return batch
