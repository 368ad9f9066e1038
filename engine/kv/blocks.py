"""BlockPool: which physical blocks are free, referenced or cached. It has ids only, no tensors and no tables.

Owns ref counts, the hash table and the free queue. The order of the queue is the order of eviction. Released blocks
without a hash go to its head, since taking them loses nothing. Released blocks with a hash go to its tail, so the first
of them is the least recently used. A block of ref 0 keeps its hash until its memory is taken. Every change emits one of
the seven pool events and costs O(blocks that it names). Invariants (`check`): the queue is exactly the blocks other
than 0 with ref 0; the hash table and the hashes of the blocks agree; a failed call changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from engine.events import (
    NULL_BLOCK,
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksStored,
    BlocksTouched,
    CacheCleared,
    Event,
    PoolSnapshot,
    to_runs,
)


class NoFreeBlocks(Exception):
    """The queue has fewer blocks than were asked for. Nothing was changed."""


class FreeQueue:
    """A doubly linked list of block ids in two lists of ints. Every operation costs O(ids it gets).

    Block 0, the null block, is never free, so its entry is the sentinel: next[0] is the head, prev[0] the tail. A block
    outside the queue has next = -1.
    """

    __slots__ = ("_count", "_next", "_prev")

    def __init__(self, num_blocks: int) -> None:
        """Queue of 1..num_blocks-1 in this order."""
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._count = num_blocks - 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Head (evicted first) to tail."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def __contains__(self, block: int) -> bool:
        return block != NULL_BLOCK and self._next[block] >= 0

    def pop(self, count: int) -> list[int]:
        """Remove the first `count` blocks. Raises NoFreeBlocks, and changes nothing, if there are fewer."""
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > self._count:
            raise NoFreeBlocks(f"no free blocks available: {count} asked for, {self._count} free")
        follow, out = self._next, []
        block = follow[0]
        for _ in range(count):
            out.append(block)
            after = follow[block]
            follow[block] = -1
            block = after
        follow[0] = block
        self._prev[block] = 0
        self._count -= count
        return out

    def remove(self, *blocks: int) -> None:
        """Remove blocks from any position. Raises ValueError, and changes nothing, if one is not in the queue."""
        follow, precede = self._next, self._prev
        if min(map(follow.__getitem__, blocks), default=0) < 0 or NULL_BLOCK in blocks:
            raise ValueError(f"not in the free queue: {[b for b in blocks if b not in self]}")
        for block in blocks:
            before, after = precede[block], follow[block]
            follow[before] = after
            precede[after] = before
            follow[block] = -1
        self._count -= len(blocks)

    def push_head(self, blocks: Sequence[int]) -> None:
        """blocks[0] becomes the head."""
        self._link(0, blocks, self._next[0])

    def push_tail(self, blocks: Sequence[int]) -> None:
        """blocks[-1] becomes the tail."""
        self._link(self._prev[0], blocks, 0)

    def _link(self, before: int, blocks: Sequence[int], after: int) -> None:
        follow, precede = self._next, self._prev
        for block in blocks:
            follow[before] = block
            precede[block] = before
            before = block
        follow[before] = after
        precede[after] = before
        self._count += len(blocks)


class BlockPool:
    """Blocks 1..num_blocks-1 of `block_size` tokens; block 0 is the null block."""

    __slots__ = (
        "_copies",
        "_emit",
        "_hash",
        "_num_cached",
        "_queue",
        "_ref",
        "_table",
        "block_size",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, emit: Callable[[Event], None]) -> None:
        """emit: gets the event of each mutation, in order."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (block 0 is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._emit = emit
        self._queue = FreeQueue(num_blocks)
        self._ref = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._table: dict[bytes, int] = {}
        # More blocks of the same content, in the order in which they were stored. Most hashes have none.
        self._copies: dict[bytes, dict[int, None]] = {}
        self._num_cached = 0

    # ---------------------------------------------------------------- counts and look-ups

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Length of the queue: blocks that can be taken, cached ones included."""
        return len(self._queue)

    @property
    def num_cached(self) -> int:
        """Hashed blocks that are in no table."""
        return self._num_cached

    @property
    def num_active(self) -> int:
        """Blocks that at least one table references."""
        return self.num_usable - len(self._queue)

    @property
    def num_hashes(self) -> int:
        """Distinct hashes in the table."""
        return len(self._table)

    def ref(self, block: int) -> int:
        """Table entries that reference this block."""
        return self._ref[block]

    def hash_of(self, block: int) -> bytes | None:
        """Hash under which a look-up finds this block, 16 bytes."""
        return self._hash[block]

    def lookup(self, hashes: Iterable[bytes], limit: int | None = None) -> list[int]:
        """Blocks of the longest known prefix of hashes[:limit]. Changes nothing."""
        out = []
        get = self._table.get
        for h in islice(hashes, limit):
            block = get(h)
            if block is None:
                break
            out.append(block)
        return out

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are in the queue."""
        return sum(self._ref[b] == 0 for b in blocks)

    # ---------------------------------------------------------------- the mutations

    def allocate(self, seq_id: int, count: int) -> list[int]:
        """Take `count` blocks for new content and evict their old content. Raises NoFreeBlocks, and changes nothing."""
        if not count:
            return []
        ids = self._take(seq_id, count)
        self._emit(BlocksAllocated(seq_id, ids[:]))
        return ids

    def touch(self, seq_id: int, ids: Sequence[int], why: Literal["hit", "fork"]) -> None:
        """One more table references each of these. Raises ValueError, and changes nothing, for the null block."""
        if not ids:
            return
        ref, hashes = self._ref, self._hash
        free = [b for b in ids if not ref[b]]
        self._queue.remove(*free)
        self._num_cached -= sum(hashes[b] is not None for b in free)
        for b in ids:
            ref[b] += 1
        self._emit(BlocksTouched(seq_id, list(ids), why))

    def copy(self, seq_id: int, index: int, src: int) -> int:
        """A new block for a sequence that writes to the shared `src` at table[index]. Returns its id.

        Raises NoFreeBlocks, or ValueError if src is not shared, because its KV would be lost. Both change nothing.
        """
        if self._ref[src] < 2:
            raise ValueError(f"block {src} has ref {self._ref[src]}: only a shared block is copied")
        dst = self._take(seq_id, 1)[0]
        self._ref[src] -= 1
        self._emit(BlocksCopied(seq_id, index, src, dst))
        return dst

    def release(self, seq_id: int, ids: Sequence[int]) -> None:
        """One table gives up these blocks, its last entry first.

        Raises ValueError, and changes nothing, if a block is unreferenced or given twice.
        """
        if not ids:
            return
        ref, hashes = self._ref, self._hash
        if min([ref[b] for b in ids]) < 1 or (len(ids) > 1 and len(set(ids)) < len(ids)):
            raise ValueError(f"release of an unreferenced or repeated block among {list(ids)}")
        head: list[int] = []
        tail: list[int] = []
        for b in ids:
            ref[b] -= 1
            if not ref[b]:
                (head if hashes[b] is None else tail).append(b)
        if head:
            self._queue.push_head(head)
        if tail:
            self._queue.push_tail(tail)
            self._num_cached += len(tail)
        self._emit(BlocksReleased(seq_id, list(ids)))

    def store(
        self,
        seq_id: int,
        start_index: int,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        parent: bytes,
        token_ids: list[int],
        salt: bytes | None = None,
    ) -> None:
        """From now on look-ups find these full blocks.

        If a content is already known, its new block is kept as a duplicate, because the table of a running sequence
        must not change. Raises ValueError, and changes nothing, if a block has a hash or is in no table.
        """
        if not ids:
            return
        if any(self._hash[b] is not None or not self._ref[b] for b in ids):
            raise ValueError(f"only a referenced block without a hash is stored: {list(ids)}")
        if len(ids) != len(hashes):
            raise ValueError(f"{len(ids)} blocks but {len(hashes)} hashes")
        for b, h in zip(ids, hashes, strict=True):
            self._hash[b] = h
            if h in self._table:
                self._copies.setdefault(h, {})[b] = None
            else:
                self._table[h] = b
        self._emit(
            BlocksStored(
                seq_id,
                start_index,
                list(ids),
                [h.hex() for h in hashes],
                parent.hex(),
                token_ids,
                None if salt is None else salt.hex(),
            )
        )

    def unpublish(self, ids: Iterable[int], by_seq: int | None, why: Literal["unwritten", "invalid"]) -> None:
        """Drop the hashes of these blocks. The queue does not change."""
        self._evict([b for b in ids if self._hash[b] is not None], by_seq, why)

    def clear(self) -> None:
        """Drop all hashes. The queue does not change."""
        self._hash = [None] * self.num_blocks
        self._table.clear()
        self._copies.clear()
        self._num_cached = 0
        self._emit(CacheCleared())

    def _take(self, seq_id: int, count: int) -> list[int]:
        ids = self._queue.pop(count)
        ref, hashes = self._ref, self._hash
        if self._num_cached:
            self._evict([b for b in ids if hashes[b] is not None], seq_id, "reallocated")
        for b in ids:
            ref[b] = 1
        return ids

    def _evict(
        self, ids: list[int], by_seq: int | None, why: Literal["reallocated", "unwritten", "invalid"]
    ) -> None:
        if not ids:
            return
        dropped = []
        for b in ids:
            h = self._hash[b]
            assert h is not None
            self._hash[b] = None
            self._num_cached -= self._ref[b] == 0
            dropped.append(h.hex())
            copies = self._copies.get(h)
            if self._table[h] == b:
                if copies:
                    self._table[h], _ = copies.popitem()  # the youngest, which is usually evicted last
                else:
                    del self._table[h]
            elif copies:
                del copies[b]
            if copies is not None and not copies:
                del self._copies[h]
        self._emit(BlocksEvicted(ids, dropped, by_seq, why))

    # ---------------------------------------------------------------- snapshot and check

    def snapshot(self, tables: dict[int, tuple[Sequence[int], int]]) -> PoolSnapshot:
        """The state as an event. tables: sequence id -> (block table, num_computed). Emits nothing."""
        refs: list[int] = []
        for b, r in enumerate(self._ref):
            if not r:
                continue
            if refs and refs[-3] + refs[-2] == b and refs[-1] == r:
                refs[-2] += 1
            else:
                refs += (b, 1, r)
        hashed = [(b, h.hex()) for b, h in enumerate(self._hash) if h is not None]
        return PoolSnapshot(
            refs=refs,
            queue=to_runs(self._queue),
            hashed_ids=[b for b, _ in hashed],
            hashes=[h for _, h in hashed],
            seq_ids=list(tables),
            tables=[list(t) for t, _ in tables.values()],
            computed=[c for _, c in tables.values()],
        )

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert all invariants against all live block tables. O(blocks), for tests."""
        held = Counter(b for t in tables for b in t)
        queue = list(self._queue)
        refs = {b: r for b, r in enumerate(self._ref) if r}
        assert held == refs, f"ref counts {refs} against table entries {dict(held)}"
        assert NULL_BLOCK not in held, "the null block is in a table"
        assert len(queue) == len(self._queue) == len(set(queue)), "the queue's count is wrong"
        free = {b for b in range(1, self.num_blocks) if not self._ref[b]}
        assert set(queue) == free, f"queue {sorted(queue)} against ref 0 {sorted(free)}"
        assert self._hash[NULL_BLOCK] is None, "the null block is hashed"
        where: dict[bytes, set[int]] = {}
        for b, h in enumerate(self._hash):
            if h is not None:
                where.setdefault(h, set()).add(b)
        table = {h: {b, *self._copies.get(h, ())} for h, b in self._table.items()}
        assert where == table, "hash table and the blocks' own hashes differ"
        assert self._copies.keys() <= self._table.keys(), "a copy without a first block"
        cached = sum(self._hash[b] is not None for b in queue)
        assert cached == self._num_cached, f"{self._num_cached} cached counted, {cached} found"
