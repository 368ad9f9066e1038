"""EngineCore: one step of the engine, without threads. begin() schedules, finish() commits; step() composes.

Owns the requests' lives (queued, refused, admitted, finished), the stop checks, the order of events and
the cutting of batches. The clock is injected. A step counts as executed only if finish() got an output:
otherwise nothing that it scheduled stays published, so no look-up ever returns unwritten KV.

Over a runner that computes beside the host, step N + 1 is begun and launched before step N is finished
(asynchronous scheduling). What N + 1 takes from the pool is then told in N's batch, as it happens; its own
StepScheduled opens the batch that its commit cuts. An end that shows in N drops the row of N + 1: its token is
nobody's. Whoever gets its blocks is written by a later step, and the runner computes steps in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.event_log import EventLog
from engine.events import (
    BeamPruned,
    DraftVerified,
    EngineError,
    HitAudited,
    PoolSnapshot,
    RequestFinished,
    RequestQueued,
    StepBatch,
    StepCompleted,
    StepScheduled,
    Timings,
    TokenLogprobs,
    TokenPieces,
    TokensSampled,
    Usage,
)
from engine.kv.blocks import BlockPool
from engine.kv.hashing import salt_digest
from engine.kv.paging import Paging
from engine.params import SamplingParams
from engine.step.admission import Admission
from engine.step.beam import BeamSearch
from engine.step.commit import PRUNED, Grown, Growth
from engine.step.detok import Detokenizer, TokenBytes
from engine.step.hit_audit import Auditor
from engine.step.runner import AsyncRunner, Logprob, ModelRunner, Plan, Row, StepOutput
from engine.step.scheduler import Scheduler
from engine.step.sequence import Request, Status
from engine.step.sequence import Sequence as Branch
from engine.step.speculate import PromptLookup

Finish = Callable[[Request], None]


@dataclass(slots=True)
class _Flight:
    """A step between begin() and finish(). told: the rows of its StepScheduled, None before that; ticket: what
    the runner gave for it; error: why it could not be launched."""

    plan: Plan
    budget: int
    t_schedule: float
    told: list[Row] | None = None
    ticket: Any = None
    error: Exception | None = None


class EngineCore:
    """The engine as a deterministic state machine over a runner.

    log: where events go, with the clock. token_bytes: text of a token id, None where
    the source has no text. on_finished: called once per request after its RequestFinished.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        log: EventLog,
        *,
        hash_seed: int,
        token_bytes: TokenBytes | None = None,
        is_text: Callable[[int], bool] = lambda _: True,
        eos_ids: Iterable[int] = (),
        defaults: dict[str, Any] | None = None,
        on_finished: Finish | None = None,
    ) -> None:
        self.runner = runner
        self.log = log
        self.clock = log.clock
        self.events = log.events
        self.slow = False
        """Set while slow motion waits between steps; StepCompleted carries it."""
        self.one_at_a_time = False
        """Set while steps are looked at one by one: none is launched ahead."""
        self._pool = BlockPool(runner.num_blocks, runner.block_size, self.events)
        self.paging = Paging(self._pool, hash_seed, config.enable_prefix_caching)
        self._budget = config.max_num_batched_tokens or 512
        self._chunked = config.enable_chunked_prefill
        if not self._chunked and self._budget < runner.max_model_len:
            raise SetupError(
                f"without chunked prefill --max-num-batched-tokens ({self._budget}) must be at least "
                f"--max-model-len ({runner.max_model_len}); raise the one or lower the other"
            )
        self.scheduler = Scheduler(
            self.paging,
            self.events.append,
            self.clock,
            max_num_seqs=config.max_num_seqs,
            chunked_prefill=self._chunked,
            long_prefill_threshold=config.long_prefill_token_threshold,
            adaptive_threshold=config.long_prefill_token_threshold_adaptive,
            by_priority=config.scheduling_policy == "priority",
            watermark=config.watermark,
            lookup=PromptLookup(config.speculate, runner.max_model_len) if config.speculate else None,
            max_model_len=runner.max_model_len,
        )
        self.requests: dict[int, Request] = {}
        """Waiting and running requests by id."""
        self._seq_ids = count()
        self._growth = Growth(self.paging, self._seq_ids, self.events.append, runner.max_model_len)
        self._token_bytes = token_bytes
        self._is_text = is_text
        self._eos = frozenset(eos_ids)
        self._defaults = defaults or {}
        try:
            SamplingParams().resolved(self._defaults, seed=0)
        except ValueError as error:
            raise SetupError(f"the model's own sampling defaults are wrong: {error}") from None
        self._seed = config.seed
        self._auditor = Auditor(config.audit, self._pool, runner)
        self._admission = Admission(config, self.scheduler, runner.vocab_size, runner.max_model_len)
        self._on_finished = on_finished
        self._seen = bytearray(runner.vocab_size)
        self._flight: deque[_Flight] = deque()
        self._planned = 0
        # An audit reads what the next step may take.
        self._beside: AsyncRunner | None = None
        if isinstance(runner, AsyncRunner) and runner.ahead > 0 and not config.audit:
            self._beside = runner
        self.ahead = min(self._beside.ahead, 1) if self._beside else 0
        """Steps that may be launched before the one in flight is finished."""

    # ---------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        t_arrival: float | None = None,
        priority: int = 0,
        salt: str | None = None,
        conversation: int | None = None,
        spans: list[tuple[int, int, str, str]] | None = None,
        template_rewrote_history: bool = False,
        refuse: str | None = None,
        ends: Literal["refused", "abort"] = "refused",
    ) -> Request:
        """Queue a request, or end it at once: for the reason in `refuse`, told as `ends`, for a number
        that is no token, or if it can never fit. Emits RequestQueued. Ended so, it has no branches."""
        params = params.resolved(self._defaults, seed=(self._seed * 1_000_003 + request_id) % 2**63)
        problem = self._admission.foreign_token(prompt_token_ids)
        if problem:
            prompt_token_ids = []  # a number that is no token fits in no event and no table
        problem = refuse or problem or self._admission.problem(len(prompt_token_ids), params)
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            self.clock() if t_arrival is None else t_arrival,
            priority=priority,
            salt=None if salt is None else salt_digest(salt),
            conversation=conversation,
            spans=spans or [],
            template_rewrote_history=template_rewrote_history,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
        )
        self._show_pieces(prompt_token_ids)
        self.events.append(
            RequestQueued(
                request_id,
                list(prompt_token_ids),
                request.t_arrival,
                params.n,
                priority,
                None if request.salt is None else request.salt.hex(),
                conversation,
                request.spans,
                params.as_dict(),
            )
        )
        if problem:
            self._finish(request, ends, problem)
            return request
        branch = Branch(next(self._seq_ids), request)
        if self._token_bytes is not None:
            branch.detok = Detokenizer(self._visible_bytes, params.stop)
        request.branches.append(branch)
        if params.beam_width > 1:
            most = min(params.max_tokens, self.runner.max_model_len - request.prompt_tokens)
            final = request.eos_token_ids | frozenset(params.stop_token_ids)
            request.search = BeamSearch(
                params.beam_width, most, final, params.length_penalty, params.early_stopping
            )
            request.search.begin(branch.seq_id)
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request

    def abort(self, request_id: int) -> bool:
        """End a request in any state. False if it is unknown or finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def fork(self, parent: Branch) -> Branch | None:
        """A child branch that shares the parent's computed blocks; call between steps. None if the parent
        is not running or has a row in flight, no place is left among max_num_seqs, or the request could
        then outgrow the pool on its own."""
        request = parent.request
        if request.status is not Status.RUNNING or parent.finish_reason or not parent.table:
            return None
        if request.fans_out or request.search or parent.in_flight:
            return None
        most = min(self.runner.max_model_len, request.prompt_tokens + request.params.max_tokens)
        blocks = -(-most // self.paging.block_size) * (len(request.branches) + 1)
        if blocks > self._pool.num_usable or not self.scheduler.places:
            return None
        return self._growth.fork(parent)

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drop all hashes. False, with nothing changed, while blocks are in use, unless
        `reset_running` preempts everything first (youngest first, so the order stays)."""
        if self._pool.num_active and not reset_running:
            return False
        for request in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(request)
        self._pool.clear()
        return True

    # ---------------------------------------------------------------- one step

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs or is in flight."""
        return bool(self.scheduler) or bool(self._flight)

    def step(self) -> StepBatch | None:
        """begin, execute, finish; over a runner that computes beside the host: begin and launch the next
        step, then finish the one in flight. An exception of the runner fails the step's requests, not the
        engine. None if nothing could run, or nothing is finished yet."""
        ahead = 0 if self.one_at_a_time or self.slow else self.ahead
        if len(self._flight) > ahead or (self._flight and self._flight[0].error):
            return self._land()
        plan = self.begin()
        if plan is not None:
            self._launch(self._flight[-1])
        if self._flight and (plan is None or self._flight[-1].error or len(self._flight) > ahead):
            return self._land()
        return None

    def settle(self) -> None:
        """Finish what is in flight."""
        while self._flight:
            self._land()

    def _launch(self, flight: _Flight) -> None:
        try:
            run = self._beside.launch if self._beside else self.runner.execute
            flight.ticket = run(flight.plan)
        except Exception as error:
            flight.error = error

    def _land(self) -> StepBatch:
        """Finish the oldest step in flight."""
        flight = self._flight[0]
        if flight.error is not None:
            return self.finish(flight.plan, None, flight.error)
        try:
            output = self._beside.collect(flight.ticket) if self._beside else flight.ticket
        except Exception as error:
            return self.finish(flight.plan, None, error)
        return self.finish(flight.plan, output)

    def begin(self) -> Plan | None:
        """Schedule a step; None if there is nothing to run, or nothing before a step in flight is finished.
        Plans go to finish() in their order, and at most `ahead` of them wait for it when another is begun.
        Raises RuntimeError beyond that: what a step published could not be taken back any more."""
        if len(self._flight) > self.ahead:
            raise RuntimeError("the step in flight was not finished")
        if not self.scheduler:
            return None
        start = self.clock()
        if self._flight:
            self._tell(self._flight[0])
        budget = self._step_budget()
        plan = self.scheduler.schedule(self._planned, budget)
        if not plan.rows:
            return None
        self._planned += 1
        self._auditor.note(self.scheduler.hits)
        flight = _Flight(plan, budget, 0.0)
        self._flight.append(flight)
        if not self.ahead:
            self._tell(flight)
        flight.t_schedule = self.clock() - start
        return plan

    def _tell(self, flight: _Flight) -> None:
        """StepScheduled of a step, once: of the rows that it still has. No batch is cut between this and the
        step's end: a step that is in flight beside another is told when the next one is begun."""
        if flight.told is not None:
            return
        rows = flight.plan.rows
        if self.ahead:
            rows = [row for row in rows if self.scheduler.is_scheduled(row)]
        flight.told = rows
        self.log.step += 1
        self.events.append(
            StepScheduled(
                [r.seq.seq_id for r in rows],
                [r.start for r in rows],
                [r.n for r in rows],
                [len(r.drafts) for r in rows] if any(r.drafts for r in rows) else [],
            )
        )

    def prune(self, plan: Plan) -> None:
        """Leave out what was aborted or preempted since begin(): a driver that lets such things happen
        before execute() calls this between them. After execute() finish() sees to it."""
        plan.rows = [row for row in plan.rows if self.scheduler.is_scheduled(row)]
        plan.copies = self.scheduler.copies

    def _step_budget(self) -> int:
        if not self._chunked:
            return self._budget
        budget = self.runner.step_budget(self._budget, self.scheduler.longest_context)
        if budget >= self._budget:
            return self._budget
        # A budget that shrinks with the context must still hold every decode and one block of prefill.
        return min(max(budget, self.scheduler.num_running_seqs + self.paging.block_size), self._budget)

    def finish(self, plan: Plan, output: StepOutput | None, error: Exception | None = None) -> StepBatch:
        """Commit an executed step, or undo one that was not (output None). Cuts the step's batch. Raises
        ValueError for a plan that is not the oldest in flight."""
        if not self._flight or self._flight[0].plan is not plan:
            raise ValueError("steps are finished in the order in which they were begun")
        flight = self._flight[0]
        self._tell(flight)
        if output is None:
            self._undo(plan, error)
        else:
            self._commit(plan, output)
        self._flight.popleft()
        self._audit()
        if output is not None:
            self.events += output.events
        batch = self.log.cut(self._completed(flight, output))
        assert batch is not None
        return batch

    def _audit(self) -> None:
        """Tell what was computed again. Whoever reads a block that is not what its tokens give goes on
        computing wrong KV: it ends, and what it stored is dropped."""
        for verdict in self._auditor.verdicts():
            request = verdict.request
            if verdict.problem is not None:
                told = " ".join(verdict.problem.split())[:200]
                self.events.append(EngineError(f"an audit could not run: {told}", request.request_id))
                continue
            if not verdict.blocks:
                continue
            self.events.append(
                HitAudited(request.request_id, verdict.blocks, verdict.bad, verdict.error, verdict.tolerance)
            )
            if verdict.bad:
                reason = (
                    f"{len(verdict.bad)} of {len(verdict.blocks)} cached blocks do not hold what their tokens give "
                    f"(off by {verdict.error:.2g}, at most {verdict.tolerance:.2g})"
                )
                self.events.append(EngineError(f"audit: {reason}; they were dropped", request.request_id))
                self._convict(request, verdict.bad, reason)

    def _convict(self, request: Request, bad: list[int], reason: str) -> None:
        readers = [
            r
            for r in self.scheduler.running[:]
            if r is not request and any(not set(bad).isdisjoint(s.table) for s in r.branches)
        ]
        self._pool.unpublish(bad, None, "invalid")
        for reader in (request, *readers):
            if reader.branches:
                self.paging.invalidate(reader.branches[0])
            if reader.request_id in self.requests:
                self._finish(reader, "error", reason)

    def _undo(self, plan: Plan, error: Exception | None) -> None:
        reason = f"{type(error).__name__}: {error}" if error else "the step was not executed"
        reason = " ".join(reason.split())[:300]
        self.events.append(EngineError(f"a step failed: {reason}"))
        for row in plan.rows:
            if self.scheduler.is_scheduled(row):
                self._finish(row.seq.request, "error", reason)
        self.scheduler.step_done(plan)

    def _commit(self, plan: Plan, output: StepOutput) -> None:
        now = self.clock()
        kept = self.scheduler.step_done(plan)
        bad = {plan.rows[i].seq.request: None for i in output.bad_rows if kept[i]}
        searches: dict[Request, BeamSearch] = {}
        for i, row in enumerate(plan.rows):
            if not (row.top and kept[i]):
                continue
            request = row.seq.request
            if request not in bad and request.search is not None:
                (offered,) = output.logprobs[i]
                request.search.offer(row.seq.seq_id, offered.top_ids, offered.top)
                searches[request] = request.search
        advanced: list[Grown] = []
        told: list[tuple[int, int, Logprob]] = []
        for i, row in enumerate(plan.rows):
            if not kept[i]:
                continue
            plain = not row.top and row.seq.request not in bad
            rows = self._growth.advance(row, output.token_ids[i] if plain else [], now)
            advanced += rows
            if output.logprobs and plain:
                tokens = [(seq.seq_id, token) for seq, new, _ in rows for token in new]
                told += [(*one, p) for one, p in zip(tokens, output.logprobs.get(i, ()), strict=False)]
        pruned: list[Branch] = []
        for request, search in searches.items():
            pruned += self._growth.move_beams(request, search, advanced, now)
        token_ids = [token for _, new, _ in advanced for token in new]
        self._show_pieces(token_ids)
        self.events.append(
            TokensSampled(
                [seq.seq_id for seq, _, _ in advanced],
                token_ids,
                [len(new) for _, new, _ in advanced],
                [seq.num_computed for seq, _, _ in advanced],
                [text for _, _, text in advanced],
            )
        )
        self._tell_logprobs(told)
        for row, keep in zip(plan.rows, kept, strict=True):
            if row.drafts and keep and (seq := row.seq).request not in bad:
                # All but the newest token are computed: that many of the drafts were right.
                self.events.append(
                    DraftVerified(seq.seq_id, len(row.drafts), seq.num_computed - row.start - 1)
                )
                self.paging.truncate(seq, seq.num_computed)
        for seq in pruned:
            self.events.append(BeamPruned(seq.request.request_id, seq.seq_id))
            self.scheduler.retire(seq)
        done: dict[Request, None] = {}
        for seq, _, _ in advanced:
            if seq.finish_reason == PRUNED:
                continue
            request = seq.request
            if request not in bad:
                # After the stop check: what was hashed is exactly what was computed.
                self.paging.publish(seq, seq.num_computed)
            if seq.finish_reason:
                if request.live:
                    self.scheduler.retire(seq)
                else:
                    done[request] = None
        done |= {request: None for request, search in searches.items() if search.over}
        for request in done:
            self._finish(request, request.branches[0].finish_reason or "stop")
        for request in bad:
            readers = self.paging.invalidate(request.branches[0])
            self._finish(
                request, "error", "the model gave NaN or infinite logits; its cached blocks were dropped"
            )
            self.scheduler.preempt_all(readers)  # of the next step: they read them before this was known

    def _tell_logprobs(self, rows: list[tuple[int, int, Logprob]]) -> None:
        """(sequence id, token, what the model thought of it) where a request asks."""
        if not rows:
            return
        self._show_pieces([token for _, _, p in rows for token in p.top_ids])
        self.events.append(
            TokenLogprobs(
                [i for i, _, _ in rows],
                [token for _, token, _ in rows],
                [p.sampled for _, _, p in rows],
                [p.top_ids for _, _, p in rows],
                [p.top for _, _, p in rows],
            )
        )

    def _finish(self, request: Request, reason: Any, error: str | None = None) -> None:
        for seq in request.live:
            seq.finish_reason = reason
        self.scheduler.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.error = reason, error
        request.t_finished = self.clock()
        self.requests.pop(request.request_id, None)
        first = request.t_admitted is not None
        usage = Usage(
            request.prompt_tokens,
            request.cached_tokens,
            request.prompt_tokens - request.cached_tokens if first else 0,
            request.cache_write_tokens,
            request.num_output,
            request.preemptions,
            request.recomputed_tokens,
        )
        timings = Timings(
            request.t_arrival,
            request.t_admitted,
            request.t_first_token,
            request.t_last_token,
            request.t_finished,
        )
        self.events.append(RequestFinished(request.request_id, reason, timings, usage, error))
        if self._on_finished:
            self._on_finished(request)

    def _completed(self, flight: _Flight, output: StepOutput | None) -> StepCompleted:
        rows: list[Row] = []
        overrun = 0
        if output is None:
            output = StepOutput([])
        else:
            rows = flight.plan.rows
            if rows is not flight.told:
                told = {id(row) for row in flight.told or ()}
                rows = [row for row in rows if id(row) in told]
                overrun = sum(row.n for row in flight.plan.rows) - sum(row.n for row in rows)
        decode = sum(r.n for r in rows if r.start >= r.seq.num_known)
        pool = self._pool
        waiting = self.scheduler.waiting
        return StepCompleted(
            slow=self.slow or output.slowed,
            budget=flight.budget,
            decode_tokens=decode,
            prefill_tokens=sum(r.n for r in rows) - decode,
            t_schedule=flight.t_schedule,
            t_prepare=output.t_prepare,
            t_forward=output.t_forward,
            t_sample=output.t_sample,
            t_gpu=output.t_gpu,
            queues={
                "running": len(self.scheduler.running),
                "waiting": len(waiting),
                "preempted": sum(r.status is Status.PREEMPTED for r in waiting),
            },
            free=pool.num_available - pool.num_cached,
            active=pool.num_active,
            cached=pool.num_cached,
            overrun=overrun,
        )

    # ---------------------------------------------------------------- events

    def flush(self) -> StepBatch | None:
        """A batch of what happened outside a step (queueing, abort, reset); None if nothing did."""
        return self.log.cut()

    def snapshot(self) -> None:
        """The pool's own word as a batch of its own; what is pending goes into one before it."""
        self.log.cut()
        self.log.cut(self.pool_snapshot())

    def pool_snapshot(self) -> PoolSnapshot:
        """Call between steps."""
        live = [s for r in self.requests.values() for s in r.live if s.table]
        return self._pool.snapshot({s.seq_id: (s.table, s.num_computed) for s in live})

    def check(self) -> None:
        """Assert the pool's invariants against all live tables; for tests and storms."""
        self._pool.check([s.table for r in self.requests.values() for s in r.branches])

    def _show_pieces(self, token_ids: Sequence[int]) -> None:
        if self._token_bytes is None:
            return
        seen = self._seen
        new = [t for t in dict.fromkeys(token_ids) if 0 <= t < len(seen) and not seen[t]]
        if new:
            for t in new:
                seen[t] = 1
            self.events.append(TokenPieces(new, [self._token_bytes(t) for t in new]))

    def _visible_bytes(self, token: int) -> bytes:
        assert self._token_bytes is not None
        return self._token_bytes(token) if self._is_text(token) else b""
