"""Stream: the position of the state in the event stream, and whether anything is missing.

Owns the position, the losses and whether the blocks can be trusted. Invariant: after a lost batch or a broken law
`synced` is False until the next PoolSnapshot. Until then the blocks keep their last known state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import events as ev
from kvtop.state.part import Part, takes

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


@dataclass(slots=True, eq=False)
class Stream(Part):
    """strict: a broken law raises StateError instead of being counted."""

    strict: bool = False
    t: float = 0.0
    """Seconds on the batches' clock."""
    step: int = 0
    seq: int = -1
    num_events: int = 0
    num_batches: int = 0
    """Batches applied."""
    generation: int = 0
    """Increases when everything may have changed at once (a start, a seek, a resync)."""
    stirs: int = 0
    """Batches with any other event than a DeviceSample."""
    slow: bool = False
    """Slow motion made the step of the latest batch longer."""
    losses: int = 0
    """Missing batches and broken laws."""
    synced: bool = True
    unknown: dict[str, int] = field(default_factory=dict)
    """Skipped event types of a newer version, with their counts."""

    def discontinuity(self, batch: ev.StepBatch) -> tuple[int, str] | None:
        """(number of missing batches, what is wrong) if a batch does not follow the last one, else None."""
        if batch.seq != self.seq + 1:
            missing = max(1, batch.seq - self.seq - 1)
            return missing, f"batch {batch.seq} follows batch {self.seq}: seq is not contiguous"
        if batch.first_event != self.num_events:
            where = f"first_event is {batch.first_event} after {self.num_events} events"
            return 1, f"batch {batch.seq}: {where}: not contiguous"
        if self.strict and batch.t < self.t:
            return 0, f"batch {batch.seq}: t went back from {self.t} to {batch.t}"
        return None

    def begin(self, batch: ev.StepBatch) -> None:
        """Move on to this batch."""
        self.seq, self.step = batch.seq, batch.step
        self.num_batches += 1
        self.t = max(self.t, batch.t)
        self.num_events = batch.first_event + len(batch.events)
        self.stirs += any(type(e) is not ev.DeviceSample for e in batch.events)
        self.slow = any(type(e) is ev.StepCompleted and e.slow for e in batch.events)

    def lose(self, count: int) -> None:
        """From now on the blocks cannot be trusted."""
        self.losses += count
        self.synced = False

    def skip(self, event: object) -> None:
        """An event that no part takes."""
        name = getattr(event, "type", type(event).__name__)
        self.unknown[name] = self.unknown.get(name, 0) + 1

    @takes(ev.EngineStarted)
    def _started(self, e: ev.EngineStarted, state: DashboardState) -> None:
        self.generation += 1

    @takes(ev.PoolSnapshot)
    def _snapshot(self, e: ev.PoolSnapshot, state: DashboardState) -> None:
        if state.pool.reloaded:
            self.losses += self.synced
            self.synced = True
            self.generation += 1
