"""DashboardState: everything the screen, the headless summary and the demos' verdicts know.

A pure function of the batches applied so far; no clock, no engine, no terminal. Owns the requests, the
sequences, the counts and the moments; blocks live in PoolView, curves in Series, past contents in
History. Exact: after every batch the blocks are what the pool's law says. A lost batch or a broken law
counts in `losses` (raises with strict=True); pool events are then left out until the next PoolSnapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from engine import events as ev
from kvtop.explain import Look, judge
from kvtop.history import Gone, History, Stored
from kvtop.pool_mirror import StateError
from kvtop.pool_view import BlockInfo, BlockState, PoolView
from kvtop.requests import RequestView, SequenceView
from kvtop.series import Series

__all__ = ["BlockInfo", "BlockState", "DashboardState", "Moment", "RequestView", "SequenceView", "StateError"]

MOST_BLOCKS = 1 << 24
"""A stream that claims more physical blocks than this is not believed."""
MOST_FINISHED = 10_000
"""Finished requests that are kept."""


class Moment(NamedTuple):
    """Something worth showing once. kind: queued, admitted, blocked, hit, forked, copied, stored, evicted,
    released, preempted, finished, cleared, error, lost. ids: blocks, in the event's order; for copied (src,
    dst). hashes: of evicted and stored ones; `state.stored(hash)` tells their text. detail: one line."""

    t: float
    seq: int
    kind: str
    ids: tuple[int, ...] = ()
    request_id: int | None = None
    detail: str = ""
    hashes: tuple[str, ...] = ()


class DashboardState:
    """See the module. Everything public is for reading; only `apply` writes."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.generation = 0
        """Goes up when everything may have changed at once (seek, resync)."""
        # the stream
        self.t = 0.0
        self.step = 0
        self.seq = -1
        self.num_events = 0
        self.num_batches = 0
        """Batches applied."""
        self.losses = 0
        """Batches that never came, and laws that broke."""
        self.synced = True
        """False from a loss to the next PoolSnapshot: blocks are then as last known."""
        self.unknown: dict[str, int] = {}
        """Event types of a newer version, skipped, with their counts."""
        # the engine
        self.started: ev.EngineStarted | None = None
        self.loading: ev.ModelLoading | None = None
        self.stopped: ev.EngineStopped | None = None
        self.errors: list[ev.EngineError] = []
        self.device: ev.DeviceSample | None = None
        self.scheduled: ev.StepScheduled | None = None
        self.completed: ev.StepCompleted | None = None
        # requests and blocks
        self.requests: dict[int, RequestView] = {}
        self.sequences: dict[int, SequenceView] = {}
        self.waiting: list[int] = []
        """Request ids in the waiting queue, first to be admitted first as far as events tell."""
        self.running: list[int] = []
        self.pool = PoolView(1, 1)
        self.history = History()
        self.series = Series()
        self.moments: deque[Moment] = deque(maxlen=4096)
        self.num_moments = 0
        """Moments ever; a reader that remembers it knows how many are new."""
        # counts
        self.lookups = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        """Blocks whose content was thrown out for other content."""
        self.duplicates = 0
        """Blocks stored although their content was in the table already."""
        self.copies = 0
        self.preemptions = 0
        self.refused = 0
        self.output_tokens = 0
        self.latest_lookup: int | None = None
        """The request that looked into the cache last."""
        self._pieces: dict[int, bytes] = {}
        self._request_of: dict[int, int | None] = {}
        self._finished: deque[int] = deque()
        self._slow = False

    # -------------------------------------------------------------------------------- applying

    def apply(self, batch: ev.StepBatch) -> None:
        """Take the next batch. O(events). With strict=True raises StateError on the first broken law."""
        if batch.seq != self.seq + 1 or batch.first_event != self.num_events or batch.t < self.t:
            self._discontinuity(batch)
        self.seq, self.step = batch.seq, batch.step
        self.num_batches += 1
        self.t = max(self.t, batch.t)
        self.num_events = batch.first_event + len(batch.events)
        self._slow = any(type(e) is ev.StepCompleted and e.slow for e in batch.events)
        if self._slow:
            for i in (*self.waiting, *self.running):
                if self.requests[i].t_first is None:
                    self.requests[i].slow = True
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
        other.sequences = {i: s.copy() for i, s in self.sequences.items()}
        for i, s in other.sequences.items():
            s.table = other.pool.mirror.tables.get(i, [])
        other.waiting, other.running = self.waiting[:], self.running[:]
        other.moments, other._finished = self.moments.copy(), self._finished.copy()
        other._pieces, other._request_of = self._pieces.copy(), self._request_of.copy()
        return other

    def restore(self, other: DashboardState) -> None:
        """Become a copy of `other` in place, so that whoever holds this state sees it (seeking)."""
        generation = max(self.generation, other.generation) + 1
        self.__dict__.update(other.copy().__dict__)
        self.generation = generation

    # --------------------------------------------------------------------------------- blocks

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included; 0 before EngineStarted."""
        return 0 if self.started is None else self.started.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block; 0 before EngineStarted."""
        return 0 if self.started is None else self.started.block_size

    @property
    def ref(self) -> npt.NDArray[Any]:
        """[num_blocks] int32."""
        return self.pool.column("ref")

    @property
    def state(self) -> npt.NDArray[Any]:
        """[num_blocks] uint8, BlockState."""
        return self.pool.column("state")

    @property
    def fill(self) -> npt.NDArray[Any]:
        """[num_blocks] int16, slots written."""
        return self.pool.column("fill")

    @property
    def order(self) -> npt.NDArray[Any]:
        """[num_blocks] int64, eviction key: smaller goes sooner; valid where ref is 0."""
        return self.pool.column("order")

    @property
    def hashed(self) -> npt.NDArray[Any]:
        """[num_blocks] bool."""
        return self.pool.column("hashed")

    @property
    def born(self) -> npt.NDArray[Any]:
        """[num_blocks] float64, seconds: when the present content began."""
        return self.pool.column("born")

    @property
    def touched(self) -> npt.NDArray[Any]:
        """[num_blocks] float64, seconds: last write, hit or release."""
        return self.pool.column("touched")

    @property
    def hits(self) -> npt.NDArray[Any]:
        """[num_blocks] int32, look-ups that read the present content."""
        return self.pool.column("hits")

    @property
    def last_seq(self) -> npt.NDArray[Any]:
        """[num_blocks] int32, the sequence that used it last, -1 for none."""
        return self.pool.column("last_seq")

    @property
    def free(self) -> int:
        """Usable blocks neither referenced nor hashed."""
        return self.pool.mirror.free

    @property
    def active(self) -> int:
        """Referenced blocks."""
        return self.pool.mirror.active

    @property
    def cached(self) -> int:
        """Blocks that nobody references but that can still be hit."""
        return self.pool.mirror.cached

    @property
    def num_hashes(self) -> int:
        """Distinct contents in the hash table."""
        return len(self.pool.mirror.where)

    @property
    def blocks_until_eviction(self) -> int:
        """Blocks that can be taken before the first cached one is thrown out."""
        return self.pool.until_eviction()

    def next_out(self, k: int) -> list[int]:
        """The k blocks that are taken next."""
        return [b for _, b in zip(range(k), self.pool.mirror.queue(), strict=False)]

    def block(self, id: int) -> BlockInfo:
        """Everything about one block. Raises IndexError outside the pool."""
        pool, mirror = self.pool, self.pool.mirror
        if not 0 <= id < mirror.num_blocks:
            raise IndexError(f"block {id} is outside 0..{mirror.num_blocks - 1}")
        held = [(s, t.index(id)) for s, t in mirror.tables.items() if id in t] if mirror.ref[id] else []
        h = mirror.hash[id]
        record = self.history.get(h) if h is not None else None
        tokens = record.token_ids if record is not None else ()
        if not tokens and held:
            tokens = self._tokens_in(*held[0], pool.fill_of(id))
        return BlockInfo(
            id=id,
            state=BlockState(int(self.state[id])),
            ref=mirror.ref[id],
            owners=[(self._request_of.get(s), i) for s, i in held],
            fill=pool.fill_of(id),
            hash=h,
            parent=record.parent if record is not None else None,
            token_ids=tokens,
            text=self.text_of(tokens),
            age_s=max(0.0, self.t - pool.born_at[id]),
            hits=pool.hits_of(id),
            eviction_place=pool.place(id) if id else None,
            last_owner=self._request_of.get(pool.last_seq_of(id)),
        )

    def hash_of(self, id: int) -> str | None:
        """Hash that this block carries, 32 hex digits."""
        return self.pool.mirror.hash[id]

    def find(self, hash_: str) -> tuple[int, ...]:
        """Blocks that carry this hash now, the one a look-up reads first."""
        return self.pool.mirror.where.get(hash_, ())

    def stored(self, hash_: str) -> Stored | None:
        """What was stored under this hash, also after its eviction, as long as it is remembered."""
        return self.history.get(hash_)

    # -------------------------------------------------------------------------------- requests

    def table(self, request_id: int) -> list[int]:
        """Physical ids of branch 0; after the end as last known."""
        view = self.requests[request_id]
        if view.seq_ids:
            live = self.pool.mirror.tables.get(view.seq_ids[0])
            if live:
                return live[:]
        return view.last_table[:]

    def text_of(self, token_ids: Iterable[int]) -> str:
        """From TokenPieces; a token that the stream never explained reads as U+FFFD."""
        pieces = self._pieces
        return b"".join([pieces.get(i, b"\xef\xbf\xbd") for i in token_ids]).decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token, perhaps half a character; U+FFFD if the stream never explained it."""
        return self._pieces.get(token_id, b"\xef\xbf\xbd")

    def request_of(self, seq_id: int) -> int | None:
        """The request of a sequence, also after its end; None if unknown."""
        return self._request_of.get(seq_id)

    def hit_rate(self) -> float | None:
        """Hit tokens / prompt tokens over first admissions, 0..1; None without look-ups."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

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
        if self.losses:
            out["losses"] = self.losses
        return out

    # ----------------------------------------------------------------------------- losing track

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

    def _lose(self, count: int, text: str) -> None:
        if self.strict:
            raise StateError(text)
        self.losses += count
        self.synced = False
        self._moment("lost", detail=text)

    def _moment(
        self,
        kind: str,
        ids: Iterable[int] = (),
        request_id: int | None = None,
        detail: str = "",
        hashes: Iterable[str] = (),
    ) -> None:
        self.moments.append(Moment(self.t, self.seq, kind, tuple(ids), request_id, detail, tuple(hashes)))
        self.num_moments += 1

    # -------------------------------------------------------------------------------- pool events

    def _on_allocated(self, e: ev.BlocksAllocated) -> None:
        self.pool.allocated(e, self.t)
        self._sequence(e.seq_id)

    def _on_touched(self, e: ev.BlocksTouched) -> None:
        self.pool.touched(e, self.t)
        request_id = self._sequence(e.seq_id).request_id
        if e.why == "hit":
            self._moment("hit", e.ids, request_id)
            if request_id is not None:
                self._note_hits(self.requests.get(request_id), e.seq_id)
        else:
            self._moment("forked", e.ids, request_id)

    def _on_copied(self, e: ev.BlocksCopied) -> None:
        self.pool.copied(e, self.t)
        self.copies += 1
        self._moment("copied", (e.src, e.dst), self._sequence(e.seq_id).request_id, f"{e.src}→{e.dst}")

    def _on_released(self, e: ev.BlocksReleased) -> None:
        sequence = self._sequence(e.seq_id)
        view = self._view_of(sequence)
        if view is not None and not view.done and len(e.ids) == len(sequence.table) and sequence.branch == 0:
            view.last_table = sequence.table[:]
        self.pool.released(e, self.t)
        sequence.table = self.pool.mirror.tables.get(e.seq_id, [])
        if not sequence.table and (view is None or view.done):
            self.sequences.pop(e.seq_id, None)
        self._moment("released", e.ids, sequence.request_id)

    def _on_stored(self, e: ev.BlocksStored) -> None:
        if self.block_size and len(e.token_ids) not in (0, len(e.ids) * self.block_size):
            raise StateError(f"BlocksStored: {len(e.token_ids)} tokens for {len(e.ids)} blocks")
        self.duplicates += self.pool.stored(e, self.t)
        parent, size = e.parent, self.block_size
        for k, h in enumerate(e.hashes):
            tokens = tuple(e.token_ids[k * size : (k + 1) * size])
            salt = e.salt if e.start_index + k == 0 else None
            self.history.stored(Stored(h, parent, e.start_index + k, tokens, salt, e.seq_id, self.t))
            parent = h
        self._moment("stored", e.ids, self._sequence(e.seq_id).request_id, hashes=e.hashes)

    def _on_evicted(self, e: ev.BlocksEvicted) -> None:
        told = [(self.pool.hits_of(b), self.pool.born_at[b]) for b in e.ids if 0 <= b < self.num_blocks]
        self.pool.evicted(e)
        for h, (hits, born) in zip(e.hashes, told, strict=True):
            if h not in self.pool.mirror.where:
                self.history.left(h, Gone(self.t, e.why, e.by_seq, hits, born))
        request_id = None
        if e.why == "reallocated":
            self.evictions += len(e.ids)
            self.series.evictions.add(self.t, len(e.ids))
            if e.by_seq is not None:
                sequence = self._sequence(e.by_seq)
                request_id, view = sequence.request_id, self._view_of(sequence)
                (sequence if view is None else view).evicted_ids.extend(e.ids)
        self._moment("evicted", e.ids, request_id, e.why, e.hashes)

    def _on_cleared(self, e: ev.CacheCleared) -> None:
        hits = {
            h: (self.pool.hits_of(b[0]), self.pool.born_at[b[0]]) for h, b in self.pool.mirror.where.items()
        }
        ids = self.pool.cleared()
        for h, (n, born) in hits.items():
            self.history.left(h, Gone(self.t, "reset", None, n, born))
        self._moment("cleared", ids)

    def _on_snapshot(self, e: ev.PoolSnapshot) -> None:
        mirror = self.pool.mirror
        if self.strict:
            wrong = mirror.differences(e)
            for i, computed in zip(e.seq_ids, e.computed, strict=True):
                mine = self.sequences[i].num_computed if i in self.sequences else 0
                if mine != computed:
                    wrong.append(
                        f"computed tokens of sequence {i}: replayed {mine}, the pool says {computed}"
                    )
            if wrong:
                raise StateError(f"PoolSnapshot: {wrong[0]}")
            return
        if self.synced:
            hashed = sum(len(b) for b in mirror.where.values())
            if sum(e.refs[1::3]) == mirror.active and len(e.hashed_ids) == hashed:
                return
            self.losses += 1
        self._resync(e)

    def _resync(self, e: ev.PoolSnapshot) -> None:
        self.pool.load(e, self.t)
        self.synced = True
        self.generation += 1
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            self._sequence(i).num_computed = computed
        alive = set(e.seq_ids)
        for i in list(self.sequences):
            if i not in alive:
                del self.sequences[i]
            else:
                self.sequences[i].table = self.pool.mirror.tables.get(i, [])
        for i in [i for i in self.running if alive.isdisjoint(self.requests[i].seq_ids)]:
            self._close(self.requests[i], None)

    # ---------------------------------------------------------------------------------- the engine

    def _on_loading(self, e: ev.ModelLoading) -> None:
        self.loading = e

    def _on_started(self, e: ev.EngineStarted) -> None:
        if self.started is not None:
            raise StateError("a second EngineStarted")
        if not 2 <= e.num_blocks <= MOST_BLOCKS or e.block_size < 1:
            raise StateError(f"EngineStarted: {e.num_blocks} blocks of {e.block_size} tokens cannot be")
        self.started = e
        self.pool = PoolView(e.num_blocks, e.block_size)
        self.history = History(max(4 * e.num_blocks, 20_000))
        self.generation += 1

    def _on_stopped(self, e: ev.EngineStopped) -> None:
        self.stopped = e

    def _on_error(self, e: ev.EngineError) -> None:
        self.errors.append(e)
        del self.errors[:-1000]
        self._moment("error", request_id=e.request_id, detail=e.message)

    def _on_device(self, e: ev.DeviceSample) -> None:
        self.device = e
        for name in ("util", "memory", "power"):
            value = getattr(e, name)
            if value is not None:
                getattr(self.series, name).add(self.t, value)

    # ------------------------------------------------------------------------------------ requests

    def _on_queued(self, e: ev.RequestQueued) -> None:
        tokens = len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0)
        self.requests[e.request_id] = RequestView(
            request_id=e.request_id,
            t_arrival=e.t_arrival,
            prompt_token_ids=e.prompt_token_ids,
            prompt_tokens=tokens,
            spans=e.spans,
            params=e.params,
            n=e.n,
            priority=e.priority,
            salt=e.salt,
            conversation=e.conversation,
            slow=self._slow,
        )
        self.waiting.append(e.request_id)
        self._moment("queued", request_id=e.request_id)

    def _on_lookup(self, e: ev.PrefixLookup) -> None:
        view = self.requests.get(e.request_id)
        if e.resumed:
            return
        self.lookups += 1
        self.query_tokens += e.prompt_tokens
        self.hit_tokens += e.hit_tokens
        self.series.hit_rate.add(self.t, self.hit_tokens / max(1, self.query_tokens))
        self.latest_lookup = e.request_id
        if view is None:
            return
        view.looked_up, view.t_lookup = True, self.t
        view.prompt_tokens = e.prompt_tokens
        view.lookup_hashes, view.hit_blocks, view.queried_blocks = e.hashes, e.hit_blocks, e.queried_blocks
        view.hit_tokens, view.template_rewrote_history = e.hit_tokens, e.template_rewrote_history
        running = (self.requests[i] for i in self.running)
        view.explanation = judge(Look(view, self.block_size, self.t, self.history, running, self._request_of))

    def _on_blocked(self, e: ev.AdmissionBlocked) -> None:
        view = self.requests.get(e.request_id)
        if view is not None:
            view.blocked = e
        self._moment("blocked", request_id=e.request_id, detail=f"{e.reason}: needs {e.need}, {e.free} free")

    def _on_admitted(self, e: ev.RequestAdmitted) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.request_id = self._request_of[e.seq_id] = e.request_id
        sequence.num_computed = e.cached_tokens
        view = self.requests.get(e.request_id)
        if view is None:
            return
        if e.seq_id not in view.seq_ids:
            view.seq_ids.append(e.seq_id)
        sequence.branch = view.seq_ids.index(e.seq_id)
        if sequence.branch == 0:
            view.num_computed = e.cached_tokens
        view.phase, view.blocked = "running", None
        view.evicted_ids += sequence.evicted_ids
        sequence.evicted_ids = []
        if e.resumed:
            view.resumed += 1
        else:
            view.t_admitted = self.t
            view.cached_tokens = e.cached_tokens
            self._note_hits(view, e.seq_id)
        _drop(self.waiting, e.request_id)
        _drop(self.running, e.request_id)
        self.running.append(e.request_id)
        self._moment("admitted", request_id=e.request_id, detail="resumed" if e.resumed else "")

    def _on_preempted(self, e: ev.RequestPreempted) -> None:
        self.preemptions += 1
        for i in e.seq_ids:
            self._sequence(i).num_computed = 0
        view = self.requests.get(e.request_id)
        if view is None:
            return
        view.phase, view.chunk, view.num_computed = "preempted", None, 0
        view.preemptions += 1
        view.tokens_lost += e.tokens_lost
        _drop(self.running, e.request_id)
        _drop(self.waiting, e.request_id)
        self.waiting.insert(0, e.request_id)
        self._moment("preempted", request_id=e.request_id, detail=f"{e.tokens_lost} tokens lost")

    def _on_finished(self, e: ev.RequestFinished) -> None:
        view = self.requests.get(e.request_id)
        if view is None:
            return
        view.usage, view.error = e.usage, e.error
        t = e.timings
        view.t_arrival = t.t_arrival
        view.t_admitted, view.t_first, view.t_last = t.t_admitted, t.t_first_token, t.t_last_token
        view.t_finished = self.t if t.t_finished is None else t.t_finished
        for i in view.seq_ids:
            sequence = self.sequences.get(i)
            if sequence is not None and sequence.table:
                if sequence.branch == 0:
                    view.last_table = sequence.table[:]
            else:
                self.sequences.pop(i, None)
        self.refused += e.reason == "refused"
        self._close(view, e.reason)
        self._moment("finished", request_id=e.request_id, detail=e.reason)

    def _close(self, view: RequestView, reason: str | None) -> None:
        view.finish_reason = reason
        view.phase, view.chunk, view.blocked = "finished", None, None
        _drop(self.running, view.request_id)
        _drop(self.waiting, view.request_id)
        self._finished.append(view.request_id)
        if len(self._finished) > MOST_FINISHED:
            old = self.requests.pop(self._finished.popleft(), None)
            for i in old.seq_ids if old is not None else ():
                self._request_of.pop(i, None)

    # --------------------------------------------------------------------------------------- steps

    def _on_scheduled(self, e: ev.StepScheduled) -> None:
        self.scheduled = e
        prefill = 0
        for i, start, n in zip(e.seq_ids, e.start, e.n, strict=True):
            sequence = self._sequence(i)
            if start > sequence.num_computed:  # a running prefill found more in the cache
                sequence.num_computed = start
            view = self._view_of(sequence)
            if view is None or sequence.branch:
                continue
            in_prompt = max(0, min(n, view.prompt_tokens - start))
            view.chunk = (start, in_prompt) if in_prompt else None
            prefill += in_prompt
        if prefill:
            self.series.prefill.add(self.t, prefill)

    def _on_sampled(self, e: ev.TokensSampled) -> None:
        at = 0
        total = 0
        for i, count, computed, text in zip(e.seq_ids, e.counts, e.num_computed, e.text, strict=True):
            tokens = e.token_ids[at : at + count]
            at += count
            total += count
            sequence = self._sequence(i)
            if self.synced:
                self.pool.written(sequence.table, sequence.num_computed, computed, self.t)
            sequence.num_computed = computed
            view = self._view_of(sequence)
            if view is not None and not view.done:
                self._note_tokens(sequence, view, tokens, count, text)
        if total:
            self.output_tokens += total
            self.series.output.add(self.t, total)

    def _note_tokens(
        self, sequence: SequenceView, view: RequestView, tokens: list[int], count: int, text: str
    ) -> None:
        sequence.output_ids += tokens
        sequence.text += text
        view.num_output += count
        if sequence.branch == 0:
            view.num_computed = sequence.num_computed
            view.output_ids += tokens
            view.text += text
        if text:
            view.texts[sequence.seq_id] = sequence.text
        if not count:
            return
        if view.t_first is None:
            view.t_first = self.t
            if not view.slow:
                self.series.ttft.add(self.t, self.t - view.t_arrival, view.cached_tokens)
        elif sequence.t_last is not None and not self._slow:
            gap = (self.t - sequence.t_last) / count
            for _ in range(count):
                view.itl.append(gap)
                self.series.itl.add(self.t, gap, sequence.num_computed)
        sequence.t_last = view.t_last = self.t

    def _on_pieces(self, e: ev.TokenPieces) -> None:
        self._pieces.update(zip(e.ids, e.bytes, strict=True))

    def _on_forked(self, e: ev.SequenceForked) -> None:
        parent, child = self._sequence(e.parent), self._sequence(e.child)
        child.request_id = self._request_of[e.child] = e.request_id
        child.num_computed = parent.num_computed
        child.output_ids, child.text, child.t_last = parent.output_ids[:], parent.text, parent.t_last
        view = self.requests.get(e.request_id)
        if view is not None:
            if e.child not in view.seq_ids:
                view.seq_ids.append(e.child)
            child.branch = view.seq_ids.index(e.child)

    def _on_nothing(self, e: ev.Event) -> None:
        """Known, but no figure of this state follows from it."""

    def _on_completed(self, e: ev.StepCompleted) -> None:
        self.completed = e
        self.series.step.add(
            self.t, e.t_schedule + e.t_prepare + e.t_forward + e.t_sample, e.decode_tokens + e.prefill_tokens
        )

    # -------------------------------------------------------------------------------------- inside

    def _sequence(self, seq_id: int) -> SequenceView:
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            sequence = self.sequences[seq_id] = SequenceView(seq_id, self._request_of.get(seq_id))
            view = self._view_of(sequence)
            if view is not None and seq_id in view.seq_ids:
                sequence.branch = view.seq_ids.index(seq_id)
        if not sequence.table:
            sequence.table = self.pool.mirror.tables.get(seq_id, sequence.table)
        return sequence

    def _view_of(self, sequence: SequenceView | None) -> RequestView | None:
        if sequence is None or sequence.request_id is None:
            return None
        return self.requests.get(sequence.request_id)

    def _note_hits(self, view: RequestView | None, seq_id: int) -> None:
        if view is not None and not view.resumed and len(view.hit_ids) < view.hit_blocks:
            view.hit_ids = self.pool.mirror.tables.get(seq_id, [])[: view.hit_blocks]

    def _tokens_in(self, seq_id: int, index: int, fill: int) -> tuple[int, ...]:
        sequence = self.sequences.get(seq_id)
        view = self._view_of(sequence)
        if sequence is None or view is None or not view.prompt_token_ids:
            return ()
        start = index * self.block_size
        end, n = start + fill, view.prompt_tokens
        head = view.prompt_token_ids[start:end]
        return (*head, *sequence.output_ids[max(0, start - n) : max(0, end - n)])

    _handlers: ClassVar[dict[type, Callable[[DashboardState, Any], None]]] = {
        ev.BlocksAllocated: _on_allocated,
        ev.BlocksTouched: _on_touched,
        ev.BlocksCopied: _on_copied,
        ev.BlocksReleased: _on_released,
        ev.BlocksStored: _on_stored,
        ev.BlocksEvicted: _on_evicted,
        ev.CacheCleared: _on_cleared,
        ev.PoolSnapshot: _on_snapshot,
        ev.ModelLoading: _on_loading,
        ev.EngineStarted: _on_started,
        ev.EngineStopped: _on_stopped,
        ev.EngineError: _on_error,
        ev.DeviceSample: _on_device,
        ev.RequestQueued: _on_queued,
        ev.PrefixLookup: _on_lookup,
        ev.AdmissionBlocked: _on_blocked,
        ev.RequestAdmitted: _on_admitted,
        ev.RequestPreempted: _on_preempted,
        ev.RequestFinished: _on_finished,
        ev.StepScheduled: _on_scheduled,
        ev.TokensSampled: _on_sampled,
        ev.TokenPieces: _on_pieces,
        ev.SequenceForked: _on_forked,
        ev.BeamPruned: _on_nothing,
        ev.DraftVerified: _on_nothing,
        ev.StepCompleted: _on_completed,
    }


def _drop(ids: list[int], request_id: int) -> None:
    if request_id in ids:
        ids.remove(request_id)
