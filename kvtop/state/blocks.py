"""The contents of the blocks: columns over all blocks for drawing, and everything about one block.

Owns what the engine's pool does not keep: the filled slots, the time of birth and of the last use, the hits and the
last sequence of each block, and which blocks have changed since they were last drawn. Events write into plain lists,
since a single write into a numpy array costs five times as much. The numpy columns are updated when they are read, and
only for the blocks that have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtop.state.part import Copied

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.pool_mirror import PoolMirror


class BlockState(IntEnum):
    """What a cell shows. FILLING: one reference and empty slots. SHARED: two references or more."""

    FREE = 0
    CACHED = 1
    FILLING = 2
    ACTIVE = 3
    SHARED = 4


class BlockColumns(Copied):
    """Indexed by physical block id, including the null block 0."""

    __slots__ = ("_changed", "_columns", "_dirty", "born", "fill", "hits", "last_seq", "touched")

    def __init__(self, num_blocks: int) -> None:
        self.fill = [0] * num_blocks
        """Slots written."""
        self.hits = [0] * num_blocks
        """Cache hits on the present content."""
        self.last_seq = [-1] * num_blocks
        """The sequence that used the block last; -1: none."""
        self.touched = [0.0] * num_blocks
        """Time of the last write, hit or release, in seconds."""
        self.born = [0.0] * num_blocks
        """Time at which the present content began, in seconds."""
        self._changed: set[int] = set()
        """Blocks whose columns are out of date."""
        self._dirty: set[int] | None = None
        """Blocks that may differ from what was drawn last. None: all blocks."""
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

    def read(self, name: str, mirror: PoolMirror) -> npt.NDArray[Any]:
        """[num_blocks] The column, up to date. Readers must not change it."""
        if self._changed:
            self._sync(mirror)
        return self._columns[name]

    def take_dirty(self, mirror: PoolMirror) -> npt.NDArray[np.int64]:
        """Blocks that may look different since the last call, each once, in any order."""
        if self._changed:
            self._sync(mirror)
        if self._dirty is None:
            ids = np.arange(mirror.num_blocks)
        else:
            ids = np.fromiter(self._dirty, np.int64, len(self._dirty))
        self._dirty = set()
        return ids

    def mark_all_dirty(self) -> None:
        """Every block may look different from what was drawn last."""
        self._dirty = None

    def change(self, blocks: Iterable[int]) -> None:
        """The columns of these blocks are out of date."""
        self._changed.update(blocks)

    def begin(self, b: int, seq_id: int, t: float, fill: int) -> None:
        """New content begins in this block."""
        self.fill[b] = fill
        self.hits[b] = 0
        self.last_seq[b] = seq_id
        self.born[b] = self.touched[b] = t
        self._changed.add(b)

    def write(self, b: int, slots: int, t: float) -> None:
        """The number of written slots of a block has changed."""
        self.fill[b] = slots
        self.touched[b] = t
        self._changed.add(b)

    def _sync(self, mirror: PoolMirror) -> None:
        ids = list(self._changed)
        if self._dirty is not None:
            self._dirty |= self._changed
        self._changed.clear()
        # For a single index itemgetter returns no tuple, so the last index is given twice.
        pick = itemgetter(*ids, ids[-1])
        at, c = np.array([*ids, ids[-1]]), self._columns
        ref = c["ref"][at] = pick(mirror.ref)
        c["order"][at] = pick(mirror.key)
        fill = c["fill"][at] = pick(self.fill)
        hashed = c["hashed"][at] = [h is not None for h in pick(mirror.hash)]
        c["born"][at] = pick(self.born)
        c["touched"][at] = pick(self.touched)
        c["hits"][at] = pick(self.hits)
        c["last_seq"][at] = pick(self.last_seq)
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


class BlockInfo(NamedTuple):
    """Everything that is known about one block.

    owners: (request_id or None, index in its table). age_s: seconds since the present content began. eviction_place: 0
    is evicted next; None while the block is referenced.
    """

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


def block_info(state: DashboardState, block: int) -> BlockInfo:
    """Raises IndexError for a block outside the pool."""
    pool, mirror, requests = state.pool, state.pool.mirror, state.requests
    if not 0 <= block < mirror.num_blocks:
        raise IndexError(f"block {block} is outside 0..{mirror.num_blocks - 1}")
    held = [(s, t.index(block)) for s, t in mirror.tables.items() if block in t] if mirror.ref[block] else []
    hash_ = mirror.hash[block]
    record = state.history.get(hash_) if hash_ is not None else None
    tokens = record.token_ids if record is not None else ()
    if not tokens and held:
        seq_id, index = held[0]
        first = index * mirror.block_size
        tokens = requests.tokens(seq_id, first, first + pool.columns.fill[block])
    return BlockInfo(
        id=block,
        state=BlockState(int(pool.state[block])),
        ref=mirror.ref[block],
        owners=[(requests.of_sequence(s), i) for s, i in held],
        fill=pool.columns.fill[block],
        hash=hash_,
        parent=record.parent if record is not None else None,
        token_ids=tokens,
        text=state.vocabulary.text(tokens),
        age_s=max(0.0, state.t - pool.columns.born[block]),
        hits=pool.columns.hits[block],
        eviction_place=pool.place(block) if block else None,
        last_owner=requests.of_sequence(pool.columns.last_seq[block]),
    )
