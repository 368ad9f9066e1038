"""DashboardState: everything the screen, the headless summary and the demos' verdicts know.

A pure function of the batches applied so far; no clock, no engine, no terminal. Exact: after every batch the
blocks are what the pool's law says. A lost batch or a broken law counts in `losses` (raises with
strict=True); pool events are then left out until the next PoolSnapshot. What is known and how it is
read is in Facts, what each event does to it in PoolRules and RequestRules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from engine import events as ev
from kvtop.state.facts import Moment
from kvtop.state.history import History
from kvtop.state.pool_mirror import StateError
from kvtop.state.pool_rules import PoolRules
from kvtop.state.pool_view import BlockInfo, BlockState
from kvtop.state.request_rules import RequestRules
from kvtop.state.requests import RequestView, SequenceView
from kvtop.state.series import Series

__all__ = ["BlockInfo", "BlockState", "DashboardState", "Moment", "RequestView", "SequenceView", "StateError"]


class DashboardState(PoolRules, RequestRules):
    """See the module. Everything public is for reading; only `apply` and `restore` write."""

    def apply(self, batch: ev.StepBatch) -> None:
        """Take the next batch. O(events). With strict=True raises StateError on the first broken law."""
        if self.skipped:
            batch = _renumbered(batch, self.skipped)
        if batch.seq != self.seq + 1 or batch.first_event != self.num_events or batch.t < self.t:
            self._discontinuity(batch)
        self.seq, self.step = batch.seq, batch.step
        self.num_batches += 1
        self.t = max(self.t, batch.t)
        self.num_events = batch.first_event + len(batch.events)
        self.stirs += any(type(e) is not ev.DeviceSample for e in batch.events)
        self._slow = any(type(e) is ev.StepCompleted and e.slow for e in batch.events)
        if self._slow:
            for i in (*self.waiting, *self.running):
                if self.requests[i].t_first is None:
                    self.requests[i].slow = True
        self.twin.apply(batch)
        for e in batch.events:
            handler = self._handlers.get(type(e))
            if handler is None:
                name = getattr(e, "type", type(e).__name__)
                self.unknown[name] = self.unknown.get(name, 0) + 1
                continue
            if not self.synced and type(e) in ev.POOL_EVENTS:
                continue
            try:
                handler(self, e)
            except (StateError, ValueError) as error:
                self._lose(1, f"batch {batch.seq}: {error}")

    def begin_anew(self) -> None:
        """Forget the requests so far (a warm-up) with all their figures, and count those to come from 1.
        What the blocks hold stays; nothing may be waiting or running. Raises ValueError if something is."""
        if self.waiting or self.running:
            raise ValueError("requests are under way")
        self.skipped += max(self.requests, default=0)
        self.requests, self.sequences, self._request_of = {}, {}, {}
        self._finished.clear()
        self.moments.clear()
        self.series = Series()
        if not self.num_hashes:
            self.history = History(max(4 * self.num_blocks, 20_000))
        self.lookups = self.query_tokens = self.hit_tokens = self.evictions = self.duplicates = 0
        self.copies = self.preemptions = self.refused = self.output_tokens = 0
        self.scheduled = self.completed = self.latest_lookup = None
        self.generation += 1

    def take_dirty(self) -> npt.NDArray[np.int64]:
        """Ids of the blocks that may look different from the last call, each once."""
        return self.pool.take_dirty()

    def copy(self) -> DashboardState:
        """An independent state that goes on from here."""
        other = DashboardState.__new__(DashboardState)
        other.__dict__.update(self.__dict__)
        other.unknown, other.errors = self.unknown.copy(), self.errors[:]
        other.requests = {i: r.copy() for i, r in self.requests.items()}
        other.pool, other.history, other.series = self.pool.copy(), self.history.copy(), self.series.copy()
        other.twin = self.twin.copy()
        other.sequences = {i: s.copy() for i, s in self.sequences.items()}
        for i, s in other.sequences.items():
            s.table = other.pool.mirror.tables.get(i, [])
        other.waiting, other.running = self.waiting[:], self.running[:]
        other.moments, other._finished = self.moments.copy(), self._finished.copy()
        other._moved = self._moved.copy()
        other._pieces, other._request_of = self._pieces.copy(), self._request_of.copy()
        return other

    def restore(self, other: DashboardState) -> None:
        """Become a copy of `other` in place, so that whoever holds this state sees it (seeking)."""
        generation = max(self.generation, other.generation) + 1
        self.__dict__.update(other.copy().__dict__)
        self.generation = generation

    def summary(self) -> dict[str, Any]:
        """The headless summary object; figures that do not exist are absent."""
        out: dict[str, Any] = {"schema": ev.SCHEMA, "type": "summary"}
        if self.started is not None:
            s = self.started
            out |= {
                "source": s.source,
                "model": s.model,
                "device": s.device,
                "dtype": s.dtype,
                "block_size": s.block_size,
                "num_blocks": s.num_blocks,
                "usable_blocks": s.num_blocks - 1,
                "bytes_per_block": s.bytes_per_block,
            }
        cache: dict[str, Any] = {
            "lookups": self.lookups,
            "query_tokens": self.query_tokens,
            "hit_tokens": self.hit_tokens,
        }
        rate = self.hit_rate()
        if rate is not None:
            cache["hit_rate"] = round(rate, 6)
        out |= {
            "requests": [r.summary() for r in self.requests.values()],
            "prefix_cache": cache,
            "evictions": self.evictions,
        }
        if self.preemptions:
            out["preemptions"] = {
                "count": self.preemptions,
                "lost_tokens": self.tokens_lost,
                "returned_tokens": self.tokens_back,
            }
        if self.audited_hits:
            out["audit"] = {
                "hits": self.audited_hits,
                "blocks": self.audited_blocks,
                "wrong": self.wrong_blocks,
            }
        if self.drafts:
            out["speculation"] = {"proposed": self.drafts, "accepted": self.drafts_accepted}
        if self.losses:
            out["losses"] = self.losses
        return out

    def _discontinuity(self, batch: ev.StepBatch) -> None:
        if batch.seq != self.seq + 1:
            missing = batch.seq - self.seq - 1
            self._lose(max(1, missing), f"batch {batch.seq} follows batch {self.seq}: seq is not contiguous")
        elif batch.first_event != self.num_events:
            told = f"first_event is {batch.first_event} after {self.num_events} events"
            self._lose(1, f"batch {batch.seq}: {told}: not contiguous")
        else:
            text = f"batch {batch.seq}: t went back from {self.t} to {batch.t}"
            if self.strict:
                raise StateError(text)

    _handlers: ClassVar[dict[type, Callable[[DashboardState, Any], None]]] = {
        ev.BlocksAllocated: PoolRules._on_allocated,
        ev.BlocksTouched: PoolRules._on_touched,
        ev.BlocksCopied: PoolRules._on_copied,
        ev.BlocksReleased: PoolRules._on_released,
        ev.BlocksStored: PoolRules._on_stored,
        ev.BlocksEvicted: PoolRules._on_evicted,
        ev.CacheCleared: PoolRules._on_cleared,
        ev.PoolSnapshot: PoolRules._on_snapshot,
        ev.ModelLoading: RequestRules._on_loading,
        ev.EngineStarted: RequestRules._on_started,
        ev.EngineStopped: RequestRules._on_stopped,
        ev.EngineError: RequestRules._on_error,
        ev.HitAudited: RequestRules._on_audited,
        ev.DeviceSample: RequestRules._on_device,
        ev.KernelsProfiled: RequestRules._on_profiled,
        ev.GraphCaptured: RequestRules._on_graph,
        ev.RequestQueued: RequestRules._on_queued,
        ev.PrefixLookup: RequestRules._on_lookup,
        ev.AdmissionBlocked: RequestRules._on_blocked,
        ev.RequestAdmitted: RequestRules._on_admitted,
        ev.RequestPreempted: RequestRules._on_preempted,
        ev.RequestFinished: RequestRules._on_finished,
        ev.StepScheduled: RequestRules._on_scheduled,
        ev.TokensSampled: RequestRules._on_sampled,
        ev.TokenLogprobs: RequestRules._on_logprobs,
        ev.TokenPieces: RequestRules._on_pieces,
        ev.SequenceForked: RequestRules._on_forked,
        ev.BeamPruned: RequestRules._on_pruned,
        ev.DraftVerified: RequestRules._on_verified,
        ev.StepCompleted: RequestRules._on_completed,
    }


def _renumbered(batch: ev.StepBatch, skipped: int) -> ev.StepBatch:
    """The batch with the ids of requests that begin_anew gives them."""
    events = [
        e
        if getattr(e, "request_id", None) is None
        else msgspec.structs.replace(e, request_id=e.request_id - skipped)
        for e in batch.events
    ]
    return msgspec.structs.replace(batch, events=events)
