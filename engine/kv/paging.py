"""Paging: a sequence's block table over the pool.

Owns every change of a table: look-up and admission, growth (with copy-on-write of a shared block that is
about to be written), publication of full blocks, forks, truncation, release. Keeps the rule that a
block is scheduled for writing only while one table holds it and it has no hash; publishing seals it.
Also keeps the books of each step in flight: what it published and who touched what, so that a sequence
whose forward will not run leaves no hash of unwritten KV behind (`retract`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from engine.kv.blocks import BlockPool
from engine.kv.hashing import extend_chain, root_hash
from engine.step.sequence import Sequence


class _Publication(NamedTuple):
    """What a sequence published ahead of its forward, and its request's books before that."""

    ids: list[int]
    high_before: int
    tokens_before: int


@dataclass(slots=True)
class _StepBooks:
    """Of one step until it is committed. copies: (seq_id, src, dst) in emission order."""

    copies: list[tuple[int, int, int]] = field(default_factory=list)
    unwritten: dict[Sequence, _Publication] = field(default_factory=dict)
    touched: dict[Sequence, list[int]] = field(default_factory=dict)


class Paging:
    """Tables of all sequences over one pool. Not thread-safe: one scheduler."""

    def __init__(self, pool: BlockPool, hash_seed: int, caching: bool = True) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.root = root_hash(hash_seed)
        self.caching = caching
        self._now = _StepBooks()
        """Of the step that is being planned, or was planned last."""
        self._flight: deque[_StepBooks] = deque((self._now,))
        """Of all steps that are not committed, oldest first; `_now` is the last of them, or of none."""

    # ---------------------------------------------------------------- the steps in flight

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """Copies of the newest step in emission order: (seq_id, src, dst)."""
        return self._now.copies

    def begin_step(self, in_flight: int = 0) -> None:
        """New books for a step, beside those of so many that are planned and not committed; what is older
        is written, its copies ran."""
        while len(self._flight) > in_flight:
            self._flight.popleft()
        self._now = _StepBooks()
        self._flight.append(self._now)

    def cancel_step(self) -> None:
        """The step that was being planned came to nothing. What was touched for it stays touched, and may be
        what a step in flight has yet to write."""
        dropped = self._flight.pop()
        self._now = self._flight[-1] if self._flight else _StepBooks()
        for seq, ids in dropped.touched.items():
            self._now.touched.setdefault(seq, []).extend(ids)

    def step_written(self) -> None:
        """The oldest step in flight is over: forget it."""
        if self._flight.popleft() is self._now:
            self._now = _StepBooks()

    def retract(self, seq: Sequence) -> list[Sequence]:
        """The forwards of `seq` that are in flight do not count: drop its pending copies and the hashes that
        it published for them. Returns the sequences that had touched such a block; they must not run either."""
        bad: set[int] = set()
        request = seq.request
        for books in self._flight:
            if books.copies:
                books.copies[:] = [c for c in books.copies if c[0] != seq.seq_id]
            books.touched.pop(seq, None)
            publication = books.unwritten.pop(seq, None)
            if publication is not None:
                request.high_published = min(request.high_published, publication.high_before)
                request.cache_write_tokens = min(request.cache_write_tokens, publication.tokens_before)
                self.pool.unpublish(publication.ids, seq.seq_id, "unwritten")
                bad.update(publication.ids)
        return self._touching(bad)

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

    def admit(self, seq: Sequence, hits: list[int]) -> None:
        """Start the table with the hit blocks."""
        if hits:
            self.pool.touch(seq.seq_id, hits, "hit")
            seq.table += hits
            self._now.touched.setdefault(seq, []).extend(hits)
        seq.num_computed = len(hits) * self.block_size
        seq.num_published = len(hits)

    def lookup_more(self, seq: Sequence) -> list[int]:
        """Blocks that follow its computed full ones and that others have published since it was admitted.
        Changes nothing but the sequence's own hashes."""
        first = seq.num_scheduled // self.block_size
        if not self.caching or not seq.table or seq.num_published > first:
            return []
        self._extend(seq)
        return self.pool.lookup(islice(seq.hashes, first, self._most_hits(seq)))

    def take_more(self, seq: Sequence, hits: list[int]) -> None:
        """Go on behind these; a block of its own that was half computed is given back."""
        self._release(seq, len(seq.table) - seq.num_computed // self.block_size)
        self.pool.touch(seq.seq_id, hits, "hit")
        seq.table += hits
        self._now.touched.setdefault(seq, []).extend(hits)
        seq.num_published = len(seq.table)
        seq.num_computed = seq.num_published * self.block_size

    # ---------------------------------------------------------------- growth and publication

    def blocks_to_grow(self, seq: Sequence, tokens: int) -> int:
        """Blocks that growing to `tokens` takes, a copy of a shared block included."""
        return self._blocks(tokens) - len(seq.table) + self._must_copy(seq)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Slots for positions [num_scheduled, tokens), private to this sequence. False, with nothing
        changed, if the pool has too few blocks."""
        copy = self._must_copy(seq)
        fresh = self._blocks(tokens) - len(seq.table)
        if fresh + copy > self.pool.num_available:
            return False
        if copy:
            index = seq.num_scheduled // self.block_size
            src = seq.table[index]
            dst = self.pool.copy(seq.seq_id, index, src)
            seq.table[index] = dst
            seq.table_changed_from = min(seq.table_changed_from, index)
            self._now.copies.append((seq.seq_id, src, dst))
        if fresh > 0:
            seq.table += self.pool.allocate(seq.seq_id, fresh)
        return True

    def publish(self, seq: Sequence, tokens: int) -> None:
        """Store the hashes of the full blocks below position `tokens` that it has not stored yet.

        At scheduling for tokens known at submission or resume (an equal prompt in the same step shares
        them: a batch stores all KV before any attention reads); at commit for sampled ones.
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
        if end * self.block_size > seq.num_computed:  # ahead of the forward that will write them
            self._now.unwritten[seq] = _Publication(ids, request.high_published, request.cache_write_tokens)
        if end > request.high_published:
            first = max(start, request.high_published) * self.block_size
            request.cache_write_tokens += max(0, min(end * self.block_size, request.prompt_tokens) - first)
            request.high_published = end

    def invalidate(self, seq: Sequence) -> list[Sequence]:
        """Its KV proved bad: nothing that its request stored or read is findable any more. One of the blocks
        that it read may be the cause, and would end whoever reads it next. Returns the sequences that
        touched one for a step in flight."""
        bad = [b for b, h in seq.request.stored if self.pool.hash_of(b) == h]
        for branch in seq.request.branches:
            bad += branch.table
        self.pool.unpublish(dict.fromkeys(bad), seq.seq_id, "invalid")
        return self._touching(set(bad))

    # ---------------------------------------------------------------- forks and the end

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the blocks that hold computed KV, the partial last one included; whoever
        writes that first copies it."""
        shared = parent.table[: self._blocks(parent.num_computed)]
        self.pool.touch(child.seq_id, shared, "fork")
        child.table += shared
        child.hashes = parent.hashes[:]
        child.num_computed = child.high_computed = parent.num_computed
        child.num_known = parent.num_known
        child.num_published = min(parent.num_published, len(shared))

    def common_blocks(self, a: Sequence, b: Sequence) -> int:
        """Full blocks in which two branches of a request hold the same tokens, one token of `b` left out:
        whoever shares them still computes something."""
        size = self.block_size
        low, high = 0, min(len(a), len(b) - 1) // size
        while low < high:  # equal up to `low`, unequal or unknown beyond: whole prefixes compare in C
            middle = (low + high + 1) // 2
            if a.tokens[low * size : middle * size] == b.tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def rejoin(self, seq: Sequence, sibling: Sequence, shared: int, hits: list[int]) -> None:
        """Start the table of a branch that comes back from preemption: `shared` computed blocks of its
        sibling, then what the cache has beyond them."""
        if shared:
            ids = sibling.table[:shared]
            self.pool.touch(seq.seq_id, ids, "fork")
            seq.table += ids
            seq.num_computed = shared * self.block_size
            seq.num_published = min(sibling.num_published, shared)
        if len(hits) > shared:
            ids = hits[shared:]
            self.pool.touch(seq.seq_id, ids, "hit")
            seq.table += ids
            self._now.touched.setdefault(seq, []).extend(ids)
            seq.num_computed = len(hits) * self.block_size
            seq.num_published = len(hits)

    def truncate(self, seq: Sequence, tokens: int) -> None:
        """Give back the blocks beyond position `tokens`: of rejected drafts, which nobody published."""
        self._release(seq, len(seq.table) - self._blocks(tokens))

    def release(self, seq: Sequence) -> None:
        """Give back the whole table, last block first, so that a chain loses its tail before its root."""
        self._release(seq, len(seq.table))
        seq.num_computed = 0
        seq.num_published = 0

    def _release(self, seq: Sequence, count: int) -> None:
        if count <= 0:
            return
        keep = len(seq.table) - count
        self.pool.release(seq.seq_id, seq.table[: keep - 1 if keep else None : -1])
        del seq.table[keep:]
        seq.table_changed_from = min(seq.table_changed_from, keep)

    # ---------------------------------------------------------------- small facts

    def _touching(self, blocks: set[int]) -> list[Sequence]:
        """Sequences that touched one of these for a step in flight."""
        touches = [item for books in self._flight for item in books.touched.items()]
        return list(dict.fromkeys(s for s, touched in touches if not blocks.isdisjoint(touched)))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _most_hits(self, seq: Sequence) -> int:
        return (len(seq.tokens) - 1) // self.block_size

    def _must_copy(self, seq: Sequence) -> bool:
        # A block published ahead of its forward may have sharers already; its writer will not write it twice.
        index = seq.num_scheduled // self.block_size
        return seq.num_published <= index < len(seq.table) and self.pool.ref(seq.table[index]) > 1

    def _extend(self, seq: Sequence) -> None:
        extend_chain(seq.hashes, seq.tokens, self.block_size, self.root, seq.request.salt)
