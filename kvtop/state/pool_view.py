"""PoolView: per-block columns over the mirror, for whoever draws blocks.

Owns what the pool itself does not know: slots filled (that belongs to the sequences), birth, last use,
hits, last sequence; and which blocks changed since they were last drawn. Plain lists take the events,
since single writes into numpy arrays cost five times as much; the numpy columns are brought up to date,
for the changed blocks only, when somebody reads them.
"""

from __future__ import annotations

from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.events import (
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksStored,
    BlocksTouched,
    PoolSnapshot,
)
from kvtop.state.pool_mirror import PoolMirror


class BlockState(IntEnum):
    """What a cell shows. FILLING: one reference, slots still empty; SHARED: two references or more."""

    FREE = 0
    CACHED = 1
    FILLING = 2
    ACTIVE = 3
    SHARED = 4


class BlockInfo(NamedTuple):
    """Everything known about one block. owners: (request_id or None, index in its table); age in seconds
    since its present content began; eviction_place: 0 is the next to go, None while referenced."""

    id: int
    state: BlockState
    ref: int
    owners: list[tuple[int | None, int]]
    fill: int
    hash: str | None
    parent: str | None
    token_ids: tuple[int, ...]
    text: str
    age_s: float
    hits: int
    eviction_place: int | None
    last_owner: int | None


