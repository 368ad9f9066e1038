"""Law of steps: scheduled tokens have blocks that may be written, scheduled rows are sampled, and the sums agree.

Owns what a step computes, the tokens of branches, and forks.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Branch, need
from kvtop.record.audit.law import Law, takes


class StepLaw(Law):
    """See the module."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._drafts: dict[int, tuple[int, int]] = {}
        """Sequence -> (drafts in this step, how many of them were accepted by its tokens)."""

    @takes(ev.SequenceForked)
    def on_forked(self, e: ev.SequenceForked) -> None:
        life, parent = self.books.life(e.request_id), self.books.branch(e.parent)
        need(e.child not in self.books.branches, f"sequence {e.child} exists already")
        need(parent.request is life and life.phase == "running", "forked from a sequence that does not run")
        # Samples are forked after the parent's row was executed and before its TokensSampled.
        computed = self.books.reached(parent)
        if self.books.scheduled is not None and not self.books.sampled:
            self.books.born[e.child] = computed
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
        self.books.branches[e.child] = child
        life.branches.append(child)

    @takes(ev.BeamPruned)
    def on_pruned(self, e: ev.BeamPruned) -> None:
        branch = self.books.branch(e.seq_id)
        need(branch.request is self.books.life(e.request_id), f"sequence {e.seq_id} is another request's")
        need(branch.request.searches, "a beam is dropped, but there is no beam search")
        need(not branch.pruned, f"sequence {e.seq_id} is dropped twice")
        branch.pruned = True

    @takes(ev.StepScheduled)
    def on_scheduled(self, e: ev.StepScheduled) -> None:
        need(self.books.scheduled is None, "two StepScheduled in one batch")
        need(len(e.seq_ids) == len(e.start) == len(e.n), "columns of different lengths")
        need(len(e.drafts) in (0, len(e.n)), "drafts has fewer rows than the step")
        need(len(set(e.seq_ids)) == len(e.seq_ids), "a sequence is scheduled twice")
        self.books.scheduled = e
        self.books.steps += 1
        drafts = e.drafts or [0] * len(e.n)
        for i, start, n, drafted in zip(e.seq_ids, e.start, e.n, drafts, strict=True):
            branch = self.books.branch(i)
            branch.request.lookup = None
            need(not branch.pruned, f"sequence {i} is scheduled although it was dropped")
            need(branch.request.phase == "running", f"sequence {i} is scheduled while not running")
            need(start == branch.computed, f"sequence {i} starts at {start}, {branch.computed} are computed")
            end = start + n
            need(
                n > 0 and end <= branch.length + drafted,
                f"sequence {i} computes up to {end} of {branch.length} tokens",
            )
            table = self.books.mirror.tables.get(i, [])
            need(len(table) * self.books.size >= end, f"sequence {i} has no block for position {end - 1}")
            for b in table[start // self.books.size : -(-end // self.books.size)]:
                need(
                    self.books.mirror.ref[b] == 1 or b in self.books.stored_now,
                    f"block {b} is written while shared",
                )
                need(
                    self.books.mirror.hash[b] is None or b in self.books.stored_now,
                    f"block {b} is written although it has a hash",
                )
            if self.books.caching:
                # Earlier blocks were checked when they were scheduled, or had a hash when they were hit.
                for b in table[start // self.books.size : min(end, branch.known) // self.books.size]:
                    need(
                        self.books.mirror.hash[b] is not None,
                        f"block {b} of a known prompt was not published",
                    )

    @takes(ev.TokensSampled)
    def on_sampled(self, e: ev.TokensSampled) -> None:
        plan = self.books.scheduled
        need(plan is not None and not self.books.sampled, "TokensSampled without its StepScheduled")
        assert plan is not None
        self.books.sampled = True
        self.books.written()
        rows = len(e.seq_ids)
        need(rows == len(e.counts) == len(e.num_computed) == len(e.text), "columns of different lengths")
        need(self.books.redacted or sum(e.counts) == len(e.token_ids), "counts do not add up to the tokens")
        at = 0
        for i, count, computed in zip(e.seq_ids, e.counts, e.num_computed, strict=True):
            branch = self.books.branch(i)
            waited = branch.request.searches and i not in plan.seq_ids
            need(i in plan.seq_ids or i in self.books.born or waited, f"sequence {i} was not scheduled")
            if waited and i not in self.books.born:
                start = end = branch.computed
            elif i in self.books.born:
                start = end = self.books.born[i]
                need(count == 1, f"sequence {i} was forked without a token")
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
        for i in plan.seq_ids:
            if i not in e.seq_ids:
                need(self.books.branch(i).request.phase != "running", f"sequence {i} ran but has no row")
        unborn = self.books.born.keys() - set(e.seq_ids)
        need(not unborn, f"sequence {min(unborn, default=0)} was forked but has no row")
        self.books.born.clear()

    @takes(ev.DraftVerified)
    def on_verified(self, e: ev.DraftVerified) -> None:
        want = self._drafts.pop(e.seq_id, None)
        said = (e.proposed, e.accepted)
        need(
            want == said, f"sequence {e.seq_id}: {said} drafts proposed and accepted, its tokens give {want}"
        )

    @takes(ev.StepCompleted)
    def on_completed(self, e: ev.StepCompleted) -> None:
        plan, mirror = self.books.scheduled, self.books.mirror
        need(plan is not None and not self.books.completed, "StepCompleted without its StepScheduled")
        need(not self._drafts, f"DraftVerified is missing for sequence {min(self._drafts, default=0)}")
        assert plan is not None
        self.books.completed = True
        tokens, rows = e.decode_tokens + e.prefill_tokens, []
        if self.books.sampled:
            rows = list(zip(plan.seq_ids, plan.start, plan.n, strict=True))
        ran = sum(n for _, _, n in rows)
        need(tokens == ran, f"{tokens} tokens completed, {ran} ran")
        decoded = sum(n for i, start, n in rows if start >= self.books.branch(i).known)
        need(e.decode_tokens == decoded, f"{e.decode_tokens} tokens decoded, the rows say {decoded}")
        most = self.books.knobs.max_num_batched_tokens
        need(most is None or e.budget <= most, f"a budget of {e.budget}, more than {most}")
        need(
            0 <= e.overrun <= e.budget - tokens,
            f"{tokens} tokens and {e.overrun} of ended sequences exceed the budget of {e.budget}",
        )
        said, mine = (e.free, e.active, e.cached), (mirror.free, mirror.active, mirror.cached)
        need(said == mine, f"free, active, cached are {said}, the events say {mine}")
        phases = [life.phase for life in self.books.unfinished.values()]
        queues = {
            "running": phases.count("running"),
            "waiting": len(phases) - phases.count("running"),
            "preempted": phases.count("preempted"),
        }
        need(e.queues == queues, f"queues are {e.queues}, the events say {queues}")

    @takes(ev.EngineError)
    def on_error(self, e: ev.EngineError) -> None:
        self.books.failed = True

    def end_batch(self, batch: ev.StepBatch) -> None:
        """A scheduled step is completed in the same batch."""
        books = self.books
        if books.scheduled is not None:
            if not books.sampled:
                books.written()
            need(books.sampled or books.failed, "StepScheduled without TokensSampled or an EngineError")
            need(books.completed, "StepScheduled without StepCompleted")
        need(batch.step == books.steps, f"step is {batch.step} after {books.steps} StepScheduled")
