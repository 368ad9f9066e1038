"""EngineCore: one step of the engine, without threads. begin() schedules, finish() commits; step() composes.

Owns the requests that wait or run, the steps in flight, and the cutting of batches. The clock is injected. A step
counts as executed only if finish() got an output: otherwise nothing that it scheduled stays published, so no
look-up ever returns unwritten KV.

Over a runner that computes while the host goes on, step N + 1 is begun and launched before step N is finished
(asynchronous scheduling). What N + 1 takes from the pool is then in N's batch, as it happens; its own StepScheduled
opens the batch that its commit cuts. If N shows that a sequence has ended, the row of N + 1 for it does not count.
The blocks that it gives back are safe to hand out: a later step writes them, and the runner computes steps in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count
from operator import index
from typing import Any, Literal

from engine.config import EngineConfig
from engine.errors import SetupError, one_line
from engine.event_log import EventLog
from engine.events import EngineError, PoolSnapshot, RequestQueued, StepBatch, StepCompleted
from engine.kv.blocks import BlockPool
from engine.kv.hashing import salt_digest
from engine.kv.paging import Paging
from engine.params import SamplingParams
from engine.step.admission import Admission
from engine.step.commit import Commit
from engine.step.detok import Pieces, TokenBytes
from engine.step.ending import Ending, Finish
from engine.step.flight import Flight, Flights
from engine.step.generation import Generation
from engine.step.hit_audit import Auditor
from engine.step.runner import AsyncRunner, ModelRunner, Plan, StepOutput
from engine.step.scheduler import Scheduler
from engine.step.sequence import Request, Sequence


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
        self._emit = log.emit
        self.slow = False
        """Slow motion waits between steps. It is in StepCompleted."""
        self.one_at_a_time = False
        """Steps run one by one for the user: none is launched ahead."""
        self._budget = config.max_num_batched_tokens or 512
        self._chunked = config.enable_chunked_prefill
        if not self._chunked and self._budget < runner.max_model_len:
            raise SetupError(
                f"without chunked prefill --max-num-batched-tokens ({self._budget}) must be at least "
                f"--max-model-len ({runner.max_model_len}); raise the one or lower the other"
            )
        self._eos = frozenset(eos_ids)
        self._defaults = defaults or {}
        try:
            SamplingParams().resolved(self._defaults, seed=0)
        except ValueError as error:
            raise SetupError(f"the model's own sampling defaults are wrong: {error}") from None
        self._seed = config.seed
        self.requests: dict[int, Request] = {}
        """Waiting and running requests by id."""
        self.flights = Flights()
        """Steps that are planned and not finished."""
        self._planned = 0
        self._seq_ids = count()
        self._pool = BlockPool(runner.num_blocks, runner.block_size, log.emit)
        self.paging = Paging(self._pool, hash_seed, config.enable_prefix_caching)
        self.scheduler = Scheduler(self.paging, log.emit, self.clock, config, runner.max_model_len)
        self._admission = Admission(config, self.scheduler, runner.vocab_size, runner.max_model_len)
        self._ending = Ending(self.requests, self.scheduler, self.flights, log.emit, self.clock, on_finished)
        self._pieces = Pieces(token_bytes, is_text, runner.vocab_size, log.emit)
        self.generation = Generation(self.paging, self._seq_ids, log.emit, runner.max_model_len)
        self._commit = Commit(
            self.paging,
            self.scheduler,
            self.flights,
            self.generation,
            self._ending,
            self._pieces,
            log.emit,
            self.clock,
        )
        self._auditor = Auditor(config.audit, self.paging, runner, self.scheduler, self._ending, log.emit)
        # An audit reads blocks that the next step may take, so no step is launched ahead.
        self._async: AsyncRunner | None = None
        if isinstance(runner, AsyncRunner) and runner.ahead > 0 and not config.audit:
            self._async = runner
        self.ahead = min(self._async.ahead, 1) if self._async else 0
        """Steps that may be launched before the one in flight is finished."""

    # ---------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: int,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        t_arrival: float | None = None,
        priority: int = 0,
        salt: str | None = None,
        conversation: int | None = None,
        spans: list[tuple[int, int, str, str]] | None = None,
        template_rewrote_history: bool = False,
        refuse: str | None = None,
        ends: Literal["refused", "abort", "error"] = "refused",
    ) -> Request:
        """Queue a request, or end it at once: for the reason in `refuse` with finish reason `ends`, for a number
        that is no token, or because it can never fit. Emits RequestQueued. Ended so, it has no branches."""
        problem = refuse
        try:
            params = params.resolved(self._defaults, seed=(self._seed * 1_000_003 + request_id) % 2**63)
            foreign = self._admission.foreign_token(prompt_token_ids)
            if foreign:
                prompt_token_ids = []  # a number that is no token id cannot be in an event or a table
            problem = refuse or foreign or self._admission.problem(len(prompt_token_ids), params)
            digest, priority = None if salt is None else salt_digest(salt), index(priority)
        except Exception as error:  # values that cannot be read are not part of the request, which ends here
            problem, ends = refuse or one_line(error), ends if refuse else "error"
            prompt_token_ids, params, digest, priority = [], SamplingParams(), None, 0
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            self.clock() if t_arrival is None else t_arrival,
            priority=priority,
            salt=digest,
            conversation=conversation,
            spans=spans or [],
            template_rewrote_history=template_rewrote_history,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
        )
        if not problem:
            problem = self._give_branch(request)
            ends = "error"
        self._pieces.show(prompt_token_ids)
        self._emit(
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
                -1 if problem else self.scheduler.place_of(request),
            )
        )
        if problem:
            self._ending.report(request, ends, problem)
            return request
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request

    def _give_branch(self, request: Request) -> str | None:
        """Make the branch of the prompt, without blocks. Returns what is wrong if that fails."""
        branch = Sequence(next(self._seq_ids), request)
        try:
            branch.detok = self._pieces.detokenizer(request.params.stop)
            request.begin(branch, self.runner.max_model_len)
        except Exception as error:
            return one_line(error)
        return None

    def abort(self, request_id: int) -> bool:
        """End a request in any state. False if it is unknown or finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._ending.finish(request, "abort")
        return True

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drop all hashes. False, with nothing changed, while blocks are in use, unless
        `reset_running` preempts everything first (youngest first, so the order stays)."""
        if self._pool.num_active and not reset_running:
            return False
        for request in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(request, self.flights)
        self._pool.clear()
        return True

    def close(self) -> None:
        """End all requests, also after a failure: each of them gets its RequestFinished."""
        try:
            self.settle()
        except Exception as error:
            self._emit(EngineError(f"the last step was lost: {one_line(error)}"))
        for request in list(self.requests.values()):
            try:
                self._ending.finish(request, "abort")
            except (
                Exception
            ):  # the pool or the queues are broken; the caller must still get its RequestFinished
                self._ending.report(request, "abort")

    # ---------------------------------------------------------------- one step

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs or is in flight."""
        return bool(self.scheduler) or bool(self.flights)

    def step(self) -> StepBatch | None:
        """Begin, execute, finish. Over a runner that computes while the host goes on: begin and launch the next
        step, then finish the one in flight. An exception of the runner fails the step's requests, not the
        engine. None if nothing could run, or nothing is finished yet."""
        begun = not self._full and self.begin() is not None
        if begun:
            self._launch(self.flights[-1])
        # Without steps ahead always here; else when a second step is in flight, or nothing new could begin.
        if self.flights and (self._full or not begun):
            return self._land()
        return None

    @property
    def _full(self) -> bool:
        """The oldest step in flight must be finished before another one is begun."""
        ahead = 0 if self.one_at_a_time or self.slow else self.ahead
        return len(self.flights) > ahead or any(flight.error for flight in self.flights)

    def settle(self) -> None:
        """Finish what is in flight."""
        while self.flights:
            self._land()

    def _launch(self, flight: Flight) -> None:
        try:
            run = self._async.launch if self._async else self.runner.execute
            flight.ticket = run(flight.plan)
        except Exception as error:
            flight.error = error

    def _land(self) -> StepBatch:
        """Finish the oldest step in flight."""
        flight = self.flights[0]
        if flight.error is not None:
            self.scheduler.retire_again(flight.plan.retired)
            return self.finish(flight.plan, None, flight.error)
        try:
            output = self._async.collect(flight.ticket) if self._async else flight.ticket
        except Exception as error:
            return self.finish(flight.plan, None, error)
        return self.finish(flight.plan, output)

    def begin(self) -> Plan | None:
        """Schedule a step; None if there is nothing to run, or nothing before a step in flight is finished.
        Plans go to finish() in their order, and at most `ahead` of them wait for it when another is begun.
        Raises RuntimeError beyond that: what a step published could not be taken back any more."""
        flights = self.flights
        if len(flights) > self.ahead:
            raise RuntimeError("the step in flight was not finished")
        if not self.scheduler:
            return None
        start = self.clock()
        if flights:
            self._announce(flights[0])
        budget = self._step_budget()
        if self.scheduler.must_wait(flights):
            return None
        flight = Flight(Plan(self._planned), budget, left=budget)
        flights.append(flight)
        self.scheduler.schedule(flights)
        if not flight.live:
            flights.cancel()
        for request, error in flight.failed:
            self._ending.finish(request, "error", one_line(error))
        if not flight.plan.rows:
            return None
        self._planned += 1
        if not self.ahead:
            self._announce(flight)
        flight.t_schedule = self.clock() - start
        return flight.plan

    def _step_budget(self) -> int:
        if not self._chunked:
            return self._budget
        budget = self.runner.step_budget(self._budget, self.scheduler.longest_context)
        if budget >= self._budget:
            return self._budget
        # A budget that shrinks with the context must still hold every decode and one block of prefill.
        return min(max(budget, self.scheduler.num_running_seqs + self.paging.block_size), self._budget)

    def _announce(self, flight: Flight) -> None:
        """StepScheduled of a step, once: of the rows that still count. No batch is cut between this and the
        step's end: a step that is in flight with another is announced when the next one is begun."""
        if flight.announced is not None:
            return
        self.log.step += 1
        self._emit(flight.announce())

    def finish(self, plan: Plan, output: StepOutput | None, error: Exception | None = None) -> StepBatch:
        """Commit an executed step, or undo one that was not (output None). Cuts the step's batch. Raises
        ValueError for a plan that is not the oldest in flight."""
        flights = self.flights
        if not flights or flights[0].plan is not plan:
            raise ValueError("steps are finished in the order in which they were begun")
        flight = flights[0]
        self._announce(flight)
        if output is None:
            self._undo(flight, error)
            flights.popleft()
        else:
            flights.popleft()
            self._commit.apply(flight, output)
        self._auditor.examine(flight.hits, flights)
        for event in output.events if output else ():
            self._emit(event)
        batch = self.log.cut(self._completed(flight, output))
        assert batch is not None
        return batch

    def _undo(self, flight: Flight, error: Exception | None) -> None:
        """It was not executed: the requests of its rows end, and what it published is retracted with them."""
        reason = one_line(error) if error else "the step was not executed"
        self._emit(EngineError(f"a step failed: {reason}"))
        for seq in list(flight.live):
            if seq in flight.live:
                self._ending.finish(seq.request, "error", reason)

    def _completed(self, flight: Flight, output: StepOutput | None) -> StepCompleted:
        decoded, prefilled, overrun = flight.num_tokens() if output else (0, 0, 0)
        output = output or StepOutput([])
        pool = self._pool
        return StepCompleted(
            slow=self.slow or output.slowed,
            budget=flight.budget,
            decode_tokens=decoded,
            prefill_tokens=prefilled,
            t_schedule=flight.t_schedule,
            t_prepare=output.t_prepare,
            t_forward=output.t_forward,
            t_sample=output.t_sample,
            t_gpu=output.t_gpu,
            queues=self.scheduler.queues,
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
        """Cut a batch with a PoolSnapshot alone. Pending events go into a batch before it."""
        self.log.cut()
        self.log.cut(self.pool_snapshot())

    def pool_snapshot(self) -> PoolSnapshot:
        """Call between steps."""
        live = [s for r in self.requests.values() for s in r.live if s.table]
        return self._pool.snapshot({s.seq_id: (s.table, s.num_computed) for s in live})

    def check(self) -> None:
        """Assert the invariants of the pool against all live tables, for tests."""
        self._pool.check([s.table for r in self.requests.values() for s in r.branches])
