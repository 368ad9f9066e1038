"""Laws of a step: what is scheduled can be written, what was scheduled is sampled, what is told adds up."""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Branch, need


class StepLaws(Books):
    """One method a kind of event."""

    def _on_forked(self, e: ev.SequenceForked) -> None:
        life, parent = self._life(e.request_id), self._branch(e.parent)
        need(e.child not in self._branches, f"sequence {e.child} exists already")
        need(parent.request is life and life.phase == "running", "forked from a sequence that does not run")
        # Where samples part, within a step, the parent's row is executed but not told yet.
        computed = self._reached(parent)
        if self._scheduled is not None and not self._sampled:
            self._born[e.child] = computed
        child = Branch(
            e.child,
            life,
            parent.tokens[:],
            parent.length,
            computed,
            computed,
            parent.known,
            parent.published,
            chain=parent.chain[:],
        )
        self._branches[e.child] = child
        life.branches.append(child)

    def _on_pruned(self, e: ev.BeamPruned) -> None:
        branch = self._branch(e.seq_id)
        need(branch.request is self._life(e.request_id), f"sequence {e.seq_id} is another request's")
        need(branch.request.searches, "a beam is dropped, but there is no beam search")
        need(not branch.pruned, f"sequence {e.seq_id} is dropped twice")
        branch.pruned = True

    def _on_scheduled(self, e: ev.StepScheduled) -> None:
        need(self._scheduled is None, "two StepScheduled in one batch")
        need(len(e.seq_ids) == len(e.start) == len(e.n), "columns of different lengths")
        need(len(e.drafts) in (0, len(e.n)), "drafts are told for some rows only")
        need(len(set(e.seq_ids)) == len(e.seq_ids), "a sequence is scheduled twice")
        self._scheduled = e
        self.steps += 1
        drafts = e.drafts or [0] * len(e.n)
        for i, start, n, drafted in zip(e.seq_ids, e.start, e.n, drafts, strict=True):
            branch = self._branch(i)
            branch.request.lookup = None
            need(not branch.pruned, f"sequence {i} is scheduled although it was dropped")
            need(branch.request.phase == "running", f"sequence {i} is scheduled while not running")
            need(start == branch.computed, f"sequence {i} starts at {start}, {branch.computed} are computed")
            end = start + n
            need(
                n > 0 and end <= branch.length + drafted,
                f"sequence {i} computes up to {end} of {branch.length} tokens",
            )
            table = self.mirror.tables.get(i, [])
            need(len(table) * self.size >= end, f"sequence {i} has no block for position {end - 1}")
            for b in table[start // self.size : -(-end // self.size)]:
                need(self.mirror.ref[b] == 1 or b in self._stored_now, f"block {b} is written while shared")
                need(
                    self.mirror.hash[b] is None or b in self._stored_now,
                    f"block {b} is written although it is sealed",
                )
            if self._caching:
                # Those before were looked at when they were scheduled, or carried a hash when they were hit.
                for b in table[start // self.size : min(end, branch.known) // self.size]:
                    need(self.mirror.hash[b] is not None, f"block {b} of a known prompt was not published")

    def _on_sampled(self, e: ev.TokensSampled) -> None:
        plan = self._scheduled
        need(plan is not None and not self._sampled, "TokensSampled without its StepScheduled")
        assert plan is not None
        self._sampled = True
        self._written()
        rows = len(e.seq_ids)
        need(rows == len(e.counts) == len(e.num_computed) == len(e.text), "columns of different lengths")
        need(self.redacted or sum(e.counts) == len(e.token_ids), "counts do not add up to the tokens")
        at = 0
        for i, count, computed in zip(e.seq_ids, e.counts, e.num_computed, strict=True):
            branch = self._branch(i)
            waited = branch.request.searches and i not in plan.seq_ids
            need(i in plan.seq_ids or i in self._born or waited, f"sequence {i} was not scheduled")
            if waited and i not in self._born:
                start = end = branch.computed
            elif i in self._born:
                start = end = self._born[i]
                need(count == 1, f"sequence {i} parted without a token of its own")
            else:
                row = plan.seq_ids.index(i)
                start, end = plan.start[row], plan.start[row] + plan.n[row]
                drafted = plan.drafts[row] if plan.drafts else 0
                if drafted:
                    need(start == branch.length - 1, f"sequence {i} has drafts before it decodes")
                    need(count <= drafted + 1, f"sequence {i} has {count} tokens of {drafted} drafts")
                    end = start + max(1, count)
                    if count:
                        self._drafts[i] = (drafted, count - 1)
            need(computed == end, f"sequence {i} has {computed} computed tokens, {end} were scheduled")
            if end < branch.length:
                need(count == 0, f"sequence {i} sampled before its last token was computed")
            branch.bad = count == 0 and end == branch.length
            life = branch.request
            life.recomputed += max(0, min(end, branch.high) - start)
            branch.computed, branch.high = end, max(branch.high, end)
            branch.tokens += e.token_ids[at : at + count]
            branch.length += count
            life.output += count
            at += count
        self._used.update(e.token_ids)
        for i in plan.seq_ids:
            if i not in e.seq_ids:
                need(self._branch(i).request.phase != "running", f"sequence {i} ran but has no row")
        unborn = self._born.keys() - set(e.seq_ids)
        need(not unborn, f"sequence {min(unborn, default=0)} parted but has no row")
        self._born.clear()

    def _on_verified(self, e: ev.DraftVerified) -> None:
        want = self._drafts.pop(e.seq_id, None)
        told = (e.proposed, e.accepted)
        need(want == told, f"sequence {e.seq_id}: {told} drafts proposed and accepted, its tokens say {want}")

    def _on_pieces(self, e: ev.TokenPieces) -> None:
        need(len(e.ids) == len(e.bytes), "columns of different lengths")
        again = self._pieces.intersection(e.ids)
        need(not again, f"token {min(again, default=0)} is explained twice")
        self._pieces.update(e.ids)

    def _on_completed(self, e: ev.StepCompleted) -> None:
        plan, mirror = self._scheduled, self.mirror
        need(plan is not None and not self._completed, "StepCompleted without its StepScheduled")
        need(not self._drafts, f"DraftVerified is missing for sequence {min(self._drafts, default=0)}")
        assert plan is not None
        self._completed = True
        tokens = e.decode_tokens + e.prefill_tokens
        ran = sum(plan.n) if self._sampled else 0
        need(tokens == ran, f"{tokens} tokens completed, {ran} ran")
        need(
            0 <= e.overrun <= e.budget - tokens,
            f"{tokens} tokens and {e.overrun} for nobody in a budget of {e.budget}",
        )
        told, mine = (e.free, e.active, e.cached), (mirror.free, mirror.active, mirror.cached)
        need(told == mine, f"free, active, cached are {told}, the events say {mine}")
        phases = [life.phase for life in self.unfinished.values()]
        queues = {
            "running": phases.count("running"),
            "waiting": len(phases) - phases.count("running"),
            "preempted": phases.count("preempted"),
        }
        need(e.queues == queues, f"queues are {e.queues}, the events say {queues}")

    def _on_error(self, e: ev.EngineError) -> None:
        self._failed = True
