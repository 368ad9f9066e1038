"""Any order of moves over pool and paging keeps the books, the event law and a findable truth.

A naive model knows which tokens every block holds. A hash may only ever be found for a block whose KV was
written with exactly the tokens of that prefix.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.events import StepBatch
from engine.step.sequence import Sequence
from tests.engine.mirror import Mirror
from tests.engine.rig import Books, prompt

BLOCK = 4


class PagingMachine(RuleBasedStateMachine):
    """Sequences are admitted, grow, decode, fork, are preempted, aborted, fail; the cache is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(num_blocks=14, block_size=BLOCK)
        self.pool, self.paging = self.books.pool, self.books.paging
        self.mirror = Mirror(14, BLOCK)
        self.kv: dict[int, list[int | None]] = {b: [None] * BLOCK for b in range(14)}
        self.pending: dict[Sequence, int] = {}
        """Sequences of the step in the making, with the position up to which they'll be computed."""

    def pick(self, which: int) -> Sequence:
        return self.books.live[which % len(self.books.live)]

    # ------------------------------------------------------------------------ a step in the making

    @precondition(lambda self: len(self.books.live) < 6)
    @rule(family=st.integers(0, 1), length=st.integers(1, 20), salted=st.sampled_from([False, False, True]))
    def arrive(self, family: int, length: int, salted: bool) -> None:
        self.books.sequence(prompt(length, family), "salt" if salted else None)

    @precondition(lambda self: self.books.live)
    @rule(first=st.integers(0, 5), chunk=st.integers(1, 20))
    def schedule_all(self, first: int, chunk: int) -> None:
        """Everyone who is not in the step yet, from `first` on."""
        live = self.books.live
        for seq in [*live[first:], *live[:first]]:
            if seq not in self.pending:
                self._schedule(seq, chunk)

    def _schedule(self, seq: Sequence, chunk: int) -> None:
        """A chunk, or the token sampled last; publication runs ahead of the forward."""
        if not seq.table:
            hits = self.paging.lookup(seq)
            free = self.pool.num_available
            need = self.paging.blocks_to_admit(seq, hits, len(seq))
            if need > free:
                return
            self.paging.admit(seq, hits, self.books.flight)
            assert need - free + self.pool.num_available == self.paging.blocks_to_grow(
                seq, seq.num_computed, len(seq)
            )
        end = min(len(seq), seq.num_computed + chunk)
        if end == seq.num_computed:
            return
        before = self.pool.eviction_order(), len(self.pool.events), list(seq.table)
        if not self.books.grow(seq, end):
            assert (self.pool.eviction_order(), len(self.pool.events), seq.table) == before
            return
        first, last = seq.num_computed // BLOCK, (end - 1) // BLOCK
        written = seq.table[first : last + 1]  # by one sequence alone, and not findable yet
        assert all(self.pool.ref(b) == 1 and self.pool.hash_of(b) is None for b in written)
        self.books.publish(seq, min(end, seq.num_known))
        self.pending[seq] = end

    @precondition(lambda self: self.pending)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6))
    def execute(self, tokens: list[int]) -> None:
        """Copies, writes and commit, as in a runner and the core. A sequence that is computed samples."""
        for _, src, dst in self.books.flight.copies:
            self.kv[dst] = list(self.kv[src])
        for seq, end in self.pending.items():
            for at in range(seq.num_computed, end):
                self.kv[seq.table[at // BLOCK]][at % BLOCK] = seq.tokens[at]
        self.books.begin_step()
        for (seq, end), token in zip(self.pending.items(), tokens, strict=False):
            seq.num_computed = end
            self.paging.publish(seq, end)
            if end == len(seq) < 40:
                seq.tokens.append(token)
        self.pending.clear()

    @precondition(lambda self: self.pending)
    @rule()
    def fail(self) -> None:
        """The forward did not run: everyone in it lets go."""
        for seq in list(self.pending):
            self._give_up(seq)
        self.books.begin_step()

    def _give_up(self, seq: Sequence) -> None:
        """Also preempts the sequences that share a block that will not be written."""
        self.pending.pop(seq, None)
        sharers = self.books.retract(seq)
        self.paging.release(seq)
        seq.num_known = len(seq)
        for sharer in sharers:
            self._give_up(sharer)

    # ---------------------------------------------------------------------------- at any moment

    @precondition(lambda self: self.books.live)
    @rule(which=st.integers(0, 5))
    def preempt(self, which: int) -> None:
        self._give_up(self.pick(which))

    @precondition(lambda self: self.books.live)
    @rule(which=st.integers(0, 5), bad=st.booleans())
    def end(self, which: int, bad: bool) -> None:
        """Finished, aborted, or its KV proved bad."""
        seq = self.pick(which)
        if bad and seq not in self.pending:
            self.paging.invalidate(seq, self.books.flights)
        self._give_up(seq)
        self.books.live.remove(seq)

    @precondition(lambda self: not self.pending and 0 < len(self.books.live) < 6)
    @rule(which=st.integers(0, 5))
    def fork(self, which: int) -> None:
        seq = self.pick(which)
        if seq.table:
            child = self.books.sequence(seq.request.prompt_token_ids)
            child.request.salt = seq.request.salt
            child.tokens = seq.tokens[:]
            self.paging.fork(seq, child)

    @precondition(lambda self: self.books.live)
    @rule(which=st.integers(0, 5), blocks=st.integers(1, 3))
    def draft_and_reject(self, which: int, blocks: int) -> None:
        """Slots beyond the tokens, given back before anything was written."""
        seq = self.pick(which)
        if seq.table and seq not in self.pending and not self._needs_blocks(seq):
            tokens = len(seq.table) * BLOCK
            if self.books.grow(seq, tokens + blocks * BLOCK):
                self.paging.truncate(seq, tokens)

    def _needs_blocks(self, seq: Sequence) -> int:
        return self.paging.blocks_to_grow(seq, seq.num_computed, seq.num_computed)

    @precondition(lambda self: self.pool.num_hashes and not self.pool.num_active)
    @rule()
    def reset(self) -> None:
        self.pool.clear()

    # ------------------------------------------------------------------------------------- the laws

    @invariant()
    def books_are_right(self) -> None:
        self.books.check()

    @invariant()
    def the_events_tell_the_pool(self) -> None:
        events, mirror = self.pool.events, self.mirror
        mirror.apply(StepBatch(mirror.batches, 0.0, 0, mirror.events, events[:]))
        events.clear()
        tables = {s.seq_id: (s.table, s.num_computed) for s in self.books.live if s.table}
        mirror.computed = {
            s: n for s, (_, n) in tables.items()
        }  # reported by the core's events, not the pool's
        mirror.compare(self.pool.snapshot(tables))

    @invariant()
    def computed_tokens_are_in_the_blocks(self) -> None:
        """For those whose step ran; a hit on a block of this very step will be written with it."""
        if self.pending:
            return
        for seq in self.books.live:
            for at in range(seq.num_computed):
                assert self.kv[seq.table[at // BLOCK]][at % BLOCK] == seq.tokens[at]

    @invariant()
    def what_is_found_was_written(self) -> None:
        if self.pending:
            return
        for seq in self.books.live:
            for i, block in enumerate(self.paging.lookup(seq)):
                assert self.kv[block] == seq.tokens[i * BLOCK : (i + 1) * BLOCK].tolist()


TestPagingMachine = PagingMachine.TestCase
TestPagingMachine.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
