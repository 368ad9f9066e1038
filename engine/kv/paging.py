"""Paging: a sequence's block table over the pool.

Owns every change of a table: look-up and admission, growth (with copy-on-write of a shared block that is
about to be written), publication of full blocks, forks, truncation, release. Keeps the rule that a
block is scheduled for writing only while one table holds it and it has no hash; publishing seals it.
What it does for a step it notes in that step's Flight, so that a sequence whose forward will not run
leaves no hash of unwritten KV behind (`retract`).
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
        """Blocks of its longest cached prefix; never the whole sequence, so that at least one token is
        computed (its logits are needed). Changes nothing but the sequence's own hashes."""
        if not self.caching:
            return []
        self._extend(seq)
        return self.pool.lookup(seq.hashes, self._most_hits(seq))

    def queried(self, seq: Sequence) -> list[bytes]:
        """Hashes that a look-up asks for: full blocks but for one that ends with the last token."""
        self._extend(seq)
        return seq.hashes[: self._most_hits(seq)]

    def blocks_to_admit(self, seq: Sequence, hits: list[int], tokens: int) -> int:
        """Blocks that leave the queue if `seq` is admitted with `hits` and grows to `tokens`."""
        return self._blocks(tokens) - len(hits) + self.pool.num_unreferenced(hits)

    def admit(self, seq: Sequence, hits: list[int], flight: Flight) -> None:
        """Start the table with the hit blocks."""
        if hits:
            self._take(seq, hits, flight)
        seq.num_computed = len(hits) * self.block_size
        seq.num_published = len(hits)

    def lookup_more(self, seq: Sequence, start: int) -> list[int]:
        """Blocks that follow its full ones below position `start` and that others have published since it was
        admitted. Changes nothing but the sequence's own hashes."""
        first = start // self.block_size
        if not self.caching or not seq.table or seq.num_published > first:
            return []
        self._extend(seq)
        return self.pool.lookup(islice(seq.hashes, first, self._most_hits(seq)))

    def take_more(self, seq: Sequence, hits: list[int], flight: Flight) -> None:
        """Go on after these; a block of its own that was half computed is given back."""
        self._release(seq, len(seq.table) - seq.num_computed // self.block_size)
        self._take(seq, hits, flight)
        seq.num_published = len(seq.table)
        seq.num_computed = seq.num_published * self.block_size

    # ---------------------------------------------------------------- growth and publication

    def blocks_to_grow(self, seq: Sequence, start: int, end: int) -> int:
        """Blocks that slots for [start, end) take, including a copy of a shared block."""
        return self._blocks(end) - len(seq.table) + self._must_copy(seq, start)

    def grow(self, seq: Sequence, start: int, end: int, flight: Flight) -> bool:
        """Slots for positions [start, end), private to this sequence; start: its tokens that are computed or
        in flight. False, with nothing changed, if the pool has too few blocks."""
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

        At scheduling for tokens known at submission or resume (an equal prompt in the same step shares
        them: a batch stores all KV before any attention reads): `flight` is the step that will write them.
        At commit for sampled ones.
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
        """The forwards of `seq` that are in flight do not count: drop its rows, its pending copies and the hashes
        that it published for them. Returns the sequences that had touched such a block; they must not run either."""
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
        """Its KV proved bad: nothing that its request stored or read is findable any more. One of the blocks
        that it read may be the cause, and would end every later reader. Returns the sequences that
        touched one for a step in flight."""
        bad = [b for b, h in seq.request.stored if self.pool.hash_of(b) == h]
        for branch in seq.request.branches:
            bad += branch.table
        self.pool.unpublish(dict.fromkeys(bad), seq.seq_id, "invalid")
        return _touching(set(bad), flights)

    # ---------------------------------------------------------------- forks and the end

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the blocks that hold computed KV, including the partial last one; the first
        to write that one copies it."""
        shared = parent.table[: self._blocks(parent.num_computed)]
        self.pool.touch(child.seq_id, shared, "fork")
        child.table += shared
        child.hashes = parent.hashes[:]
        child.num_computed = child.high_computed = parent.num_computed
        child.num_known = parent.num_known
        child.num_published = min(parent.num_published, len(shared))

    def common_blocks(self, a: Sequence, b: Sequence) -> int:
        """Full blocks in which two branches of a request hold the same tokens, without the last token of `b`:
        if `b` shares them it still computes something."""
        size = self.block_size
        low, high = 0, min(len(a), len(b) - 1) // size
        while low < high:  # equal up to `low`, unequal or unknown beyond: whole prefixes compare in C
            middle = (low + high + 1) // 2
            if a.tokens[low * size : middle * size] == b.tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def rejoin(self, seq: Sequence, sibling: Sequence, shared: int, hits: list[int], flight: Flight) -> None:
        """Start the table of a branch that comes back from preemption: `shared` computed blocks of its
        sibling, then what the cache has beyond them."""
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
        """Give back the blocks beyond position `tokens`: of rejected drafts, which were never published."""
        self._release(seq, len(seq.table) - self._blocks(tokens))

    def release(self, seq: Sequence) -> None:
        """Give back the whole table, last block first, so that a chain loses its tail before its root."""
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
        # A block published ahead of its forward may have sharers already; its writer will not write it twice.
        index = start // self.block_size
        return seq.num_published <= index < len(seq.table) and self.pool.ref(seq.table[index]) > 1

    def _extend(self, seq: Sequence) -> None:
        extend_chain(seq.hashes, seq.tokens, self.block_size, self.root, seq.request.salt)


def _touching(blocks: set[int], flights: Flights) -> list[Sequence]:
    """Sequences that touched one of these for a step in flight."""
    touches = [item for flight in flights for item in flight.touched.items()]
    return list(dict.fromkeys(s for s, touched in touches if not blocks.isdisjoint(touched)))
