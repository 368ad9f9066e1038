"""Audit: does a stream of events make sense, event by event? The laws beside the pool's own.

Owns what each kind of event demands of those before it: a life of a request, the life of a step, what a
look-up may find, what must be published, what the figures at the end must say. The pool's transitions
are PoolMirror's. Written from the contract (engine.events), not from the engine's code, so that the two can
contradict each other. Redundancy is the point: most events that are missing show even if whoever took them
out renumbered the rest. Not those that nothing else depends on: ModelLoading, DeviceSample, KernelsProfiled,
GraphCaptured, a PoolSnapshot in the middle, and TokenPieces of a redacted recording.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from engine import events as ev
from kvtop.record.audit.books import Broken, need
from kvtop.record.audit.pool import PoolLaws
from kvtop.record.audit.requests import RequestLaws
from kvtop.record.audit.steps import StepLaws
from kvtop.state.pool_mirror import StateError

__all__ = ["Audit", "Broken", "broken"]


class Audit(PoolLaws, RequestLaws, StepLaws):
    """Call `event` for each event in order, `end_batch` after each batch, `close` at the end. All raise
    Broken or StateError; a stream may be audited further after that, up to the caller."""

    def event(self, e: Any) -> None:
        """The next event."""
        if type(e) is not ev.EngineStopped:
            self._closing = None
        handler = self._handlers.get(type(e))
        if handler is not None:
            handler(self, e)

    def end_batch(self, step: int) -> None:
        """All events of a batch are in; `step` is the batch's."""
        scheduled, self._scheduled = self._scheduled, None
        sampled, completed, failed = self._sampled, self._completed, self._failed
        self._sampled = self._completed = self._failed = False
        if scheduled is not None and not sampled:
            self._written()
        if scheduled is not None:
            need(sampled or failed, "StepScheduled without TokensSampled or an EngineError")
            need(completed, "StepScheduled without StepCompleted")
        need(step == self.steps, f"step is {step} after {self.steps} StepScheduled")
        if self._text and not self.redacted:
            missing = self._used - self._pieces
            self._pieces |= self._used
            self._used.clear()
            need(not missing, f"TokenPieces is missing for token {min(missing, default=0)}")

    def close(self) -> None:
        """The stream is over."""
        need(not self.unfinished, f"request {next(iter(self.unfinished), 0)} never finished")
        need(self._closing is not None, "no closing PoolSnapshot right before the end")

    def resync(self, s: ev.PoolSnapshot) -> None:
        """Believe the pool after a broken law, so that the next one is told for itself."""
        self.mirror.load(s)
        for i, computed in zip(s.seq_ids, s.computed, strict=True):
            if i in self._branches:
                self._branches[i].computed = computed
                self._branches[i].published = len(self.mirror.tables.get(i, []))

    _handlers: ClassVar[dict[type, Callable[[Audit, Any], None]]] = {
        ev.BlocksAllocated: PoolLaws._on_allocated,
        ev.BlocksTouched: PoolLaws._on_touched,
        ev.BlocksCopied: PoolLaws._on_copied,
        ev.BlocksReleased: PoolLaws._on_released,
        ev.BlocksStored: PoolLaws._on_stored,
        ev.BlocksEvicted: PoolLaws._on_evicted,
        ev.CacheCleared: PoolLaws._on_cleared,
        ev.PoolSnapshot: PoolLaws._on_snapshot,
        ev.RequestQueued: RequestLaws._on_queued,
        ev.PrefixLookup: RequestLaws._on_lookup,
        ev.AdmissionBlocked: RequestLaws._on_blocked,
        ev.RequestAdmitted: RequestLaws._on_admitted,
        ev.RequestPreempted: RequestLaws._on_preempted,
        ev.RequestFinished: RequestLaws._on_finished,
        ev.SequenceForked: StepLaws._on_forked,
        ev.DraftVerified: StepLaws._on_verified,
        ev.BeamPruned: StepLaws._on_pruned,
        ev.StepScheduled: StepLaws._on_scheduled,
        ev.TokensSampled: StepLaws._on_sampled,
        ev.TokenPieces: StepLaws._on_pieces,
        ev.StepCompleted: StepLaws._on_completed,
        ev.EngineError: StepLaws._on_error,
    }


def broken(audit: Audit, events: list[Any], step: int) -> Iterator[tuple[str, str]]:
    """(event's name, what it broke) for one batch; a snapshot after a broken law is believed."""
    for e in events:
        try:
            audit.event(e)
        except (Broken, StateError, ValueError, IndexError, KeyError, struct.error) as error:
            yield type(e).__name__, str(error)
            if type(e) is ev.PoolSnapshot:
                try:
                    audit.resync(e)
                except (StateError, ValueError) as worse:
                    yield type(e).__name__, str(worse)
    try:
        audit.end_batch(step)
    except Broken as error:
        yield "", str(error)
