"""PoolMirror: the pool rebuilt from the seven pool events, by the law in engine.events and nothing else.

Owns ref counts, hashes, block tables and the exact order of the free queue. Each free block has an int64 key: the head
counter decreases, the tail counter increases, so the queue is the blocks sorted by key. Both ends keep (key, block)
entries. An entry is out of date once its block has left the queue from the middle, and is dropped when it is reached,
so an event costs O(blocks it names). Every transition is checked. The first impossible one raises StateError; after
that the mirror is wrong until `load`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.events import (
    NULL_BLOCK,
    BlocksAllocated,
    BlocksCopied,
    BlocksEvicted,
    BlocksReleased,
    BlocksStored,
    BlocksTouched,
    PoolSnapshot,
    from_runs,
)
from kvtop.state.part import Copied


class StateError(Exception):
    """An event that the law forbids. The message is one line and names the broken law."""


class PoolMirror(Copied):
    """Blocks 1..num_blocks-1 of `block_size` tokens. Lists are indexed by physical block id.

    `key[b]` is valid where `ref[b]` is 0; a smaller key is taken sooner. `where[h]` are the blocks with hash h, oldest
    first. `cached` and `active` count blocks; all other usable blocks are free.
    """

    __slots__ = (
        "_fifo",
        "_head",
        "_stack",
        "_tail",
        "active",
        "block_size",
        "cached",
        "hash",
        "key",
        "num_blocks",
        "ref",
        "tables",
        "where",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref = [0] * num_blocks
        self.key = list(range(num_blocks))
        self.hash: list[str | None] = [None] * num_blocks
        self.where: dict[str, tuple[int, ...]] = {}
        self.tables: dict[int, list[int]] = {}
        self.active = 0
        self.cached = 0
        self._stack: list[tuple[int, int]] = []
        self._fifo = deque((b, b) for b in range(1, num_blocks))
        self._head = 0
        self._tail = num_blocks

    # ------------------------------------------------------------------------------------ reading

    @property
    def free(self) -> int:
        """Usable blocks that are neither referenced nor hashed."""
        return self.num_blocks - 1 - self.active - self.cached

    def queue(self) -> Iterator[int]:
        """Free blocks; the first one is taken next."""
        ref, key = self.ref, self.key
        for k, b in reversed(self._stack):
            if key[b] == k and not ref[b]:
                yield b
        for k, b in self._fifo:
            if key[b] == k and not ref[b]:
                yield b

    # ---------------------------------------------------------------------------------- the events

    def allocated(self, e: BlocksAllocated) -> None:
        """Popped from the head in this order."""
        for b in e.ids:
            self._pop(b, "BlocksAllocated")
        self.tables.setdefault(e.seq_id, []).extend(e.ids)

    def touched(self, e: BlocksTouched) -> None:
        """One more table contains each of these blocks."""
        ref = self.ref
        for b in e.ids:
            self._known(b, "BlocksTouched")
            if ref[b] == 0:
                self.active += 1
                if self.hash[b] is not None:
                    self.cached -= 1
            ref[b] += 1
        self.tables.setdefault(e.seq_id, []).extend(e.ids)

    def copied(self, e: BlocksCopied) -> None:
        """Copy on write: dst replaces the shared src in one table."""
        table = self.tables.get(e.seq_id, [])
        if not 0 <= e.index < len(table) or table[e.index] != e.src:
            raise StateError(
                f"BlocksCopied: block {e.src} is not entry {e.index} of sequence {e.seq_id}'s table"
            )
        if self.ref[e.src] < 2:
            raise StateError(
                f"BlocksCopied: block {e.src} has ref {self.ref[e.src]}, only a shared one is copied"
            )
        self._pop(e.dst, "BlocksCopied")
        self.ref[e.src] -= 1
        table[e.index] = e.dst

    def released(self, e: BlocksReleased) -> list[int]:
        """Removes the last entries of the table, last first. Returns the blocks that are now in no table."""
        table, n = self.tables.get(e.seq_id, []), len(e.ids)
        if n > len(table) or (n and table[: -n - 1 : -1] != e.ids):
            raise StateError(
                f"BlocksReleased: not the last {n} entries of sequence {e.seq_id}'s table, last first"
            )
        if n:
            del table[-n:]
        ref, key, hashes = self.ref, self.key, self.hash
        gone: list[int] = []
        bare: list[int] = []
        for b in e.ids:
            if ref[b] <= 0:
                raise StateError(f"BlocksReleased: block {b} has ref 0")
            ref[b] -= 1
            if ref[b]:
                continue
            gone.append(b)
            if hashes[b] is None:
                bare.append(b)
            else:
                key[b] = self._tail
                self._fifo.append((self._tail, b))
                self._tail += 1
                self.cached += 1
        for b in reversed(bare):
            self._head -= 1
            key[b] = self._head
            self._stack.append((self._head, b))
        self.active -= len(gone)
        if not table:
            self.tables.pop(e.seq_id, None)
        if len(self._stack) + len(self._fifo) > 2 * self.num_blocks + 64:
            self._drop_stale()
        return gone

    def stored(self, e: BlocksStored) -> int:
        """Blocks get their hash. Returns how many have a content that another block already has."""
        n = len(e.ids)
        if len(e.hashes) != n:
            raise StateError(f"BlocksStored: {n} ids but {len(e.hashes)} hashes")
        table = self.tables.get(e.seq_id, [])
        if table[e.start_index : e.start_index + n] != e.ids:
            raise StateError(f"BlocksStored: not entries {e.start_index}.. of sequence {e.seq_id}'s table")
        hashes, where, duplicates = self.hash, self.where, 0
        for b, h in zip(e.ids, e.hashes, strict=True):
            if hashes[b] is not None:
                raise StateError(f"BlocksStored: block {b} already has a hash")
            hashes[b] = h
            before = where.get(h)
            if before is None:
                where[h] = (b,)
            else:
                where[h] = (*before, b)
                duplicates += 1
        return duplicates

    def evicted(self, e: BlocksEvicted) -> None:
        """These blocks lose their hash. The queue does not change."""
        if len(e.hashes) != len(e.ids):
            raise StateError(f"BlocksEvicted: {len(e.ids)} ids but {len(e.hashes)} hashes")
        for b, h in zip(e.ids, e.hashes, strict=True):
            self._known(b, "BlocksEvicted")
            if self.hash[b] != h:
                raise StateError(f"BlocksEvicted: block {b} does not carry hash {h[:8]}")
            self.hash[b] = None
            if not self.ref[b]:
                self.cached -= 1
            left = tuple(x for x in self.where[h] if x != b)
            if left:
                self.where[h] = left
            else:
                del self.where[h]

    def cleared(self) -> list[int]:
        """All blocks lose their hash. Returns the blocks that had one."""
        had = [b for blocks in self.where.values() for b in blocks]
        self.hash = [None] * self.num_blocks
        self.where.clear()
        self.cached = 0
        return had

    # ---------------------------------------------------------------------------------------- snapshots

    def load(self, s: PoolSnapshot) -> None:
        """Replace everything by a snapshot. Raises StateError, and changes nothing, if it contradicts itself."""
        fresh = PoolMirror(self.num_blocks, self.block_size)
        fresh._fifo.clear()
        for first, count, ref in zip(s.refs[::3], s.refs[1::3], s.refs[2::3], strict=True):
            for b in range(first, first + count):
                fresh._known(b, "PoolSnapshot.refs")
                fresh.ref[b] = ref
                fresh.active += 1
        for b, h in zip(s.hashed_ids, s.hashes, strict=True):
            fresh._known(b, "PoolSnapshot.hashed_ids")
            fresh.hash[b] = h
            fresh.where[h] = (*fresh.where.get(h, ()), b)
            fresh.cached += not fresh.ref[b]
        for b in from_runs(s.queue):
            fresh._known(b, "PoolSnapshot.queue")
            if fresh.ref[b]:
                raise StateError(f"PoolSnapshot: block {b} is queued with ref {fresh.ref[b]}")
            fresh.key[b] = fresh._tail
            fresh._fifo.append((fresh._tail, b))
            fresh._tail += 1
        if len(fresh._fifo) + fresh.active != self.num_blocks - 1:
            raise StateError("PoolSnapshot: the queue is not exactly the usable blocks with ref 0")
        fresh.tables = {i: list(t) for i, t in zip(s.seq_ids, s.tables, strict=True) if t}
        # Several blocks may have the same content. A snapshot does not have their order in the hash table, so the
        # order known so far is kept if the blocks are the same.
        for h, blocks in self.where.items():
            if len(blocks) > 1 and set(blocks) == set(fresh.where.get(h, ())):
                fresh.where[h] = blocks
        for name in PoolMirror.__slots__:
            setattr(self, name, getattr(fresh, name))

    def differences(self, s: PoolSnapshot) -> list[str]:
        """Where a snapshot differs from this mirror, one line for each kind of difference."""
        theirs = PoolMirror(self.num_blocks, self.block_size)
        try:
            theirs.load(s)
        except (StateError, ValueError) as error:
            return [str(error)]
        out = []

        def first(what: str, mine: list[int] | list[str | None], pool: list[int] | list[str | None]) -> None:
            b = next((i for i, (m, p) in enumerate(zip(mine, pool, strict=False)) if m != p), None)
            if b is None and len(mine) != len(pool):
                b = min(len(mine), len(pool))
            if b is not None:
                m, p = ([*x, None][min(b, len(x))] for x in (mine, pool))
                out.append(f"{what} {b}: replayed {m}, the pool says {p}")

        first("ref of block", self.ref, theirs.ref)
        first("hash of block", self.hash, theirs.hash)
        first("queue place", list(self.queue()), list(theirs.queue()))
        for i in sorted(self.tables.keys() | theirs.tables.keys()):
            if self.tables.get(i) != theirs.tables.get(i):
                first(f"table of sequence {i}, entry", self.tables.get(i, []), theirs.tables.get(i, []))
        return out

    # ------------------------------------------------------------------------------------- inside

    def _known(self, b: int, what: str) -> None:
        if not NULL_BLOCK < b < self.num_blocks:
            raise StateError(f"{what}: block {b} is not one of 1..{self.num_blocks - 1}")

    def _pop(self, b: int, what: str) -> None:
        head = self._pop_head()
        if head != b:
            raise StateError(f"{what}: took block {b}, the queue's head is {head if head else 'empty'}")
        if self.hash[b] is not None:
            raise StateError(f"{what}: took block {b}, whose hash was not evicted before")
        self.ref[b] = 1
        self.active += 1

    def _pop_head(self) -> int:
        ref, key, stack, fifo = self.ref, self.key, self._stack, self._fifo
        while stack:
            k, b = stack.pop()
            if key[b] == k and not ref[b]:
                return b
        while fifo:
            k, b = fifo.popleft()
            if key[b] == k and not ref[b]:
                return b
        return NULL_BLOCK

    def _drop_stale(self) -> None:
        ref, key = self.ref, self.key
        self._stack = [(k, b) for k, b in self._stack if key[b] == k and not ref[b]]
        self._fifo = deque((k, b) for k, b in self._fifo if key[b] == k and not ref[b])
