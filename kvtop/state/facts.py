"""Facts: what is known from the events so far, and how it is read.

Owns the fields behind DashboardState and their readers; writes nothing of its own accord. Blocks live in
PoolView, curves in Series, past contents in History; here are requests, sequences, counts and moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy.typing as npt

from engine import events as ev
from kvtop.state.history import History, Stored
from kvtop.state.pool_mirror import StateError
from kvtop.state.pool_view import BlockInfo, BlockState, PoolView
from kvtop.state.requests import RequestView, SequenceView
from kvtop.state.series import Series
from kvtop.state.twin import NaiveTwin

MOST_FINISHED = 10_000
"""Finished requests that are kept."""


class Moment(NamedTuple):
    """Something worth showing once. kind: queued, admitted, blocked, hit, forked, copied, stored, evicted,
    released, preempted, finished, cleared, profiled, graph, error, lost. ids: blocks, in the event's order; for
    copied (src, dst). hashes: of evicted and stored ones; `state.stored(hash)` tells their text. detail: one
    line."""

    t: float
    seq: int
    kind: str
    ids: tuple[int, ...] = ()
    request_id: int | None = None
    detail: str = ""
    hashes: tuple[str, ...] = ()


class Facts:
    """Everything public is for reading."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.generation = 0
        """Goes up when everything may have changed at once (seek, resync)."""
        self.stirs = 0
        """Batches that told more than how the device is."""
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
        self.profile: ev.KernelsProfiled | None = None
        """The latest."""
        self.graphs: tuple[int, ...] = ()
        """Batch sizes up to which decode steps run as CUDA graphs, ascending."""
        self.scheduled: ev.StepScheduled | None = None
        self.completed: ev.StepCompleted | None = None
        # requests and blocks
        self.requests: dict[int, RequestView] = {}
        self.sequences: dict[int, SequenceView] = {}
        self.waiting: list[int] = []
        """Request ids in the waiting queue, first to be admitted first as far as events tell."""
        self.running: list[int] = []
        self.pool = PoolView(1, 1)
        self.twin = NaiveTwin()
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
        self.drafts = self.drafts_accepted = 0
        """Speculative tokens that were computed, and those of them that the samples agreed with."""
        self.preemptions = 0
        self.tokens_lost = 0
        """Computed tokens that preemptions took."""
        self.tokens_back = 0
        """Of those, how many the cache gave back at the resumption; never part of the hit rate."""
        self.refused = 0
        self.audited_hits = 0
        """Hits that the engine computed again."""
        self.audited_blocks = 0
        self.wrong_blocks = 0
        self.output_tokens = 0
        self.latest_lookup: int | None = None
        """The request that looked into the cache last."""
        self.skipped = 0
        """Requests that `begin_anew` has forgotten: the engine's ids are greater by so many."""
        self._pieces: dict[int, bytes] = {}
        self._request_of: dict[int, int | None] = {}
        self._moved: set[int] = set()
        """Requests of several branches whose tables changed since they were last counted."""
        self._finished: deque[int] = deque()
        self._slow = False

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
    def slots_filled(self) -> int:
        """Token slots of the referenced blocks whose KV is written, those of a shared block once."""
        return self.pool.filled

    @property
    def slots_held(self) -> int:
        """Token slots of the referenced blocks."""
        return self.active * self.block_size

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

    def _note_moved(self, view: RequestView | None) -> None:
        if view is not None and len(view.seq_ids) > 1:
            self._moved.add(view.request_id)

    def _count_moved(self) -> None:
        """What forked requests hold at this moment, against what they would hold without sharing."""
        tables = self.pool.mirror.tables
        for i in self._moved:
            view = self.requests.get(i)
            if view is None or view.done:
                continue
            own = [tables.get(s, []) for s in view.seq_ids]
            view.held_peak = max(view.held_peak, len(set().union(*own)))
            view.unshared_peak = max(view.unshared_peak, sum(map(len, own)))
        self._moved.clear()

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

    def _close(self, view: RequestView, reason: str | None) -> None:
        view.finish_reason = reason
        view.phase, view.chunk, view.blocked = "finished", None, None
        drop(self.running, view.request_id)
        drop(self.waiting, view.request_id)
        self._finished.append(view.request_id)
        if len(self._finished) > MOST_FINISHED:
            old = self.requests.pop(self._finished.popleft(), None)
            for i in (*old.seq_ids, *old.dropped_ids) if old is not None else ():
                self._request_of.pop(i, None)


def drop(ids: list[int], request_id: int) -> None:
    """Take a request out of a queue, if it stands there."""
    if request_id in ids:
        ids.remove(request_id)
