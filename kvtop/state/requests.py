"""Requests: the part that follows every request and its branches, from its arrival to its end.

Owns the rows, which of them wait and which run, and what preemptions cost. Reads like a dictionary of rows by
request id. Invariant: the waiting ones are in the order in which the engine will admit them, as far as events say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, ValuesView
from typing import TYPE_CHECKING, Any, NamedTuple

from engine import events as ev
from kvtop.state.explain import Look, judge
from kvtop.state.part import Part, takes
from kvtop.state.request_view import RequestView, SequenceView

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

MOST_FINISHED = 10_000
"""Finished requests that are kept."""


class Sampled(NamedTuple):
    """What the latest TokensSampled brought. first: (seconds since arrival, cached tokens) of first tokens; gaps:
    (seconds between two tokens, how many of them, tokens of the sequence). Slow steps are left out of both."""

    tokens: int = 0
    first: tuple[tuple[float, int], ...] = ()
    gaps: tuple[tuple[float, int, int], ...] = ()


class Requests(Part):
    """See the module."""

    __slots__ = (
        "_finished",
        "_moved",
        "_request_of",
        "_rows",
        "preemptions",
        "prefill",
        "refused",
        "running",
        "sampled",
        "sequences",
        "skipped",
        "tokens_back",
        "tokens_lost",
        "waiting",
    )

    def __init__(self, skipped: int = 0) -> None:
        self._rows: dict[int, RequestView] = {}
        self.sequences: dict[int, SequenceView] = {}
        """Branches that live, by sequence id."""
        self.waiting: list[int] = []
        """Request ids, first to be admitted first."""
        self.running: list[int] = []
        self.preemptions = 0
        self.tokens_lost = 0
        """Computed tokens that preemptions took."""
        self.tokens_back = 0
        """Of those, how many the cache gave back at the resumption; never part of the hit rate."""
        self.refused = 0
        self.skipped = skipped
        """Requests that were forgotten: the engine's ids are higher by this number."""
        self.prefill = 0
        """Prompt tokens that the latest step computes."""
        self.sampled = Sampled()
        self._request_of: dict[int, int] = {}
        self._moved: set[int] = set()
        """Requests of several branches whose tables changed since they were last counted."""
        self._finished: deque[int] = deque()

    # ------------------------------------------------------------------------------------ reading

    def __getitem__(self, request_id: int) -> RequestView:
        return self._rows[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, request_id: int | None) -> RequestView | None:
        """The row; None if there is none."""
        return None if request_id is None else self._rows.get(request_id)

    def values(self) -> ValuesView[RequestView]:
        """Rows, oldest first."""
        return self._rows.values()

    def of_sequence(self, seq_id: int) -> int | None:
        """The request of a sequence, also after its end; None if unknown."""
        return self._request_of.get(seq_id)

    def tokens(self, seq_id: int, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of a sequence that lives; () where they are not known."""
        sequence = self.sequences.get(seq_id)
        view = self.get(self._request_of.get(seq_id))
        if sequence is None or view is None or not view.prompt_token_ids:
            return ()
        n = view.prompt_tokens
        head = view.prompt_token_ids[start:end]
        return (*head, *sequence.output_ids[max(0, start - n) : max(0, end - n)])

    def differences(self, e: ev.PoolSnapshot) -> list[str]:
        """Where a snapshot contradicts the computed tokens that are known here, one line each."""
        known = {i: self.sequences[i].num_computed if i in self.sequences else 0 for i in e.seq_ids}
        return [
            f"computed tokens of sequence {i}: replayed {known[i]}, the pool says {computed}"
            for i, computed in zip(e.seq_ids, e.computed, strict=True)
            if known[i] != computed
        ]

    # -------------------------------------------------------------------------------- from queue to end

    def slow_down(self) -> None:
        """Slow motion stretched a step: no first token that is still to come is a measurement."""
        for i in (*self.waiting, *self.running):
            if self._rows[i].t_first is None:
                self._rows[i].slow = True

    @takes(ev.RequestQueued)
    def _queued(self, e: ev.RequestQueued, state: DashboardState) -> None:
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
        look = Look(view, state.block_size, state.stream.t, state.history, running, self._request_of)
        view.explanation = judge(look)

    @takes(ev.AdmissionBlocked)
    def _blocked(self, e: ev.AdmissionBlocked, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        if view is not None:
            view.blocked = e

    @takes(ev.RequestAdmitted)
    def _admitted(self, e: ev.RequestAdmitted, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.request_id = self._request_of[e.seq_id] = e.request_id
        sequence.num_computed = e.cached_tokens
        view = self._rows.get(e.request_id)
        if view is None:
            return
        sequence.branch = view.add_branch(e.seq_id)
        if sequence.branch == 0:
            view.num_computed = e.cached_tokens
        view.phase, view.blocked = "running", None
        view.evicted_ids += sequence.evicted_ids
        sequence.evicted_ids = []
        if e.resumed:
            self.tokens_back += view.resume(e.cached_tokens)
        else:
            view.t_admitted = state.stream.t
            view.cached_tokens = e.cached_tokens
            self._note_hits(view, state.pool.table(e.seq_id))
        self._leave(e.request_id)
        self.running.append(e.request_id)

    @takes(ev.RequestPreempted)
    def _preempted(self, e: ev.RequestPreempted, state: DashboardState) -> None:
        self.preemptions += 1
        for i in e.seq_ids:
            self._sequence(i).num_computed = 0
        view = self._rows.get(e.request_id)
        if view is None:
            return
        view.preempt(e.tokens_lost)
        self.tokens_lost += e.tokens_lost
        self._leave(e.request_id)
        self._wait(e.request_id, max(0, e.position))  # at the head in an older recording

    @takes(ev.RequestFinished)
    def _finish(self, e: ev.RequestFinished, state: DashboardState) -> None:
        view = self._rows.get(e.request_id)
        if view is None:
            return
        view.finish(e, state.stream.t)
        for i in view.seq_ids:
            table = state.pool.table(i)
            if not table:
                self.sequences.pop(i, None)
            elif i in self.sequences and self.sequences[i].branch == 0:
                view.last_table = table[:]
        self.refused += e.reason == "refused"
        self._close(view, e.reason)

    # -------------------------------------------------------------------------------------- steps

    @takes(ev.StepScheduled)
    def _scheduled(self, e: ev.StepScheduled, state: DashboardState) -> None:
        if self._moved:  # what the step needs is allocated and copied now, and nothing is given back yet
            self._count_moved(state)
        self.prefill = 0
        for i, start, n in zip(e.seq_ids, e.start, e.n, strict=True):
            sequence = self._sequence(i)
            if start > sequence.num_computed:  # a running prefill found more in the cache
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
        child.request_id = self._request_of[e.child] = e.request_id
        child.follow(parent)
        view = self._rows.get(e.request_id)
        if view is not None:
            child.branch = view.add_branch(e.child)
            if parent.text:
                view.texts[e.child] = parent.text

    @takes(ev.BeamPruned)
    def _pruned(self, e: ev.BeamPruned, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.pruned = True
        view = self._rows.get(e.request_id)
        if view is None or e.seq_id not in view.seq_ids:
            return
        led = view.seq_ids[0] == e.seq_id
        view.drop_branch(e.seq_id)
        for place, i in enumerate(view.seq_ids):
            self._sequence(i).branch = place
        sequence.branch = -1
        if not state.pool.table(e.seq_id):
            self.sequences.pop(e.seq_id, None)
        if led and view.seq_ids:  # the beam that is read now
            view.read_from(self._sequence(view.seq_ids[0]))

    # ---------------------------------------------------------------------------------------- blocks

    @takes(ev.BlocksAllocated, ev.BlocksCopied)
    def _note_moved(self, e: ev.BlocksAllocated | ev.BlocksCopied, state: DashboardState) -> None:
        view = self.get(self._sequence(e.seq_id).request_id)
        if view is not None and len(view.seq_ids) > 1:
            self._moved.add(view.request_id)

    @takes(ev.BlocksTouched)
    def _touched(self, e: ev.BlocksTouched, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        table = state.pool.table(e.seq_id)
        # Of hits, and of a sibling that comes back, all slots are filled; the step may be announced much later.
        if e.why == "hit" or (not sequence.num_computed and sequence.output_ids):
            sequence.num_computed = len(table) * state.block_size
        view = self.get(sequence.request_id)
        if view is not None and e.why == "hit":
            self._note_hits(view, table)
        elif view is not None and len(view.seq_ids) > 1:
            self._moved.add(view.request_id)

    @takes(ev.BlocksReleased)
    def _released(self, e: ev.BlocksReleased, state: DashboardState) -> None:
        sequence = self._sequence(e.seq_id)
        view = self.get(sequence.request_id)
        if state.pool.table(e.seq_id):
            return
        if e.ids and view is not None and not view.done and sequence.branch == 0:
            view.last_table = e.ids[::-1]
        if view is None or view.done or sequence.pruned:
            self.sequences.pop(e.seq_id, None)

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
        alive = dict(zip(e.seq_ids, e.computed, strict=True))
        for i, computed in alive.items():
            self._sequence(i).num_computed = computed
        self.sequences = {i: s for i, s in self.sequences.items() if i in alive}
        for i in [i for i in self.running if alive.keys().isdisjoint(self._rows[i].seq_ids)]:
            self._close(self._rows[i], None)

    # ------------------------------------------------------------------------------------- inside

    def _sequence(self, seq_id: int) -> SequenceView:
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            sequence = self.sequences[seq_id] = SequenceView(seq_id, self._request_of.get(seq_id))
            view = self.get(sequence.request_id)
            if view is not None and seq_id in view.seq_ids:
                sequence.branch = view.seq_ids.index(seq_id)
        return sequence

    def _wait(self, request_id: int, position: int) -> None:
        """Into the waiting queue, where the event says; an older recording does not say: at the end."""
        self.waiting.insert(position if position >= 0 else len(self.waiting), request_id)

    def _leave(self, request_id: int) -> None:
        """Out of the queues."""
        for queue in (self.waiting, self.running):
            if request_id in queue:
                queue.remove(request_id)

    def _count_moved(self, state: DashboardState) -> None:
        """What forked requests hold at this moment, against what they would hold without sharing."""
        for i in self._moved:
            view = self._rows.get(i)
            if view is not None and not view.done:
                view.count_blocks([state.pool.table(s) for s in view.seq_ids])
        self._moved.clear()

    def _note_hits(self, view: RequestView, table: list[int]) -> None:
        if not view.resumed and len(view.hit_ids) < view.hit_blocks:
            view.hit_ids = table[: view.hit_blocks]

    def _close(self, view: RequestView, reason: str | None) -> None:
        view.finish_reason = reason
        view.phase, view.chunk, view.blocked = "finished", None, None
        self._leave(view.request_id)
        self._finished.append(view.request_id)
        if len(self._finished) > MOST_FINISHED:
            old = self._rows.pop(self._finished.popleft(), None)
            for i in (*old.seq_ids, *old.dropped_ids) if old is not None else ():
                self._request_of.pop(i, None)
