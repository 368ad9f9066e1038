"""Paging: a sequence's block table over the pool.

Owns every change of a table: look-up and admission, growth (with copy-on-write before a shared block is written),
publication of full blocks, forks, truncation and release. Invariants: a block is scheduled for writing only while it is
in one table and has no hash, so a published block is never written again. What is done for a step is noted in its
Flight, so that no hash of unwritten KV remains if the forward of a sequence does not run (`retract`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from engine.kv.blocks import BlockPool
from engine.kv.hashing import extend_chain, root_hash

if TYPE_CHECKING:
    from engine.step.flight import Flight, Flights
    from engine.step.sequence import Sequence


class Paging:
    """Tables of all sequences over one pool. Not thread-safe: one scheduler."""

    def __init__(self, pool: BlockPool, hash_seed: int, caching: bool = True) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.root = root_hash(hash_seed)
        self.caching = caching

    # ---------------------------------------------------------------- admission

    def lookup(self, seq: Sequence) -> list[int]:
        """Blocks of its longest cached prefix. Changes only the hashes of the sequence.

        Never the whole sequence: at least one token must be computed, because its logits are needed.
        """
        if not self.caching:
            return []
        self._extend(seq)
        return self.pool.lookup(seq.hashes, self._most_hits(seq))

    def queried(self, seq: Sequence) -> list[bytes]:
        """Hashes that a look-up asks for: those of all full blocks, except one that ends with the last token."""
        self._extend(seq)
        return seq.hashes[: self._most_hits(seq)]

    def blocks_to_admit(self, seq: Sequence, hits: list[int], tokens: int) -> int:
        """Blocks that leave the queue if `seq` is admitted with `hits` and grows to `tokens`."""
        return self._blocks(tokens) - len(hits) + self.pool.num_unreferenced(hits)

    def admit(self, seq: Sequence, hits: list[int], flight: Flight) -> None:
        """Begin the table with the hit blocks."""
        if hits:
            self._take(seq, hits, flight)
        seq.num_computed = len(hits) * self.block_size
        seq.num_published = len(hits)

    def lookup_more(self, seq: Sequence, start: int) -> list[int]:
        """Cached blocks that follow its full blocks below position `start`, published by others since it was admitted.
        Changes only the hashes of the sequence."""
        first = start // self.block_size
        if not self.caching or not seq.table or seq.num_published > first:
            return []
        self._extend(seq)
        return self.pool.lookup(islice(seq.hashes, first, self._most_hits(seq)))

    def take_more(self, seq: Sequence, hits: list[int], flight: Flight) -> None:
        """Add these hits to the table. Its own half computed block is released before."""
        self._release(seq, len(seq.table) - seq.num_computed // self.block_size)
        self._take(seq, hits, flight)
        seq.num_published = len(seq.table)
        seq.num_computed = seq.num_published * self.block_size

    # ---------------------------------------------------------------- growth and publication

    def blocks_to_grow(self, seq: Sequence, start: int, end: int) -> int:
        """Blocks that slots for [start, end) take, including a copy of a shared block."""
        return self._blocks(end) - len(seq.table) + self._must_copy(seq, start)

    def grow(self, seq: Sequence, start: int, end: int, flight: Flight) -> bool:
        """Get private slots for positions [start, end). start: its tokens that are computed or in flight.

        Returns False, and changes nothing, if the pool has too few blocks.
        """
        copy = self._must_copy(seq, start)
        fresh = self._blocks(end) - len(seq.table)
        if fresh + copy > self.pool.num_available:
            return False
        if copy:
            index = start // self.block_size
            src = seq.table[index]
            dst = self.pool.copy(seq.seq_id, index, src)
            seq.table[index] = dst
            seq.table_sent = min(seq.table_sent, index)
            flight.copies.append((seq, src, dst))
        if fresh > 0:
            seq.table += self.pool.allocate(seq.seq_id, fresh)
        return True

    def publish(self, seq: Sequence, tokens: int, flight: Flight | None = None) -> None:
        """Store the hashes of the full blocks below position `tokens` that it has not stored yet.

        Blocks of a prompt are published when they are scheduled, and `flight` is the step that will write them. An
        equal prompt in the same step can share them, because a batch stores all KV before attention reads. Blocks with
        sampled tokens are published at commit.
        """
        start, end = seq.num_published, tokens // self.block_size
        if not self.caching or end <= start:
            return
        self._extend(seq)
        ids, hashes = seq.table[start:end], seq.hashes[start:end]
        request = seq.request
        self.pool.store(
            seq.seq_id,
            start,
            ids,
            hashes,
            seq.hashes[start - 1] if start else self.root,
            seq.tokens[start * self.block_size : end * self.block_size].tolist(),
            request.salt if start == 0 else None,
        )
        seq.num_published = end
        request.stored.extend(zip(ids, hashes, strict=True))
        if flight is not None and end * self.block_size > seq.num_computed:
            flight.note_published(seq, ids)
        if end > request.high_published:
            first = max(start, request.high_published) * self.block_size
            request.cache_write_tokens += max(0, min(end * self.block_size, request.prompt_tokens) - first)
            request.high_published = end

    def retract(self, seq: Sequence, flights: Flights) -> list[Sequence]:
        """The forwards of `seq` in flight do not count: drop its rows, its pending copies and the hashes published for
        them. Returns the sequences that have touched such a block. They must not run either."""
        flights.drop(seq)
        bad: set[int] = set()
        request = seq.request
        for flight in flights:
            flight.touched.pop(seq, None)
            publication = flight.published.pop(seq, None)
            if publication is not None:
                request.high_published = min(request.high_published, publication.high_before)
                request.cache_write_tokens = min(request.cache_write_tokens, publication.tokens_before)
                self.pool.unpublish(publication.ids, seq.seq_id, "unwritten")
                bad.update(publication.ids)
        return _touching(bad, flights)

    def invalidate(self, seq: Sequence, flights: Flights) -> list[Sequence]:
        """Its KV is bad: drop the hashes of everything that its request stored or read.

        A block that it read may be the cause and would end every later reader. Returns the sequences that have touched
        such a block for a step in flight.
        """
        bad = [b for b, h in seq.request.stored if self.pool.hash_of(b) == h]
        for branch in seq.request.branches:
            bad += branch.table
        self.pool.unpublish(dict.fromkeys(bad), seq.seq_id, "invalid")
        return _touching(set(bad), flights)

    # ---------------------------------------------------------------- forks and the end

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks with computed KV. The last one may be partial: the first writer copies it."""
        shared = parent.table[: self._blocks(parent.num_computed)]
        self.pool.touch(child.seq_id, shared, "fork")
        child.table += shared
        child.hashes = parent.hashes[:]
        child.num_computed = child.high_computed = parent.num_computed
        child.num_known = parent.num_known
        child.num_published = min(parent.num_published, len(shared))

    def common_blocks(self, a: Sequence, b: Sequence) -> int:
        """Number of full blocks at the start in which two branches have the same tokens. It leaves out the last token
        of `b`, so that `b` still computes something if it shares them."""
        size = self.block_size
        low, high = 0, min(len(a), len(b) - 1) // size
        while low < high:  # bisection: the branches are equal up to `low`; arrays compare fast
            middle = (low + high + 1) // 2
            if a.tokens[low * size : middle * size] == b.tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def rejoin(self, seq: Sequence, sibling: Sequence, shared: int, hits: list[int], flight: Flight) -> None:
        """Begin the table of a branch that resumes after a preemption: `shared` computed blocks of another branch, then
        the hits after them."""
        if shared:
            ids = sibling.table[:shared]
            self.pool.touch(seq.seq_id, ids, "fork")
            seq.table += ids
            seq.num_computed = shared * self.block_size
            seq.num_published = min(sibling.num_published, shared)
        if len(hits) > shared:
            self._take(seq, hits[shared:], flight)
            seq.num_computed = len(hits) * self.block_size
            seq.num_published = len(hits)

    def truncate(self, seq: Sequence, tokens: int) -> None:
        """Release the blocks after position `tokens`. They had rejected drafts and were never published."""
        self._release(seq, len(seq.table) - self._blocks(tokens))

    def release(self, seq: Sequence) -> None:
        """Release the whole table, last block first, so that the end of a prefix is evicted before its start."""
        self._release(seq, len(seq.table))
        seq.table_sent = -1
        seq.num_computed = 0
        seq.num_published = 0

    def _release(self, seq: Sequence, count: int) -> None:
        if count <= 0:
            return
        keep = len(seq.table) - count
        self.pool.release(seq.seq_id, seq.table[: keep - 1 if keep else None : -1])
        del seq.table[keep:]
        seq.table_sent = min(seq.table_sent, keep)

    # ---------------------------------------------------------------- small facts

    def _take(self, seq: Sequence, ids: list[int], flight: Flight) -> None:
        self.pool.touch(seq.seq_id, ids, "hit")
        seq.table += ids
        flight.note_touched(seq, ids)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _most_hits(self, seq: Sequence) -> int:
        return (len(seq.tokens) - 1) // self.block_size

    def _must_copy(self, seq: Sequence, start: int) -> bool:
        # A block that was published before its forward may be shared already. It needs no copy: its writer writes it
        # once.
        index = start // self.block_size
        return seq.num_published <= index < len(seq.table) and self.pool.ref(seq.table[index]) > 1

    def _extend(self, seq: Sequence) -> None:
        extend_chain(seq.hashes, seq.tokens, self.block_size, self.root, seq.request.salt)


def _touching(blocks: set[int], flights: Flights) -> list[Sequence]:
    """Sequences that touched one of these for a step in flight."""
    touches = [item for flight in flights for item in flight.touched.items()]
    return list(dict.fromkeys(s for s, touched in touches if not blocks.isdisjoint(touched)))
