"""Scheduler: which sequence computes how many tokens in the next step. Policy only.

Owns the waiting and running queues and the token budget. Decodes come first (one token each), then chunks of running
prefills, then admissions in the order of the policy: by arrival, or by (priority, arrival). If the pool has too few
blocks, the last running request in that order is preempted and computed again later. The first one is never preempted,
so some request always finishes. A step that has preempted a request admits none. Emits the events of admission and
preemption.

A step may be planned ahead, before the tokens of the step in flight are known, if no sequence needs its own token to
continue. Such a step preempts no request; that waits until nothing is in flight. The steps in flight are core's
`Flights`, and the one that is being planned is the last of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from engine.config import EngineConfig
from engine.events import AdmissionBlocked, Event, PrefixLookup, RequestAdmitted, RequestPreempted
from engine.kv.paging import Paging
from engine.step.flight import Flight, Flights, row_of
from engine.step.sequence import Request, Sequence, Status
from engine.step.speculate import PromptLookup


class Scheduler:
    """Queues and policy over one Paging. `emit` receives events in mutation order."""

    def __init__(
        self,
        paging: Paging,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        config: EngineConfig,
        max_model_len: int,
    ) -> None:
        self.paging = paging
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._emit = emit
        self._clock = clock
        self.max_num_seqs = config.max_num_seqs
        self._chunked = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold
        self._adaptive = config.long_prefill_token_threshold_adaptive
        self._by_priority = config.scheduling_policy == "priority"
        self._reserve = int(config.watermark * paging.pool.num_usable)
        self._lookup = PromptLookup(config.speculate, max_model_len) if config.speculate else None
        self._max_model_len = max_model_len
        self.looks_again = True
        """A running prefill looks up the cache again at each chunk, for blocks that others have computed since."""
        self._short = False
        """A step planned ahead found too few blocks. The next step is planned when nothing is in flight."""
        self._preempted_now = False
        """The step that is being planned has preempted a request, so it admits none."""
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
    def queues(self) -> dict[str, int]:
        """Requests that run and wait; preempted ones are a part of those that wait."""
        preempted = sum(r.status is Status.PREEMPTED for r in self.waiting)
        return {"running": len(self.running), "waiting": len(self.waiting), "preempted": preempted}

    @property
    def queued_tokens(self) -> int:
        """Tokens of all requests that wait, each branch's own."""
        return sum(len(s) for r in self.waiting for s in r.live)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that may be scheduled next."""
        requests = [*self.running, self.waiting[0]] if self.waiting else self.running
        return max((len(s.tokens) for r in requests for s in r.live), default=0)

    # ---------------------------------------------------------------- one step

    def must_wait(self, flights: Flights) -> bool:
        """No step can be planned before one in flight is finished."""
        return bool(flights) and (self._short or self._waits_for_a_token(flights))

    def schedule(self, flights: Flights) -> None:
        """Rows for the step that is the last of `flights`, decodes first, within its budget. No rows: nothing
        can run, or not before what is in flight is finished."""
        flight = flights[-1]
        ahead = len(flights) > 1
        self._short = self._preempted_now = False
        decodes: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        for request in self.running:
            for seq in request.live:
                if ahead and not self._goes_on(seq, flights):
                    continue
                start = flights.num_scheduled(seq) if ahead else seq.num_computed
                (decodes if start >= seq.num_known else prefills).append((seq, start))
        decodes_left = len(decodes)
        for seq, start in (*decodes, *prefills):
            if flight.left <= 0 or self._short:
                break
            decodes_left = max(0, decodes_left - 1)
            request = seq.request
            if request.status is Status.RUNNING:  # else preempted for an earlier one
                try:
                    self._schedule_running(seq, start, flights, decodes_left)
                except Exception as error:
                    self._fail(request, error, flights)
        if not self._preempted_now and not self._short:
            self._admit_waiting(flights)
        if flight.live:  # else it never reaches the runner, which must still learn what is retired
            flight.seal(self._retired)
            self._retired = []

    def _fail(self, request: Request, error: Exception, flights: Flights) -> None:
        """A request that cannot be planned leaves; core ends it once the step is planned."""
        self.remove(request, flights)
        flights[-1].failed.append((request, error))

    def _waits_for_a_token(self, flights: Flights) -> bool:
        """A row in flight samples what the host must have seen before that sequence goes on. Then nothing is
        planned ahead: without the others' next step it would run in every second step only."""
        for request in self.running:
            needs = self._lookup is not None or request.params.needs_each_token
            for seq in request.live if needs or request.fans_out else ():
                row = flights.newest(seq)
                if row is not None and row.draws:
                    return True
        return False

    def _goes_on(self, seq: Sequence, flights: Flights) -> bool:
        """What is in flight is not certainly its last."""
        row = flights.newest(seq)
        if row is None or not row.draws:
            return True
        request, tokens = seq.request, flights.num_tokens(seq)
        longest = self._max_model_len is None or tokens < self._max_model_len
        return longest and tokens - request.prompt_tokens < request.params.max_tokens

    def _schedule_running(self, seq: Sequence, start: int, flights: Flights, decodes_left: int) -> None:
        flight, ahead = flights[-1], len(flights) > 1
        tokens = flights.num_tokens(seq) if ahead else len(seq.tokens)
        shared, hits, first = 0, [], seq
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
        more = self.paging.lookup_more(seq, start) if self.looks_again and not decoding else []
        if more:
            if flights.newest(seq) is not None:
                return  # its row in flight does not end where the hits begin: it goes on in the next step
            start = (start // self.paging.block_size + len(more)) * self.paging.block_size
        n = self._chunk(flight, tokens - start, decoding)
        if n == 0:
            return
        if shared or hits:
            self.paging.rejoin(seq, first, shared, hits, flight)
        if more:
            self.paging.take_more(seq, more, flight)
        drafts: tuple[int, ...] = ()
        if self._lookup is not None and n == 1 and decoding and start + 1 == tokens:
            # Drafts take nothing that the other decodes need, and no request is preempted for them.
            drafts = self._lookup.drafts(seq, flight.left - 1 - decodes_left)
        if drafts and self.paging.grow(seq, start, start + 1 + len(drafts), flight):
            self._add_row(flight, seq, start, 1 + len(drafts), True, drafts)
            return
        while not self.paging.grow(seq, start, start + n, flight):
            if ahead:
                self._short = True
                return
            self.preempt(self._victim(), flights)
            # It was the victim, or shares a block that the victim was to write in this step.
            if seq.request.status is not Status.RUNNING:
                return
        self._add_row(flight, seq, start, n, start + n >= tokens)

    def _victim(self) -> Request:
        """The last running request in the policy's order."""
        return max(self.running, key=_rank) if self._by_priority else self.running[-1]

    def _admit_waiting(self, flights: Flights) -> None:
        flight = flights[-1]
        if not self.waiting or flight.left <= 0:
            return
        places = self.places
        # What running prompts will still take until they are computed.
        promised = sum(self._promised_blocks(request, flights) for request in self.running)
        while self.waiting and flight.left > 0:
            request = self.waiting[0]
            width = request.width
            if width > places:
                self._block(request, width, places, "max_num_seqs")
                return
            try:
                if not self._admit(request, flight, promised):
                    return
                places -= width
                promised += self._promised_blocks(request, flights)
            except Exception as error:
                self._fail(request, error, flights)

    def _admit(self, request: Request, flight: Flight, promised: int) -> bool:
        """Start the head of the waiting queue, if budget and pool allow."""
        seq = request.live[0]
        hits = self.paging.lookup(seq)
        cached = len(hits) * self.paging.block_size
        n = self._chunk(flight, len(seq) - cached, decoding=False)
        if n == 0:
            self._block(request, len(seq) - cached, flight.left, "max_num_batched_tokens")
            return False
        # The whole sequence must fit into the blocks that running prompts will not take, not only its first chunk. If
        # two prompts started that cannot both continue, one of them would be computed twice.
        need = self.paging.blocks_to_admit(seq, hits, len(seq)) + self._sibling_blocks(request)
        free = self.paging.pool.num_available - promised
        reserve = self._reserve if self.running else 0
        if need > free - reserve:
            self._block(request, need, max(0, free - reserve), "blocks" if need > free else "watermark")
            return False
        self._start(request, seq, hits)
        self.paging.admit(seq, hits, flight)
        if hits:
            flight.hits.append((seq, hits))
        grown = self.paging.grow(seq, cached, cached + n, flight)
        assert grown, "the admission gate counted fewer blocks than growth takes"
        self._add_row(flight, seq, cached, n, cached + n >= len(seq))
        return True

    def _start(self, request: Request, seq: Sequence, hits: list[int]) -> None:
        """From waiting to running."""
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

    def _promised_blocks(self, request: Request, flights: Flights) -> int:
        """Blocks that what it has to prefill will still take, one for each sample that parts then."""
        own = 0
        for seq in request.live:
            start = flights.num_scheduled(seq)
            if start < seq.num_known:
                own += self.paging.blocks_to_grow(seq, start, len(seq.tokens))
        return own + (request.width - 1 if request.fans_out else 0)

    def _sibling_blocks(self, request: Request) -> int:
        """Blocks that the other branches will need besides those of the first: what they do not share when
        they come back, or one each to write into when they part."""
        if request.fans_out:
            return request.width - 1
        first, *others = request.live
        size = self.paging.block_size
        return sum(-(-len(s) // size) - self.paging.common_blocks(first, s) for s in others)

    def _add_row(
        self, flight: Flight, seq: Sequence, start: int, n: int, sample: bool, drafts: tuple[int, ...] = ()
    ) -> None:
        request = seq.request
        draws = (seq.branch,) * (1 + len(drafts)) if sample else ()
        if start < seq.num_known:
            if sample and request.fans_out:
                draws = tuple(range(request.params.n))
            self.paging.publish(seq, min(start + n, seq.num_known), flight)
        top = request.search.candidates if sample and request.search else 0
        flight.live[seq] = row_of(seq, start, n, draws, drafts, top)
        flight.left -= n

    def _chunk(self, flight: Flight, want: int, decoding: bool) -> int:
        """Tokens of `want` that this step may take."""
        if not self._chunked:
            return want if want <= flight.left else 0
        n = min(want, flight.left)
        requests = len(self.running) + len(self.waiting)
        if n <= self._threshold or not self._threshold or decoding or requests < 2:
            return n
        share = flight.budget // requests if self._adaptive else 0
        return min(n, max(self._threshold, share))

    def _block(self, request: Request, need: int, free: int, reason: str) -> None:
        if self._blocked != (request.request_id, reason):
            self._blocked = (request.request_id, reason)
            self._emit(AdmissionBlocked(request.request_id, need, free, reason))

    # ---------------------------------------------------------------- queues

    def place_of(self, request: Request, at: int | None = None) -> int:
        """Index in the waiting queue where it belongs: by priority, or at `at`, by default the end."""
        if self._by_priority:
            return bisect_right(self.waiting, _rank(request), key=_rank)
        return len(self.waiting) if at is None else at

    def add(self, request: Request) -> None:
        """Into the waiting queue: to its end, or by priority to its place."""
        self.waiting.insert(self.place_of(request), request)

    def preempt(self, request: Request, flights: Flights, at: int = 0) -> None:
        """Release everything the request holds and put it at the front of the waiting queue (index `at`; by
        priority to its place). It will compute again, usually from its own blocks that are still cached. Its rows
        in flight do not count, and every request that shares a block which they were to write is preempted too."""
        self._preempted_now = True
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.preemptions += 1
        lost = sum(s.num_computed for s in request.live)
        sharers = self._give_up(request, flights)
        at = self.place_of(request, at)
        self._emit(RequestPreempted(request.request_id, [s.seq_id for s in request.live], lost, at))
        self.waiting.insert(at, request)
        self.preempt_all(sharers, flights, at + 1)  # they were admitted after it

    def preempt_all(self, sharers: list[Sequence], flights: Flights, at: int = 0) -> None:
        """Preempt the requests of these sequences, as far as they still run."""
        if not sharers:
            return
        requests = {s.request for s in sharers}
        for request in reversed(self.running[:]):  # youngest first, so that the queue keeps its order
            if request in requests and request.status is Status.RUNNING:
                self.preempt(request, flights, at)

    def remove(self, request: Request, flights: Flights) -> None:
        """Take a finished or aborted request out of the queues and release what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if self._blocked and self._blocked[0] == request.request_id:
            self._blocked = None
        self.preempt_all(self._give_up(request, flights), flights)

    def _give_up(self, request: Request, flights: Flights) -> list[Sequence]:
        """Drop its rows in flight, retract what they published, release its tables. Returns the sequences
        of other requests that shared such a block."""
        sharers: list[Sequence] = []
        for seq in request.branches:
            sharers += self.paging.retract(seq, flights)
            self.retire(seq, flights)
        return [s for s in sharers if s.request is not request]

    def retire(self, seq: Sequence, flights: Flights) -> None:
        """Release its table and let the runner reuse its row. A row that it still has in flight, for a token after
        its last one, does not count any more."""
        flights.drop(seq)
        if seq.table:
            self.paging.release(seq)
            self._retired.append(seq.seq_id)

    def retire_again(self, seq_ids: list[int]) -> None:
        """The runner did not learn of these, since their step was not launched: put them into the next plan."""
        self._retired[:0] = seq_ids


def _rank(request: Request) -> tuple[int, float, int]:
    """Place in the order by priority: what is larger comes later and is preempted sooner."""
    return request.priority, request.t_arrival, request.request_id
