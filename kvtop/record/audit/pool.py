"""Law of the pool: which blocks may be hit, shared, released and stored, and with which hash.

Owns the mirror and what each branch has computed and published. PoolMirror checks the transitions themselves.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Branch, Life, need
from kvtop.record.audit.law import Law, takes


class PoolLaw(Law):
    """Writes the mirror, and what a branch has computed and published."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._withdrawn: set[int] = set()
        """Blocks that lost their hash. They need not be stored again before they are released."""
        self._closing = False
        """The last event but EngineStopped was a PoolSnapshot."""

    @takes(ev.BlocksAllocated)
    def on_allocated(self, e: ev.BlocksAllocated) -> None:
        self._withdrawn.difference_update(e.ids)
        self.books.mirror.allocated(e)
        self.books.branch(e.seq_id)

    @takes(ev.BlocksTouched)
    def on_touched(self, e: ev.BlocksTouched) -> None:
        branch = self.books.branch(e.seq_id)
        at = len(self.books.mirror.tables.get(e.seq_id, ()))
        lookup = branch.request.lookup
        if e.why == "hit":
            for i, b in enumerate(e.ids, at):
                carried = self.books.mirror.hash[b] if 0 < b < self.books.mirror.num_blocks else None
                need(carried is not None, f"block {b} was hit but has no hash")
                if lookup is not None and branch is branch.request.leader:
                    need(i < lookup.hit_blocks, f"block {b} was hit beyond the look-up's {lookup.hit_blocks}")
                    need(lookup.hashes[i] == carried, f"block {b} was hit but the look-up asked for another")
                elif not self.books.redacted:
                    need(
                        self.books.block_hash(branch, i) == carried,
                        f"block {b} was hit but has other tokens",
                    )
        self.books.mirror.touched(e)
        if e.why == "hit":
            branch.published = at + len(e.ids)
            branch.computed = branch.published * self.books.size
        elif at == 0 and not branch.computed:
            self._rejoin(branch, e.ids)
        else:
            need(at == 0, "a fork starts with a parent's computed blocks")
            need(
                len(e.ids) == -(-branch.computed // self.books.size),
                f"a fork shares {len(e.ids)} blocks for {branch.computed} computed tokens",
            )
            branch.published = min(branch.published, len(e.ids))

    def _rejoin(self, branch: Branch, ids: list[int]) -> None:
        """A branch resumes after a preemption and shares full blocks with another branch again."""
        tokens = len(ids) * self.books.size
        need(tokens < branch.length, "a branch that resumes must compute at least one token")
        need(
            any(
                s.computed >= tokens
                and self.books.mirror.tables.get(s.seq_id, [])[: len(ids)] == ids
                and (self.books.redacted or s.tokens[:tokens] == branch.tokens[:tokens])
                for s in branch.request.branches
                if s is not branch
            ),
            f"blocks {ids[:3]} are no computed blocks of another branch with the same tokens",
        )
        branch.published, branch.computed = len(ids), tokens

    @takes(ev.BlocksCopied)
    def on_copied(self, e: ev.BlocksCopied) -> None:
        self._withdrawn.discard(e.dst)
        self.books.mirror.copied(e)

    @takes(ev.BlocksReleased)
    def on_released(self, e: ev.BlocksReleased) -> None:
        branch = self.books.branch(e.seq_id)
        before = self.books.mirror.tables.get(e.seq_id, [])
        last = len(before) - 1
        unpublished = [
            b
            for i, b in enumerate(e.ids)
            if last - i < branch.computed // self.books.size
            and 0 <= b < self.books.mirror.num_blocks
            and self.books.mirror.hash[b] is None
            and b not in self._withdrawn
        ]
        self.books.mirror.released(e)
        left = len(self.books.mirror.tables.get(e.seq_id, ()))
        branch.published = min(branch.published, left)
        if self.books.caching and not branch.bad:
            need(not unpublished, f"block {(unpublished or [0])[0]} was full but never stored")

    @takes(ev.BlocksStored)
    def on_stored(self, e: ev.BlocksStored) -> None:
        branch, size, end = self.books.branch(e.seq_id), self.books.size, e.start_index + len(e.ids)
        need(
            e.start_index == branch.published,
            f"stores from block {e.start_index} on, after {branch.published} published ones",
        )
        self.books.mirror.stored(e)
        branch.published = end
        life = branch.request
        salt = life.queued.salt if e.start_index == 0 else None
        need(e.salt == salt, "the salt is not its request's, or not that of a first block")
        if end * size > self.books.reached(branch):
            self._publish_ahead(life, e.ids)
        if end > life.high_published:
            first = max(e.start_index, life.high_published) * size
            life.cache_write += max(0, min(end * size, life.prompt) - first)
            life.high_published = end
        need(
            e.start_index > 0 or e.salt == life.queued.salt,
            "the salt of block 0 is not the request's",
        )
        if self.books.redacted:
            return
        tokens = branch.tokens[e.start_index * size : end * size]
        need(e.token_ids == tokens, f"the tokens are not those of sequence {e.seq_id}")
        parent = self.books.block_hash(branch, e.start_index - 1) if e.start_index else self.books.root.hex()
        need(e.parent == parent, f"the parent hash is not {parent[:8]}…")
        for i, h in enumerate(e.hashes, e.start_index):
            need(
                h == self.books.block_hash(branch, i),
                f"the hash of block {i} does not follow from its tokens",
            )

    def _publish_ahead(self, life: Life, ids: list[int]) -> None:
        """The blocks are published for the step that is scheduled next; after a StepScheduled, for the one after
        that."""
        books = (life.cache_write, life.high_published)
        if life not in self.books.publishing:
            self.books.publishing.append(life)
        if self.books.scheduled is None:
            self.books.stored_now.update(ids)
            life.before_step = life.before_step or books
        else:
            self.books.stored_next.update(ids)
            life.before_next = life.before_next or books

    @takes(ev.BlocksEvicted)
    def on_evicted(self, e: ev.BlocksEvicted) -> None:
        self.books.mirror.evicted(e)
        if e.why != "reallocated":
            self._withdrawn.update(e.ids)
        life = None if e.by_seq is None else self.books.branch(e.by_seq).request
        before = None if life is None else life.before_step or life.before_next
        if e.why == "unwritten" and life is not None and before is not None:
            life.cache_write, life.high_published = before

    @takes(ev.CacheCleared)
    def on_cleared(self, e: ev.CacheCleared) -> None:
        self._withdrawn.update(self.books.mirror.cleared())

    @takes(ev.PoolSnapshot)
    def on_snapshot(self, e: ev.PoolSnapshot) -> None:
        wrong = self.books.mirror.differences(e)
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            mine = self.books.branches[i].computed if i in self.books.branches else None
            if mine != computed:
                wrong.append(f"sequence {i} has {computed} computed tokens, the events say {mine}")
        need(not wrong, "; ".join(wrong[:3]))

    def end_batch(self, batch: ev.StepBatch) -> None:
        """Note whether the last event before EngineStopped is a PoolSnapshot."""
        rest = [e for e in batch.events if type(e) is not ev.EngineStopped]
        if rest:
            self._closing = type(rest[-1]) is ev.PoolSnapshot

    def close(self) -> None:
        """The stream is over."""
        need(self._closing, "no closing PoolSnapshot right before the end")
