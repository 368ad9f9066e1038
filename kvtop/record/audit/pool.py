"""Laws of the pool beside its transitions: what may be hit, shared, released and stored, and under which hash."""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Branch, Life, need


class PoolLaws(Books):
    """One method a kind of event."""

    def _on_allocated(self, e: ev.BlocksAllocated) -> None:
        self._withdrawn.difference_update(e.ids)
        self.mirror.allocated(e)
        self._branch(e.seq_id)

    def _on_touched(self, e: ev.BlocksTouched) -> None:
        branch = self._branch(e.seq_id)
        at = len(self.mirror.tables.get(e.seq_id, ()))
        lookup = branch.request.lookup
        if e.why == "hit":
            for i, b in enumerate(e.ids, at):
                carried = self.mirror.hash[b] if 0 < b < self.mirror.num_blocks else None
                need(carried is not None, f"block {b} was hit but carries no hash")
                if lookup is not None and branch is branch.request.leader:
                    need(i < lookup.hit_blocks, f"block {b} was hit beyond the look-up's {lookup.hit_blocks}")
                    need(lookup.hashes[i] == carried, f"block {b} was hit but the look-up asked for another")
                elif not self.redacted:
                    need(self._hash(branch, i) == carried, f"block {b} was hit but holds other tokens")
        self.mirror.touched(e)
        if e.why == "hit":
            branch.published = at + len(e.ids)
            branch.computed = branch.published * self.size
        elif at == 0 and not branch.computed:
            self._rejoin(branch, e.ids)
        else:
            need(at == 0, "a fork starts with a parent's computed blocks")
            need(
                len(e.ids) == -(-branch.computed // self.size),
                f"a fork shares {len(e.ids)} blocks for {branch.computed} computed tokens",
            )
            branch.published = min(branch.published, len(e.ids))

    def _rejoin(self, branch: Branch, ids: list[int]) -> None:
        """It comes back from preemption and shares full blocks with a sibling again."""
        tokens = len(ids) * self.size
        need(tokens < branch.length, "a branch that comes back must compute at least one token")
        need(
            any(
                s.computed >= tokens
                and self.mirror.tables.get(s.seq_id, [])[: len(ids)] == ids
                and (self.redacted or s.tokens[:tokens] == branch.tokens[:tokens])
                for s in branch.request.branches
                if s is not branch
            ),
            f"blocks {ids[:3]} are no computed blocks of a sibling with the same tokens",
        )
        branch.published, branch.computed = len(ids), tokens

    def _on_copied(self, e: ev.BlocksCopied) -> None:
        self._withdrawn.discard(e.dst)
        self.mirror.copied(e)

    def _on_released(self, e: ev.BlocksReleased) -> None:
        branch = self._branch(e.seq_id)
        before = self.mirror.tables.get(e.seq_id, [])
        last = len(before) - 1
        unpublished = [
            b
            for i, b in enumerate(e.ids)
            if last - i < branch.computed // self.size
            and 0 <= b < self.mirror.num_blocks
            and self.mirror.hash[b] is None
            and b not in self._withdrawn
        ]
        self.mirror.released(e)
        left = len(self.mirror.tables.get(e.seq_id, ()))
        branch.published = min(branch.published, left)
        if self._caching and not branch.bad:
            need(not unpublished, f"block {(unpublished or [0])[0]} was full but never stored")

    def _on_stored(self, e: ev.BlocksStored) -> None:
        branch, size, end = self._branch(e.seq_id), self.size, e.start_index + len(e.ids)
        need(
            e.start_index == branch.published,
            f"stores from block {e.start_index} on, after {branch.published} published ones",
        )
        self.mirror.stored(e)
        branch.published = end
        life = branch.request
        if end * size > self._reached(branch):
            self._publish_ahead(life, e.ids)
        if end > life.high_published:
            first = max(e.start_index, life.high_published) * size
            life.cache_write += max(0, min(end * size, life.prompt) - first)
            life.high_published = end
        need(
            e.start_index > 0 or e.salt == life.queued.salt,
            "the salt of block 0 is not the request's",
        )
        if self.redacted:
            return
        tokens = branch.tokens[e.start_index * size : end * size]
        need(e.token_ids == tokens, f"the tokens are not those of sequence {e.seq_id}")
        parent = self._hash(branch, e.start_index - 1) if e.start_index else self._root.hex()
        need(e.parent == parent, f"the parent hash is not {parent[:8]}…")
        for i, h in enumerate(e.hashes, e.start_index):
            need(h == self._hash(branch, i), f"the hash of block {i} does not follow from its tokens")

    def _publish_ahead(self, life: Life, ids: list[int]) -> None:
        """For the step that is about to be scheduled; behind a StepScheduled, for the one after that."""
        books = (life.cache_write, life.high_published)
        if life not in self._publishing:
            self._publishing.append(life)
        if self._scheduled is None:
            self._stored_now.update(ids)
            life.before_step = life.before_step or books
        else:
            self._stored_next.update(ids)
            life.before_next = life.before_next or books

    def _on_evicted(self, e: ev.BlocksEvicted) -> None:
        self.mirror.evicted(e)
        if e.why != "reallocated":
            self._withdrawn.update(e.ids)
        life = None if e.by_seq is None else self._branch(e.by_seq).request
        before = None if life is None else life.before_step or life.before_next
        if e.why == "unwritten" and life is not None and before is not None:
            life.cache_write, life.high_published = before

    def _on_cleared(self, e: ev.CacheCleared) -> None:
        self._withdrawn.update(self.mirror.cleared())

    def _on_snapshot(self, e: ev.PoolSnapshot) -> None:
        wrong = self.mirror.differences(e)
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            mine = self._branches[i].computed if i in self._branches else None
            if mine != computed:
                wrong.append(f"sequence {i} has {computed} computed tokens, the events say {mine}")
        need(not wrong, "; ".join(wrong[:3]))
        self._closing = e