class PoolView:
    """Columns indexed by physical block id; `mirror` has refs, hashes, tables and the queue."""

    __slots__ = (
        "_changed",
        "_columns",
        "_dirty",
        "_fill",
        "_hits",
        "_last_seq",
        "_touched",
        "born_at",
        "filled",
        "mirror",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.mirror = PoolMirror(num_blocks, block_size)
        self._fill = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._last_seq = [-1] * num_blocks
        self._touched = [0.0] * num_blocks
        self.born_at = [0.0] * num_blocks
        self.filled = 0
        """Slots written of the referenced blocks, a shared block counted once."""
        self._changed: set[int] = set()
        """Differ from the columns."""
        self._dirty: set[int] | None = None
        """Differ from what was drawn last; None: all of them."""
        self._columns: dict[str, npt.NDArray[Any]] = {
            "ref": np.zeros(num_blocks, np.int32),
            "order": np.arange(num_blocks, dtype=np.int64),
            "fill": np.zeros(num_blocks, np.int16),
            "hashed": np.zeros(num_blocks, bool),
            "born": np.zeros(num_blocks),
            "touched": np.zeros(num_blocks),
            "hits": np.zeros(num_blocks, np.int32),
            "last_seq": np.full(num_blocks, -1, np.int32),
            "state": np.zeros(num_blocks, np.uint8),
        }

    def copy(self) -> PoolView:
        """Independent view in the same state, everything dirty."""
        other = PoolView.__new__(PoolView)
        other.mirror = self.mirror.copy()
        other._fill, other._hits, other._last_seq = self._fill[:], self._hits[:], self._last_seq[:]
        other._touched, other.born_at = self._touched[:], self.born_at[:]
        other.filled = self.filled
        other._changed = self._changed.copy()
        other._dirty = None
        other._columns = {k: v.copy() for k, v in self._columns.items()}
        return other

    # ------------------------------------------------------------------------------------ reading

    def column(self, name: str) -> npt.NDArray[Any]:
        """ref int32, state uint8 (BlockState), fill int16 (slots), order int64 (valid where ref is 0),
        hashed bool, born and touched float64 (seconds), hits int32, last_seq int32. A view: don't write."""
        if self._changed:
            self._sync()
        return self._columns[name]

    def take_dirty(self) -> npt.NDArray[np.int64]:
        """Blocks that may look different from the last call, each once, in no order."""
        if self._changed:
            self._sync()
        if self._dirty is None:
            ids = np.arange(self.mirror.num_blocks)
        else:
            ids = np.fromiter(self._dirty, np.int64, len(self._dirty))
        self._dirty = set()
        return ids

    def fill_of(self, block: int) -> int:
        """Slots written."""
        return self._fill[block]

    def hits_of(self, block: int) -> int:
        """Look-ups that read the present content."""
        return self._hits[block]

    def last_seq_of(self, block: int) -> int:
        """Sequence that used it last, -1 for none."""
        return self._last_seq[block]

    def until_eviction(self) -> int:
        """Blocks that can be taken before the first hashed one goes."""
        ref, order, hashed = self.column("ref"), self.column("order"), self.column("hashed")
        waiting = ref == 0
        waiting[0] = False
        cached = waiting & hashed
        if not cached.any():
            return int(waiting.sum())
        return int((waiting & (order < order[cached].min())).sum())

    def place(self, block: int) -> int | None:
        """Free blocks that go before this one; None while it is referenced."""
        if self.mirror.ref[block]:
            return None
        ref, order = self.column("ref"), self.column("order")
        ahead = (ref == 0) & (order < self.mirror.key[block])
        ahead[0] = False
        return int(ahead.sum())

    # --------------------------------------------------------------------------------- the events

    def allocated(self, e: BlocksAllocated, t: float) -> None:
        """New content begins in these."""
        self.mirror.allocated(e)
        for b in e.ids:
            self._begin(b, e.seq_id, t, 0)

    def touched(self, e: BlocksTouched, t: float) -> None:
        """A hit reads, a fork shares."""
        self.mirror.touched(e)
        read, ref = e.why == "hit", self.mirror.ref
        for b in e.ids:
            if ref[b] == 1:
                self.filled += self._fill[b]
            self._hits[b] += read
            self._touched[b] = t
            self._last_seq[b] = e.seq_id
        self._changed.update(e.ids)

    def copied(self, e: BlocksCopied, t: float) -> None:
        """dst begins with what src holds."""
        self.mirror.copied(e)
        self._begin(e.dst, e.seq_id, t, self._fill[e.src])
        self.filled += self._fill[e.dst]
        self._changed.add(e.src)

    def released(self, e: BlocksReleased, t: float) -> list[int]:
        """Returns the blocks that nobody refers to any more."""
        gone = self.mirror.released(e)
        hashes, size = self.mirror.hash, self.mirror.block_size
        for b in gone:
            self.filled -= self._fill[b]
            self._fill[b] = 0 if hashes[b] is None else size
            self._touched[b] = t
        self._changed.update(e.ids)
        return gone

    def stored(self, e: BlocksStored, t: float) -> int:
        """Returns how many duplicate a content that is there already."""
        duplicates = self.mirror.stored(e)
        self._changed.update(e.ids)
        return duplicates

    def evicted(self, e: BlocksEvicted) -> None:
        """The content cannot be found any more."""
        self.mirror.evicted(e)
        for b in e.ids:
            self._hits[b] = 0
            if not self.mirror.ref[b]:
                self._fill[b] = 0
        self._changed.update(e.ids)

    def cleared(self) -> list[int]:
        """Returns the blocks that had a hash."""
        had = self.mirror.cleared()
        for b in had:
            self._hits[b] = 0
            if not self.mirror.ref[b]:
                self._fill[b] = 0
        self._changed.update(had)
        return had

    def written(self, table: list[int], before: int, after: int, t: float) -> None:
        """A sequence's computed tokens went from `before` to `after` (back, where drafts were refused)."""
        low, high = (before, after) if before <= after else (after, before)
        size, fill, mirror = self.mirror.block_size, self._fill, self.mirror
        for i in range(low // size, min(-(-high // size), len(table))):
            b = table[i]
            slots = min(size, max(0, after - i * size))
            if slots > fill[b] or (mirror.ref[b] < 2 and mirror.hash[b] is None):
                self.filled += slots - fill[b]
                fill[b] = slots
                self._touched[b] = t
                self._changed.add(b)

    def load(self, snapshot: PoolSnapshot, t: float) -> None:
        """Start over from the pool's own word."""
        self.mirror.load(snapshot)
        mirror = self.mirror
        size = mirror.block_size
        self._fill = [0 if h is None else size for h in mirror.hash]
        for table, computed in zip(snapshot.tables, snapshot.computed, strict=True):
            for i, b in enumerate(table):
                slots = min(size, max(0, computed - i * size))
                self._fill[b] = max(self._fill[b], slots) if mirror.hash[b] is None else size
        self.filled = sum(f for f, r in zip(self._fill, mirror.ref, strict=True) if r)
        self._changed.update(range(mirror.num_blocks))

    # ------------------------------------------------------------------------------------- inside

    def _begin(self, b: int, seq_id: int, t: float, fill: int) -> None:
        self._fill[b] = fill
        self._hits[b] = 0
        self._last_seq[b] = seq_id
        self.born_at[b] = self._touched[b] = t
        self._changed.add(b)

    def _sync(self) -> None:
        ids = list(self._changed)
        if self._dirty is not None:
            self._dirty |= self._changed
        self._changed.clear()
        # itemgetter returns a bare item for one index; the last one twice keeps it a tuple.
        pick = itemgetter(*ids, ids[-1])
        at = np.array([*ids, ids[-1]])
        mirror, c = self.mirror, self._columns
        ref = c["ref"][at] = pick(mirror.ref)
        c["order"][at] = pick(mirror.key)
        fill = c["fill"][at] = pick(self._fill)
        hashed = c["hashed"][at] = [h is not None for h in pick(mirror.hash)]
        c["born"][at] = pick(self.born_at)
        c["touched"][at] = pick(self._touched)
        c["hits"][at] = pick(self._hits)
        c["last_seq"][at] = pick(self._last_seq)
        refs, full = np.array(ref), np.array(fill) >= mirror.block_size
        c["state"][at] = np.where(
            refs >= 2,
            BlockState.SHARED,
            np.where(
                refs == 1,
                np.where(full, BlockState.ACTIVE, BlockState.FILLING),
                np.where(hashed, BlockState.CACHED, BlockState.FREE),
            ),
        )
