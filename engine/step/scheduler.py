"""Scheduler: which sequence computes how many tokens in the next step. Policy only.

Owns the waiting and running queues and the token budget: decodes first (one token each), then chunks
of running prefills, then admissions in the policy's order: by arrival, or by (priority, arrival). When
the pool runs dry the last running request in that order is preempted by recompute, never the first for
another, so something always finishes; nothing is admitted in a step that preempted. Emits the request
events of admission and preemption.

A step may be planned ahead: before the tokens of the one in flight are known, where no sequence needs to know
its own before it goes on. Nobody is preempted then: that waits until nothing is in flight.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable

from engine.events import AdmissionBlocked, Event, PrefixLookup, RequestAdmitted, RequestPreempted
from engine.kv.paging import Paging
from engine.step.runner import Plan, Row
from engine.step.sequence import Request, Sequence, Status
from engine.step.speculate import PromptLookup


class Scheduler:
    """Queues and policy over one Paging. `emit` receives events in mutation order."""

    def __init__(
        self,
        paging: Paging,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        *,
        max_num_seqs: int,
        chunked_prefill: bool = True,
        long_prefill_threshold: int = 0,
        adaptive_threshold: bool = False,
        by_priority: bool = False,
        watermark: float = 0.0,
        lookup: PromptLookup | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.paging = paging
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._emit = emit
        self._clock = clock
        self.max_num_seqs = max_num_seqs
        self._chunked = chunked_prefill
        self._threshold = long_prefill_threshold
        self._adaptive = adaptive_threshold
        self._by_priority = by_priority
        self._reserve = int(watermark * paging.pool.num_usable)
        self._lookup = lookup
        self._max_model_len = max_model_len
        self.looks_again = True
        """A running prefill asks the cache at each chunk for what others have computed meanwhile."""
        self.hits: list[tuple[Sequence, list[int]]] = []
        """What the admissions of this step read from the cache."""
        self.in_flight = 0
        """Steps that are planned and not done."""
        self._rows: dict[Sequence, Row] = {}
        """Of the newest step, those that it still has."""
        self._short = False
        """A step planned ahead met an empty pool: the next one waits until nothing is in flight."""
        self._budget = self._left = self._decodes_left = 0
        self._preempted_now = False
        self._blocked: tuple[int, str] | None = None
        self._retired: list[int] = []

    def __bool__(self) -> bool:
        """True while anything waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_running_seqs(self) -> int:
        """Branches that run, or will once their prompt is computed."""
        return sum(r.width for r in self.running)

    @property
    def places(self) -> int:
        """Sequences that may still join the running ones."""
        return self.max_num_seqs - self.num_running_seqs

    @property
    def queued_tokens(self) -> int:
        """Tokens of all requests that wait, each branch's own."""
        return sum(len(s) for r in self.waiting for s in r.live)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that may be scheduled next."""
        requests = [*self.running, self.waiting[0]] if self.waiting else self.running
        return max((len(s.tokens) for r in requests for s in r.live), default=0)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, copy) of the newest step, in order."""
        return [(src, dst) for _, src, dst in self.paging.copies]

    # ---------------------------------------------------------------- one step

    def schedule(self, step: int, budget: int) -> Plan:
        """Rows for at most `budget` tokens, decodes first. Rows empty: nothing can run, or not before
        what is in flight is done."""
        if self.in_flight and (self._short or self._waits_for_a_token()):
            return Plan(step)
        self._short = False
        self.paging.begin_step(self.in_flight)
        self._rows.clear()
        self.hits.clear()
        self._budget = self._left = budget
        self._preempted_now = False
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for request in self.running:
            for seq in request.live:
                if not seq.in_flight or self._goes_on(seq):
                    (decodes if seq.is_decoding else prefills).append(seq)
        for place, seq in enumerate((*decodes, *prefills), 1):
            if self._left <= 0 or self._short:
                break
            self._decodes_left = max(0, len(decodes) - place)
            if seq.request.status is Status.RUNNING:  # else preempted for an earlier one
                self._schedule_running(seq)
        if not self._preempted_now and not self._short:
            self._admit_waiting()
        rows = list(self._rows.values())
        plan = Plan(step=step, rows=rows, copies=self.copies, retired=self._retired)
        if rows:
            self.in_flight += 1
            self._retired = []
        else:  # it never reaches the runner, which must still hear of what is retired
            self.paging.cancel_step()
        return plan

    def _waits_for_a_token(self) -> bool:
        """A row in flight samples what the host must have seen before that sequence goes on. Then nothing is
        planned ahead: without the others' next step it would get every second one only."""
        for request in self.running:
            needs = self._lookup is not None or request.params.needs_each_token
            for seq in request.live if needs or request.fans_out else ():
                if seq.in_flight and seq.in_flight[-1].sample:
                    return True
        return False

    def _goes_on(self, seq: Sequence) -> bool:
        """What is in flight is not its last for certain."""
        request = seq.request
        if not seq.in_flight[-1].sample:
            return True
        tokens = seq.num_tokens
        longest = self._max_model_len is None or tokens < self._max_model_len
        return longest and tokens - request.prompt_tokens < request.params.max_tokens

    def _schedule_running(self, seq: Sequence) -> None:
        start, shared, hits, first = seq.num_scheduled, 0, [], seq
        decoding = start >= seq.num_known
        if not seq.table:  # a branch that came back from preemption with its siblings
            first = seq.request.live[0]
            if seq is not first:
                # It shares what they have in common again, so that all of them need no more than before.
                shared = self.paging.common_blocks(first, seq)
                if first.num_computed < shared * self.paging.block_size:
                    return
            hits = self.paging.lookup(seq)
            start = max(shared, len(hits)) * self.paging.block_size
        more = self.paging.lookup_more(seq) if self.looks_again and not decoding else []
        if more and seq.in_flight:
            return  # its row there would end behind what it goes on from: it goes on in the next step
        if more:
            start = (start // self.paging.block_size + len(more)) * self.paging.block_size
        n = self._chunk(seq, seq.num_tokens - start)
        if n == 0:
            return
        if shared or hits:
            self.paging.rejoin(seq, first, shared, hits)
        if more:
            self.paging.take_more(seq, more)
        drafts: tuple[int, ...] = ()
        if self._lookup is not None and n == 1 and decoding and start + 1 == seq.num_tokens:
            # What the other decodes need is not the drafts', and nobody is preempted for them.
            drafts = self._lookup.drafts(seq, self._left - 1 - self._decodes_left)
        if drafts and self.paging.grow(seq, start + 1 + len(drafts)):
            self._add_row(seq, start, 1 + len(drafts), drafts)
            return
        while not self.paging.grow(seq, start + n):
            if self.in_flight:
                self._short = True
                return
            self.preempt(self._victim())
            # It was the victim, or shares a block that the victim was to write in this step.
            if seq.request.status is not Status.RUNNING:
                return
        self._add_row(seq, start, n)

    def _victim(self) -> Request:
        """The last running request in the policy's order."""
        return max(self.running, key=_rank) if self._by_priority else self.running[-1]

    def _admit_waiting(self) -> None:
        if not self.waiting or self._left <= 0:
            return
        places = self.places
        # What running prompts will still take until they are computed.
        promised = sum(map(self._promised_blocks, self.running))
        while self.waiting and self._left > 0:
            request = self.waiting[0]
            width = request.width
            if width > places:
                self._block(request, width, places, "max_num_seqs")
                return
            seq = request.live[0]
            hits = self.paging.lookup(seq)
            want = len(seq) - len(hits) * self.paging.block_size
            n = self._chunk(seq, want)
            if n == 0:
                self._block(request, want, self._left, "max_num_batched_tokens")
                return
            # The whole sequence must fit, not only its first chunk, into what the running prompts leave
            # over: two that start and then cannot both go on would compute everything twice.
            need = self.paging.blocks_to_admit(seq, hits, len(seq)) + self._sibling_blocks(request)
            free = self.paging.pool.num_available - promised
            reserve = self._reserve if self.running else 0
            if need > free - reserve:
                self._block(request, need, max(0, free - reserve), "blocks" if need > free else "watermark")
                return
            self._admit(request, seq, hits, n)
            places -= width
            promised += self._promised_blocks(request)

    def _admit(self, request: Request, seq: Sequence, hits: list[int], n: int) -> None:
        resumed = request.status is Status.PREEMPTED
        self.waiting.popleft()
        self.running.append(request)
        request.status = Status.RUNNING
        self._blocked = None
        cached = len(hits) * self.paging.block_size
        if self.paging.caching:
            queried = self.paging.queried(seq)
            self._emit(
                PrefixLookup(
                    request.request_id,
                    [h.hex() for h in queried],
                    len(hits),
                    len(queried),
                    cached,
                    len(seq),
                    resumed,
                    request.template_rewrote_history,
                )
            )
        if not resumed:
            request.t_admitted = self._clock()
            request.cached_tokens = cached
        for branch in request.live:
            branch.num_known = len(branch)
        self._emit(RequestAdmitted(request.request_id, seq.seq_id, cached, resumed))
        self.paging.admit(seq, hits)
        if hits:
            self.hits.append((seq, hits))
        grown = self.paging.grow(seq, cached + n)
        assert grown, "the admission gate counted fewer blocks than growth takes"
        self._add_row(seq, cached, n)

    def _promised_blocks(self, request: Request) -> int:
        """Blocks that what it has to prefill will still take, one for each sample that parts then."""
        own = sum(self.paging.blocks_to_grow(s, len(s.tokens)) for s in request.live if not s.is_decoding)
        return own + (request.width - 1 if request.fans_out else 0)

    def _sibling_blocks(self, request: Request) -> int:
        """Blocks that the other branches will need beside the first one's: what they do not share when
        they come back, or one each to write into when they part."""
        if request.fans_out:
            return request.width - 1
        first, *others = request.live
        size = self.paging.block_size
        return sum(-(-len(s) // size) - self.paging.common_blocks(first, s) for s in others)

    def _add_row(self, seq: Sequence, start: int, n: int, drafts: tuple[int, ...] = ()) -> None:
        end, request = start + n, seq.request
        sample = end >= seq.num_tokens
        parting: tuple[int, ...] = ()
        if start < seq.num_known:
            if sample and request.fans_out:
                parting = tuple(range(request.params.n))
            self.paging.publish(seq, min(end, seq.num_known))
        top = request.search.candidates if sample and request.search else 0
        row = self._rows[seq] = Row(seq, start, n, sample, parting, drafts, top)
        self._left -= n
        seq.in_flight.append(row)

    def _chunk(self, seq: Sequence, want: int) -> int:
        """Tokens of `want` that this step may take."""
        if not self._chunked:
            return want if want <= self._left else 0
        n = min(want, self._left)
        requests = len(self.running) + len(self.waiting)
        if n <= self._threshold or not self._threshold or seq.is_decoding or requests < 2:
            return n
        share = self._budget // requests if self._adaptive else 0
        return min(n, max(self._threshold, share))

    def _block(self, request: Request, need: int, free: int, reason: str) -> None:
        if self._blocked != (request.request_id, reason):
            self._blocked = (request.request_id, reason)
            self._emit(AdmissionBlocked(request.request_id, need, free, reason))

    # ---------------------------------------------------------------- queues

    def add(self, request: Request) -> None:
        """Into the waiting queue: to its end, or by priority to its place."""
        if self._by_priority:
            insort(self.waiting, request, key=_rank)
        else:
            self.waiting.append(request)

    def preempt(self, request: Request) -> None:
        """Release everything the request holds and put it at the front of the waiting queue (by priority
        to its place); it will compute again, usually from its own still cached blocks. Its row of this
        step is dropped, and whoever shares a block that it was to write in this step goes with it."""
        self._preempted_now = True
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.preemptions += 1
        lost = sum(s.num_computed for s in request.live)
        sharers = self.give_up(request)
        self._emit(RequestPreempted(request.request_id, [s.seq_id for s in request.live], lost))
        self.preempt_all(sharers)  # before it joins the queue: they were admitted after it
        if self._by_priority:
            self.add(request)
        else:
            self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out of the queues and release what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if self._blocked and self._blocked[0] == request.request_id:
            self._blocked = None
        self.preempt_all(self.give_up(request))

    def give_up(self, request: Request) -> list[Sequence]:
        """Drop its rows in flight, retract what those published, release its tables. Returns the sequences
        of others that shared such a block there."""
        sharers: list[Sequence] = []
        for seq in request.branches:
            row = self._rows.pop(seq, None)
            if row is not None:
                self._left += row.n
            sharers += self.paging.retract(seq)
            self.retire(seq)
        return [s for s in sharers if s.request is not request]

    def retire(self, seq: Sequence) -> None:
        """Release its table and let the runner reuse its row. What it has in flight then, a token behind its
        last one, counts no more."""
        seq.in_flight.clear()
        if seq.table:
            self.paging.release(seq)
            self._retired.append(seq.seq_id)

    def step_done(self, plan: Plan) -> list[bool]:
        """The oldest step in flight, which is `plan`, was executed and is being committed. Returns for each of its
        rows whether it counts: not if it was dropped since begin (abort, preemption)."""
        kept = []
        for row in plan.rows:
            rows = row.seq.in_flight
            counts = bool(rows) and rows[0] is row
            if counts:
                del rows[0]
            kept.append(counts)
        self.in_flight -= 1
        self.paging.step_written()
        return kept

    def is_scheduled(self, row: Row) -> bool:
        """False once the row was dropped (abort or preemption between begin and finish)."""
        rows = row.seq.in_flight
        return bool(rows) and (rows[0] is row or rows[-1] is row)  # two steps at most are in flight

    def preempt_all(self, sharers: list[Sequence]) -> None:
        """Preempt whoever of them still runs."""
        if not sharers:
            return
        requests = {s.request for s in sharers}
        for request in reversed(self.running[:]):  # youngest first, so that the queue keeps its order
            if request in requests and request.status is Status.RUNNING:
                self.preempt(request)


def _rank(request: Request) -> tuple[int, float, int]:
    """Place in the order by priority: what is larger comes later and is preempted sooner."""
    return request.priority, request.t_arrival, request.request_id
