"""DashboardState: everything that the screen, the headless summary and the verdict of a demo are made from.

It is a pure function of the batches applied so far, without clock, engine or terminal. It consists of parts and owns
nothing else. Each part handles the events that it needs and can be copied, so a new event changes one part, and a seek
cannot forget a field. Invariant: after every batch the blocks are what the pool's law says. A lost batch or a broken
law is counted (with strict=True it raises). Pool events are then skipped until the next PoolSnapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine import events as ev
from kvtop.state.blocks import BlockInfo, BlockState, block_info
from kvtop.state.engine import EngineInfo, PrefixCache, Steps, Vocabulary
from kvtop.state.history import History
from kvtop.state.moments import Moment, Moments
from kvtop.state.part import Part
from kvtop.state.pool import Pool
from kvtop.state.pool_mirror import StateError
from kvtop.state.request_view import RequestView
from kvtop.state.requests.branches import SequenceView
from kvtop.state.requests.requests import Requests
from kvtop.state.series import Series
from kvtop.state.stream import Stream
from kvtop.state.twin import NaiveTwin

__all__ = ["BlockInfo", "BlockState", "DashboardState", "Moment", "RequestView", "SequenceView", "StateError"]

PARTS = (
    "twin",
    "engine",
    "vocabulary",
    "pool",
    "stream",
    "history",
    "requests",
    "cache",
    "steps",
    "series",
    "moments",
)
"""In the order in which they handle an event."""

Handler = Callable[[Any, "DashboardState"], None]


class DashboardState:
    """See the module. Only `apply`, `restore` and `begin_anew` write."""

    __slots__ = (*PARTS, "_handlers", "_handlers_unsynced")

    def __init__(self, *, strict: bool = False) -> None:
        self.twin = NaiveTwin()
        self.engine = EngineInfo()
        self.vocabulary = Vocabulary()
        self.pool = Pool()
        self.stream = Stream(strict)
        self.history = History()
        self.requests = Requests()
        self.cache = PrefixCache()
        self.steps = Steps()
        self.series = Series()
        self.moments = Moments()
        self._connect()

    # ------------------------------------------------------------------------------------- batches

    def apply(self, batch: ev.StepBatch) -> None:
        """Apply the next batch. O(events). With strict=True raises StateError on the first broken law."""
        if self.requests.skipped:
            batch = _renumbered(batch, self.requests.skipped)
        stream = self.stream
        problem = stream.discontinuity(batch)
        if problem is not None:
            self._lose(*problem)
        stream.begin(batch)
        if stream.slow:
            self.requests.slow_down()
        self.twin.begin(batch)
        for e in batch.events:
            handlers = (self._handlers if stream.synced else self._handlers_unsynced).get(type(e))
            if handlers is None:
                stream.skip(e)
                continue
            try:
                for handle in handlers:
                    handle(e, self)
            except (StateError, ValueError) as error:
                self._lose(1, f"batch {batch.seq}: {error}")
        self.twin.end()

    def begin_anew(self) -> None:
        """Forget the requests so far (a warm-up) with all their figures, and number the next ones from 1.

        The contents of the blocks stay. Raises ValueError if a request is waiting or running.
        """
        requests = self.requests
        if requests.waiting or requests.running:
            raise ValueError("requests are under way")
        self.requests = Requests(skipped=requests.skipped + max(requests, default=0))
        self.cache, self.steps, self.series = PrefixCache(), Steps(), Series()
        self.moments.clear()
        self.pool.forget_counts()
        if not self.pool.num_hashes:
            self.history = History(self.history.limit)
        self.stream.generation += 1
        self._connect()

    def copy(self) -> DashboardState:
        """An independent state at this position."""
        other = DashboardState.__new__(DashboardState)
        for name in PARTS:
            setattr(other, name, getattr(self, name).copy())
        other._connect()
        return other

    def restore(self, other: DashboardState) -> None:
        """Become a copy of `other` in place, so that every widget with this state sees it (seeking)."""
        generation = max(self.generation, other.generation) + 1
        for name in PARTS:
            setattr(self, name, getattr(other, name).copy())
        self.stream.generation = generation
        self.pool.columns.mark_all_dirty()
        self._connect()

    def weight(self) -> int:
        """Roughly the bytes of a copy that it does not share with this state."""
        rows = (view for view in self.requests.values() if not view.done)
        tokens = sum(view.num_output + len(view.itl) for view in rows)
        return 300 * self.pool.mirror.num_blocks + 250 * len(self.history) + 16 * tokens + 500_000

    # ------------------------------------------------------------------------------------- reading

    @property
    def t(self) -> float:
        """Seconds on the batches' clock."""
        return self.stream.t

    @property
    def seq(self) -> int:
        """Number of the latest batch, -1 before the first."""
        return self.stream.seq

    @property
    def generation(self) -> int:
        """Increases when everything may have changed at once."""
        return self.stream.generation

    @property
    def started(self) -> ev.EngineStarted | None:
        """What the engine announced at its start."""
        return self.engine.started

    @property
    def num_blocks(self) -> int:
        """Physical blocks including the null block; 0 before EngineStarted."""
        return 0 if self.engine.started is None else self.engine.started.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block; 0 before EngineStarted."""
        return 0 if self.engine.started is None else self.engine.started.block_size

    def table(self, request_id: int) -> list[int]:
        """Physical ids of branch 0. After the end of the request: the last known ones."""
        view = self.requests[request_id]
        live = self.pool.table(view.seq_ids[0]) if view.seq_ids else []
        return (live or view.last_table)[:]

    def block(self, block: int) -> BlockInfo:
        """Everything about one block. Raises IndexError outside the pool."""
        return block_info(self, block)

    def summary(self) -> dict[str, Any]:
        """The headless summary object; figures that do not exist are absent."""
        out: dict[str, Any] = {"schema": ev.SCHEMA, "type": "summary"}
        s, requests, cache, steps = self.started, self.requests, self.cache, self.steps
        if s is not None:
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
        prefix_cache: dict[str, Any] = {
            "lookups": cache.lookups,
            "query_tokens": cache.query_tokens,
            "hit_tokens": cache.hit_tokens,
        }
        rate = cache.hit_rate()
        if rate is not None:
            prefix_cache["hit_rate"] = round(rate, 6)
        out |= {
            "requests": [r.summary() for r in requests.values()],
            "prefix_cache": prefix_cache,
            "evictions": self.pool.evictions,
            "peak_blocks": self.pool.peak_blocks,
            "slots_filled": self.pool.peak_filled,
            "slots_held": self.pool.peak_blocks * self.block_size,
        }
        if requests.preemptions:
            out["preemptions"] = {
                "count": requests.preemptions,
                "lost_tokens": requests.tokens_lost,
                "returned_tokens": requests.tokens_back,
            }
        if cache.audited_hits:
            out["audit"] = {
                "hits": cache.audited_hits,
                "blocks": cache.audited_blocks,
                "wrong": cache.wrong_blocks,
            }
        if steps.drafts:
            out["speculation"] = {"proposed": steps.drafts, "accepted": steps.drafts_accepted}
        if self.stream.losses:
            out["losses"] = self.stream.losses
        return out

    # ------------------------------------------------------------------------------------- inside

    def _connect(self) -> None:
        """Event type -> its handlers in all parts. To be called again when a part was replaced."""
        self._handlers: dict[type, list[Handler]] = {}
        for name in PARTS:
            part: Part = getattr(self, name)
            for event, method in part.handlers.items():
                self._handlers.setdefault(event, []).append(getattr(part, method))
        # The twin has no block ids that could be wrong, so it also handles pool events while the pool is not synced.
        only_twin: dict[type, list[Handler]] = {e: [] for e in ev.POOL_EVENTS}
        for event, method in self.twin.handlers.items():
            if event in only_twin:
                only_twin[event].append(getattr(self.twin, method))
        self._handlers_unsynced: dict[type, list[Handler]] = {**self._handlers, **only_twin}

    def _lose(self, count: int, text: str) -> None:
        if self.stream.strict:
            raise StateError(text)
        self.stream.lose(count)
        self.moments.note(self, "lost", detail=text)


def _renumbered(batch: ev.StepBatch, skipped: int) -> ev.StepBatch:
    """The batch with request ids counted from 1 after begin_anew."""
    events = [
        e
        if getattr(e, "request_id", None) is None
        else msgspec.structs.replace(e, request_id=e.request_id - skipped)
        for e in batch.events
    ]
    return msgspec.structs.replace(batch, events=events)
