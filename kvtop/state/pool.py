"""Pool: the part with the state of every block.

Owns the mirror (refs, hashes, tables and the queue, by the law in engine.events), the columns with the contents of the
blocks, and the counts of evictions and copies. Invariant: an event that the law forbids raises StateError here, before
a later part handles it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine import events as ev
from kvtop.state.blocks import BlockColumns
from kvtop.state.part import Part, takes
from kvtop.state.pool_mirror import PoolMirror, StateError

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class LostContent(NamedTuple):
    """A content that left the hash table. blocks: those that had it. hits: how often it was read. born: when it
    began."""

    hash: str
    blocks: tuple[int, ...]
    hits: int
    born: float


class Pool(Part):
    """Columns are indexed by physical block id, including the null block 0."""

    __slots__ = (
        *("columns", "copies", "duplicates", "evictions", "filled", "lost", "mirror", "peak_blocks"),
        *("peak_filled", "reloaded"),
    )

    def __init__(self, num_blocks: int = 1, block_size: int = 1) -> None:
        self.mirror = PoolMirror(num_blocks, block_size)
        self.columns = BlockColumns(num_blocks)
        self.filled = 0
        """Written token slots of the referenced blocks; those of a shared block count once."""
        self.peak_blocks = 0
        """Most referenced blocks after a step."""
        self.peak_filled = 0
        """Written slots at `peak_blocks`; the most, if several steps had the same number of blocks."""
        self.evictions = 0
        """Blocks whose content was evicted for other content."""
        self.duplicates = 0
        """Blocks that were stored although another block already had their content."""
        self.copies = 0
        self.lost: tuple[LostContent, ...] = ()
        """The contents that the latest BlocksEvicted or CacheCleared removed from the hash table."""
        self.reloaded = False
        """The latest PoolSnapshot replaced the mirror, because the two differed."""

    # ----------------------------------------------------------------------------------- columns

    @property
    def ref(self) -> npt.NDArray[Any]:
        """[num_blocks] int32."""
        return self.columns.read("ref", self.mirror)

    @property
    def state(self) -> npt.NDArray[Any]:
        """[num_blocks] uint8, BlockState."""
        return self.columns.read("state", self.mirror)

    @property
    def fill(self) -> npt.NDArray[Any]:
        """[num_blocks] int16, slots written."""
        return self.columns.read("fill", self.mirror)

    @property
    def order(self) -> npt.NDArray[Any]:
        """[num_blocks] int64, eviction key: a smaller key is taken sooner. Valid where ref is 0."""
        return self.columns.read("order", self.mirror)

    @property
    def hashed(self) -> npt.NDArray[Any]:
        """[num_blocks] bool."""
        return self.columns.read("hashed", self.mirror)

    @property
    def born(self) -> npt.NDArray[Any]:
        """[num_blocks] float64, time at which the present content began, in seconds."""
        return self.columns.read("born", self.mirror)

    @property
    def touched(self) -> npt.NDArray[Any]:
        """[num_blocks] float64, time of the last write, hit or release, in seconds."""
        return self.columns.read("touched", self.mirror)

    @property
    def hits(self) -> npt.NDArray[Any]:
        """[num_blocks] int32, cache hits on the present content."""
        return self.columns.read("hits", self.mirror)

    @property
    def last_seq(self) -> npt.NDArray[Any]:
        """[num_blocks] int32, the sequence that used the block last; -1: none."""
        return self.columns.read("last_seq", self.mirror)

    def take_dirty(self) -> npt.NDArray[np.int64]:
        """Ids of the blocks that may look different since the last call, each once."""
        return self.columns.take_dirty(self.mirror)

    # ----------------------------------------------------------------------------------- figures

    @property
    def free(self) -> int:
        """Usable blocks that are neither referenced nor hashed."""
        return self.mirror.free

    @property
    def active(self) -> int:
        """Referenced blocks."""
        return self.mirror.active

    @property
    def cached(self) -> int:
        """Blocks that are in no table but can still be hit."""
        return self.mirror.cached

    @property
    def num_hashes(self) -> int:
        """Distinct contents in the hash table."""
        return len(self.mirror.where)

    @property
    def held(self) -> int:
        """Token slots of the referenced blocks."""
        return self.mirror.active * self.mirror.block_size

    @property
    def blocks_until_eviction(self) -> int:
        """Blocks that can be taken before the first cached one is evicted."""
        waiting = self.ref == 0
        waiting[0] = False
        cached = waiting & self.hashed
        if not cached.any():
            return int(waiting.sum())
        order = self.order
        return int((waiting & (order < order[cached].min())).sum())

    def next_out(self, k: int) -> list[int]:
        """The k blocks that are taken next."""
        return list(islice(self.mirror.queue(), k))

    def place(self, block: int) -> int | None:
        """Free blocks that are taken before this one; None while it is referenced."""
        if self.mirror.ref[block]:
            return None
        ahead = (self.ref == 0) & (self.order < self.mirror.key[block])
        ahead[0] = False
        return int(ahead.sum())

    def table(self, seq_id: int) -> list[int]:
        """Physical block of each logical block of a sequence. The list is live; readers must not change it."""
        return self.mirror.tables.get(seq_id, [])

    def find(self, hash_: str) -> tuple[int, ...]:
        """Blocks with this hash; a look-up takes the first of them."""
        return self.mirror.where.get(hash_, ())

    def hash_of(self, block: int) -> str | None:
        """Hash of this block, 32 hex digits."""
        return self.mirror.hash[block]

    def forget_counts(self) -> None:
        """Set all counts to 0. The blocks do not change."""
        self.evictions = self.duplicates = self.copies = 0
        self.peak_blocks = self.peak_filled = 0

    # --------------------------------------------------------------------------------- the events

    @takes(ev.EngineStarted)
    def _started(self, e: ev.EngineStarted, state: DashboardState) -> None:
        self.mirror = PoolMirror(e.num_blocks, e.block_size)
        self.columns = BlockColumns(e.num_blocks)

    @takes(ev.BlocksAllocated)
    def _allocated(self, e: ev.BlocksAllocated, state: DashboardState) -> None:
        self.mirror.allocated(e)
        for b in e.ids:
            self.columns.begin(b, e.seq_id, state.stream.t, 0)

    @takes(ev.BlocksTouched)
    def _touched(self, e: ev.BlocksTouched, state: DashboardState) -> None:
        self.mirror.touched(e)
        columns, ref, read, t = self.columns, self.mirror.ref, e.why == "hit", state.stream.t
        for b in e.ids:
            if ref[b] == 1:
                self.filled += columns.fill[b]
            columns.hits[b] += read
            columns.touched[b] = t
            columns.last_seq[b] = e.seq_id
        columns.change(e.ids)

    @takes(ev.BlocksCopied)
    def _copied(self, e: ev.BlocksCopied, state: DashboardState) -> None:
        self.mirror.copied(e)
        fill = self.columns.fill[e.src]
        self.columns.begin(e.dst, e.seq_id, state.stream.t, fill)
        self.columns.change((e.src,))
        self.filled += fill
        self.copies += 1

    @takes(ev.BlocksReleased)
    def _released(self, e: ev.BlocksReleased, state: DashboardState) -> None:
        columns, hashes, size, t = self.columns, self.mirror.hash, self.mirror.block_size, state.stream.t
        for b in self.mirror.released(e):
            self.filled -= columns.fill[b]
            columns.fill[b] = 0 if hashes[b] is None else size
            columns.touched[b] = t
        columns.change(e.ids)

    @takes(ev.BlocksStored)
    def _stored(self, e: ev.BlocksStored, state: DashboardState) -> None:
        if len(e.token_ids) not in (0, len(e.ids) * self.mirror.block_size):
            raise StateError(f"BlocksStored: {len(e.token_ids)} tokens for {len(e.ids)} blocks")
        self.duplicates += self.mirror.stored(e)
        self.columns.change(e.ids)

    @takes(ev.BlocksEvicted)
    def _evicted(self, e: ev.BlocksEvicted, state: DashboardState) -> None:
        self.mirror.evicted(e)
        where = self.mirror.where
        self.lost = tuple(self._lost(h, (b,)) for b, h in zip(e.ids, e.hashes, strict=True) if h not in where)
        self._forget(e.ids)
        if e.why == "reallocated":
            self.evictions += len(e.ids)

    @takes(ev.CacheCleared)
    def _cleared(self, e: ev.CacheCleared, state: DashboardState) -> None:
        self.lost = tuple(self._lost(h, blocks) for h, blocks in self.mirror.where.items())
        self._forget(self.mirror.cleared())

    @takes(ev.TokensSampled)
    def _sampled(self, e: ev.TokensSampled, state: DashboardState) -> None:
        if not state.stream.synced:
            return
        tables, sequences, t = self.mirror.tables, state.requests.sequences, state.stream.t
        for i, computed in zip(e.seq_ids, e.num_computed, strict=True):
            table = tables.get(i)
            if table:
                sequence = sequences.get(i)
                self._written(table, 0 if sequence is None else sequence.num_computed, computed, t)
        active = self.mirror.active
        if active > self.peak_blocks or (active == self.peak_blocks and self.filled > self.peak_filled):
            self.peak_blocks, self.peak_filled = active, self.filled

    @takes(ev.PoolSnapshot)
    def _snapshot(self, e: ev.PoolSnapshot, state: DashboardState) -> None:
        self.reloaded = False
        if state.stream.strict:
            wrong = self.mirror.differences(e) or state.requests.branches.differences(e)
            if wrong:
                raise StateError(f"PoolSnapshot: {wrong[0]}")
        elif not state.stream.synced or not self._agrees(e):
            self._load(e)
            self.reloaded = True

    # ------------------------------------------------------------------------------------- inside

    def _lost(self, hash_: str, blocks: tuple[int, ...]) -> LostContent:
        return LostContent(hash_, blocks, self.columns.hits[blocks[0]], self.columns.born[blocks[0]])

    def _forget(self, ids: list[int]) -> None:
        """These blocks have lost their hash."""
        for b in ids:
            self.columns.hits[b] = 0
            if not self.mirror.ref[b]:
                self.columns.fill[b] = 0
        self.columns.change(ids)

    def _written(self, table: list[int], before: int, after: int, t: float) -> None:
        """The computed tokens of a sequence changed from `before` to `after`. Rejected drafts make it fewer."""
        low, high = (before, after) if before <= after else (after, before)
        size, fill, mirror = self.mirror.block_size, self.columns.fill, self.mirror
        for i in range(low // size, min(-(-high // size), len(table))):
            b = table[i]
            slots = min(size, max(0, after - i * size))
            if slots > fill[b] or (mirror.ref[b] < 2 and mirror.hash[b] is None):
                self.filled += slots - fill[b]
                self.columns.write(b, slots, t)

    def _agrees(self, e: ev.PoolSnapshot) -> bool:
        hashed = sum(len(blocks) for blocks in self.mirror.where.values())
        return sum(e.refs[1::3]) == self.mirror.active and len(e.hashed_ids) == hashed

    def _load(self, e: ev.PoolSnapshot) -> None:
        """Replace the mirror by the engine's snapshot."""
        self.mirror.load(e)
        mirror = self.mirror
        size = mirror.block_size
        fill = [0 if h is None else size for h in mirror.hash]
        for table, computed in zip(e.tables, e.computed, strict=True):
            for i, b in enumerate(table):
                slots = min(size, max(0, computed - i * size))
                fill[b] = max(fill[b], slots) if mirror.hash[b] is None else size
        self.columns.fill = fill
        self.filled = sum(f for f, r in zip(fill, mirror.ref, strict=True) if r)
        self.columns.change(range(mirror.num_blocks))
