"""Requests: the part that follows every request from its arrival to its end.

Owns how a row changes with each event, what preemptions cost, and the tokens of the latest step. The table of rows and
the queues are in rows.py, the branches in branches.py, what they wrote in written.py. Invariant: rows, queues and
branches change nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine import events as ev
from kvtop.state.explain import Look, judge
from kvtop.state.part import takes
from kvtop.state.request_view import RequestView
from kvtop.state.requests.rows import Rows

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class Sampled(NamedTuple):
    """What the latest TokensSampled brought.

    first: (seconds since arrival, cached tokens) of each first token. gaps: (seconds between two tokens, how many such
    gaps, tokens of the sequence). Both leave out slow steps.
    """

    tokens: int = 0
    first: tuple[tuple[float, int], ...] = ()
    gaps: tuple[tuple[float, int, int], ...] = ()


class Requests(Rows):
    """See the module."""

    __slots__ = (
        "preemptions",
        "prefill",
        "refused",
        "sampled",
        "skipped",
        "tokens_back",
        "tokens_lost",
    )

    def __init__(self, skipped: int = 0) -> None:
        super().__init__()
        self.preemptions = 0
        self.tokens_lost = 0
        """Computed tokens whose KV preemptions gave up."""
        self.tokens_back = 0
        """Those of them that the cache gave back at a resumption. They never count in the hit rate."""
        self.refused = 0
        self.skipped = skipped
        """Requests that `begin_anew` forgot: the engine's ids are higher by this number."""
        self.prefill = 0
        """Prompt tokens that the latest step computes."""
        self.sampled = Sampled()

    # -------------------------------------------------------------------------------- from queue to end

    def slow_down(self) -> None:
        """Slow motion made a step longer: the time to a first token that has not come yet measures nothing."""
        for i in (*self.waiting, *self.running):
            if self._rows[i].t_first is None:
                self._rows[i].slow = True

    @takes(ev.RequestQueued)
    def _queued(self, e: ev.RequestQueued, state: DashboardState) -> None:
        before = self._rows.get(e.request_id)
        if before is not None:  # in a damaged stream
            self._leave(before)
        self._rows[e.request_id] = RequestView(
            request_id=e.request_id,
            t_arrival=e.t_arrival,
            prompt_token_ids=e.prompt_token_ids,
            prompt_tokens=len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0),
            spans=e.spans,
            params=e.params,
            n=e.n,
            priority=e.priority,
            salt=e.salt,
            conversation=e.conversation,
            slow=state.stream.slow,
            crowded=bool(self.running or self.waiting),
        )
        self._wait(e.request_id, e.position)

    @takes(ev.PrefixLookup)
    def _looked_up(self, e: ev.PrefixLookup, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        if view is None or e.resumed:
            return
        view.look_up(e, state.stream.t)
        running = (self._rows[i] for i in self.running)
        look = Look(view, state.block_size, state.stream.t, state.history, running, self.branches.request_of)
        view.explanation = judge(look)

    @takes(ev.AdmissionBlocked)
    def _blocked(self, e: ev.AdmissionBlocked, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        if view is not None:
            view.blocked = e

    @takes(ev.RequestAdmitted)
    def _admitted(self, e: ev.RequestAdmitted, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.request_id = self.branches.request_of[e.seq_id] = e.request_id
        sequence.num_computed = e.cached_tokens
        view = self._rows.get(e.request_id)
        if view is None:
            return
        self.branches.bind(sequence, view, state.pool.table(e.seq_id))
        if sequence.branch == 0:
            view.num_computed = e.cached_tokens
        self._leave(view)
        self.running.append(e.request_id)
        view.phase, view.blocked = "running", None
        view.evicted_ids += sequence.evicted_ids
        sequence.evicted_ids = []
        if e.resumed:
            self.tokens_back += view.resume(e.cached_tokens)
        else:
            view.t_admitted = state.stream.t
            view.cached_tokens = e.cached_tokens
            self._note_hits(view, state.pool.table(e.seq_id))

    @takes(ev.RequestPreempted)
    def _preempted(self, e: ev.RequestPreempted, state: DashboardState) -> None:
        self.preemptions += 1
        for i in e.seq_ids:
            self._sequence(i).num_computed = 0
        view = self._rows.get(e.request_id)
        if view is None:
            return
        self._leave(view)
        view.preempt(e.tokens_lost)
        self.tokens_lost += e.tokens_lost
        self._wait(e.request_id, max(0, e.position))  # an older recording does not say: to the head

    @takes(ev.RequestFinished)
    def _finish(self, e: ev.RequestFinished, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        if view is None:
            return
        view.finish(e, state.stream.t)
        for i in view.seq_ids:
            table = state.pool.table(i)
            if not table:
                self.branches.end(i)
            elif i in self.sequences and self.sequences[i].branch == 0:
                view.last_table = table[:]
        self.refused += e.reason == "refused"
        self._close(view, e.reason)

    # -------------------------------------------------------------------------------------- steps

    @takes(ev.StepScheduled)
    def _scheduled(self, e: ev.StepScheduled, state: DashboardState) -> None:
        # At this moment the step has allocated and copied all that it needs, and has released nothing yet.
        self.branches.count_moved(self._rows)
        self.prefill = 0
        for i, start, n in zip(e.seq_ids, e.start, e.n, strict=True):
            sequence = self._sequence(i)
            if start > sequence.num_computed:  # a prefill that runs has found more in the cache
                sequence.num_computed = start
            view = self.get(sequence.request_id)
            if view is None or sequence.branch:
                continue
            in_prompt = max(0, min(n, view.prompt_tokens - start))
            view.chunk = (start, in_prompt) if in_prompt else None
            self.prefill += in_prompt

    @takes(ev.TokensSampled)
    def _sample(self, e: ev.TokensSampled, state: DashboardState) -> None:
        at, t, slow = 0, state.stream.t, state.stream.slow
        first: list[tuple[float, int]] = []
        gaps: list[tuple[float, int, int]] = []
        for i, count, computed, text in zip(e.seq_ids, e.counts, e.num_computed, e.text, strict=True):
            tokens = e.token_ids[at : at + count]
            at += count
            sequence = self._sequence(i)
            sequence.num_computed = computed
            view = self.get(sequence.request_id)
            if view is None or view.done:
                continue
            view.grow(sequence, count, tokens, text)
            if not count:
                continue
            if view.t_first is None:
                view.t_first = t
                if not view.slow:
                    first.append((t - view.t_arrival, view.cached_tokens))
            elif sequence.t_last is not None and not slow:
                gap = (t - sequence.t_last) / count
                view.itl += [gap] * count
                gaps.append((gap, count, computed))
            sequence.t_last = view.t_last = t
        self.sampled = Sampled(at, tuple(first), tuple(gaps))

    @takes(ev.TokenLogprobs)
    def _logprobs(self, e: ev.TokenLogprobs, state: DashboardState) -> None:
        def row(token: int, p: float) -> dict[str, Any]:
            return {"token": token, "text": state.vocabulary.text([token]), "logprob": round(p, 6)}

        for i, token, p, ids, top in zip(
            e.seq_ids, e.token_ids, e.logprobs, e.top_ids, e.top_logprobs, strict=True
        ):
            sequence = self._sequence(i)
            view = self.get(sequence.request_id)
            if view is not None and not view.done and not sequence.branch:
                others = [row(*pair) for pair in zip(ids, top, strict=True)]
                view.logprobs.append(row(token, p) | {"top": others})

    # ----------------------------------------------------------------------------------- branches

    @takes(ev.SequenceForked)
    def _forked(self, e: ev.SequenceForked, state: DashboardState) -> None:
        parent, child = self._sequence(e.parent), self._sequence(e.child)
        child.request_id = self.branches.request_of[e.child] = e.request_id
        child.follow(parent)
        view = self._rows.get(e.request_id)
        if view is None:
            return
        view.fork(e.parent, e.child)
        self.branches.bind(child, view, state.pool.table(e.child))
        if not self.branches.shares(e.request_id):
            self.branches.share(view, [state.pool.table(i) for i in view.seq_ids])

    @takes(ev.BeamPruned)
    def _pruned(self, e: ev.BeamPruned, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        sequence = self._sequence(e.seq_id)
        if view is None:
            sequence.pruned = True
            return
        was_first = self.branches.prune(sequence, view)
        if not state.pool.table(e.seq_id):
            self.branches.end(e.seq_id)
        if was_first and view.seq_ids:
            view.num_computed = self._sequence(view.seq_ids[0]).num_computed

    # ---------------------------------------------------------------------------------------- blocks

    @takes(ev.BlocksAllocated)
    def _allocated(self, e: ev.BlocksAllocated, state: DashboardState) -> None:
        self.branches.gain(self._sequence(e.seq_id).request_id, e.ids)

    @takes(ev.BlocksCopied)
    def _copied(self, e: ev.BlocksCopied, state: DashboardState) -> None:
        request = self._sequence(e.seq_id).request_id
        self.branches.lose(request, (e.src,))
        self.branches.gain(request, (e.dst,))

    @takes(ev.BlocksTouched)
    def _touched(self, e: ev.BlocksTouched, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        table = state.pool.table(e.seq_id)
        # All slots of a hit are filled, and so are those of a branch that comes back after a preemption and takes
        # the blocks of another one. The step that computes it may be reported much later.
        if e.why == "hit" or (not sequence.num_computed and sequence.num_output):
            sequence.num_computed = len(table) * state.block_size
        self.branches.gain(sequence.request_id, e.ids)
        view = self.get(sequence.request_id)
        if view is not None and e.why == "hit":
            self._note_hits(view, table)

    @takes(ev.BlocksReleased)
    def _released(self, e: ev.BlocksReleased, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        self.branches.lose(sequence.request_id, e.ids)
        view = self.get(sequence.request_id)
        if state.pool.table(e.seq_id):
            return
        if e.ids and view is not None and not view.done and sequence.branch == 0:
            view.last_table = e.ids[::-1]
        if view is None or view.done or sequence.pruned:
            self.branches.end(e.seq_id)

    @takes(ev.BlocksEvicted)
    def _evicted(self, e: ev.BlocksEvicted, state: DashboardState) -> None:
        if e.why == "reallocated" and e.by_seq is not None:
            sequence = self._sequence(e.by_seq)
            (self.get(sequence.request_id) or sequence).evicted_ids.extend(e.ids)

    @takes(ev.BlocksStored)
    def _stored(self, e: ev.BlocksStored, state: DashboardState) -> None:
        self._sequence(e.seq_id)

    @takes(ev.PoolSnapshot)
    def _snapshot(self, e: ev.PoolSnapshot, state: DashboardState) -> None:
        if not state.pool.reloaded:
            return
        self.branches.load(e, self._rows)
        for i in [i for i in self.running if self.sequences.keys().isdisjoint(self._rows[i].seq_ids)]:
            self._close(self._rows[i], None)

    # ------------------------------------------------------------------------------------- inside

    def _note_hits(self, view: RequestView, table: list[int]) -> None:
        if not view.resumed and len(view.hit_ids) < view.hit_blocks:
            view.hit_ids = table[: view.hit_blocks]
