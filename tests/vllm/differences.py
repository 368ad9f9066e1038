"""Where we differ from vLLM 0.32.0 on purpose: the whole list.

Each row says what ours does, what theirs does and why, and carries the switch that models it: a class
over vLLM's Scheduler that does the same there. With all of them laid over it the storms find nothing else
that differs (test_storms.py); without one of them its own test shows the difference (test_differences.py).
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched import scheduler as theirs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

IN_LINE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class RefusesWhatNeverFits(Scheduler):
    def add_request(self, request: Request) -> None:
        if 0 < request.num_tokens < self.max_model_len:
            super().add_request(request)
        else:
            request.status = RequestStatus.FINISHED_IGNORED


class PromisesBlocks(Scheduler):
    """What the running prompts will still take is not free for an admission."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        allocate, free = manager.allocate_slots, pool.get_num_free_blocks

        def allocate_slots(
            request: Request, *args: Any, full_sequence_must_fit: bool = False, **kw: Any
        ) -> Any:
            if full_sequence_must_fit:
                promised = self._inflight_prefill_reserved_blocks()
                pool.get_num_free_blocks = lambda: free() - promised
            try:
                return allocate(request, *args, full_sequence_must_fit=full_sequence_must_fit, **kw)
            finally:
                pool.get_num_free_blocks = free

        manager.allocate_slots = allocate_slots


class DecodesFirst(Scheduler):
    """Runs through the running requests decodes first; the latest admitted is still the one to go.

    A victim may then have had its turn already. vLLM's first-come branch cannot take a turn back, its
    priority branch can, and with the places in the running list as arrival times finds the same victim.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        admitted = list(self.running)
        policy, self.policy = self.policy, SchedulingPolicy.PRIORITY
        if policy is SchedulingPolicy.FCFS:
            for place, request in enumerate(admitted):
                request.arrival_time = place
        self.running.sort(key=lambda r: r.is_prefill_chunk)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.policy = policy
            places = {r.request_id: i for i, r in enumerate(admitted)}
            self.running.sort(key=lambda r: places.get(r.request_id, len(places)))


def _going_on() -> Any:
    """vLLM's schedule() with one word changed: break to continue where nothing is left to preempt."""
    source = textwrap.dedent(inspect.getsource(Scheduler.schedule))
    before = (
        "        if new_blocks is None:\n            # Cannot schedule this request.\n            break\n"
    )
    assert source.count(before) == 1, "this is not the schedule() of vLLM 0.32.0"
    scope: dict[str, Any] = {}
    exec(source.replace(before, before.replace("break", "continue")), vars(theirs), scope)
    return scope["schedule"]


class GoesOnAfterSelfPreemption(Scheduler):
    schedule = _going_on()


class StoresWhatWasComputed(Scheduler):
    """At scheduling only blocks of tokens known at admission are stored, those of sampled tokens when
    the step's output is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[str, int] = {}
        manager, coordinator = self.kv_cache_manager, self.kv_cache_manager.coordinator
        allocate, store = manager.allocate_slots, coordinator.cache_blocks

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.status in IN_LINE:
                self._known[request.request_id] = request.num_tokens
            coordinator.cache_blocks = lambda r, n: store(r, min(n, self._known[r.request_id]))
            try:
                return allocate(request, *args, **kwargs)
            finally:
                coordinator.cache_blocks = store

        manager.allocate_slots = allocate_slots

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request.status is RequestStatus.RUNNING:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return super().update_from_output(scheduler_output, *args)


class DropsHashesOfUnwrittenKV(Scheduler):
    """A request that is preempted or aborted between schedule() and its forward takes the hashes that
    it stored for this step with it, and whoever was admitted onto those blocks is preempted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unwritten: dict[str, dict[int, None]] = {}
        self._read: dict[str, set[int]] = {}
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        allocate, store = manager.allocate_slots, pool.cache_full_blocks
        self._in_flight = False

        def allocate_slots(
            request: Request, *args: Any, new_computed_blocks: Any = None, **kwargs: Any
        ) -> Any:
            new = allocate(request, *args, new_computed_blocks=new_computed_blocks, **kwargs)
            if new is not None and new_computed_blocks is not None:
                self._read[request.request_id] = {b.block_id for b in new_computed_blocks.blocks[0]}
            return new

        def cache_full_blocks(request: Request, blocks: Sequence[Any], **kwargs: Any) -> None:
            if self._in_flight:
                first, last = kwargs["num_cached_blocks"], kwargs["num_full_blocks"]
                ids = dict.fromkeys(b.block_id for b in blocks[first:last])
                self._unwritten.setdefault(request.request_id, {}).update(ids)
            store(request, blocks, **kwargs)

        manager.allocate_slots = allocate_slots
        pool.cache_full_blocks = cache_full_blocks

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._in_flight = True
        return super().schedule(throttle_prefills)

    def update_from_output(self, *args: Any) -> Any:
        self._in_flight = False
        self._unwritten.clear()
        self._read.clear()
        return super().update_from_output(*args)

    def _retract(self, request: Request) -> list[Request]:
        self._read.pop(request.request_id, None)
        bad = self._unwritten.pop(request.request_id, {})
        self.kv_cache_manager.evict_blocks(bad)  # one by one, in this order
        return [r for r in self.running if not bad.keys().isdisjoint(self._read.get(r.request_id, ()))]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        sharers = self._retract(request)
        super()._preempt_request(request, *args, **kwargs)
        if sharers:
            self._preempt_sharers(sharers)
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    def _preempt_sharers(self, sharers: Sequence[Request]) -> None:
        for request in reversed(self.running[:]):
            if request in sharers and request.status is RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus
    ) -> list[Request]:
        if not self._in_flight or not isinstance(request_ids, str) or request_ids not in self.requests:
            return super().finish_requests(request_ids, status)
        sharers = self._retract(self.requests[request_ids])
        done = super().finish_requests(request_ids, status)
        self._preempt_sharers([r for r in sharers if not r.is_finished()])
        return done


class PromotesTheYoungestCopy(Scheduler):
    """When the block that a hash finds is evicted, its latest copy is found next, not the oldest left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager.block_pool.cached_block_hash_to_block = _YoungestFirst()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.kv_cache_manager.block_pool.cached_block_hash_to_block = _YoungestFirst()
        return done


class _YoungestFirst(BlockHashToBlockMap):
    def pop(self, key: Any, block_id: int) -> Any:
        first = self.get_one_block(key)
        gone = super().pop(key, block_id)
        left = self._cache.get(key)
        if isinstance(left, dict) and first is not None and first.block_id == block_id:
            youngest = next(reversed(left))
            self._cache[key] = {youngest: left.pop(youngest), **left}
        return gone


class NeverCutsWithoutChunks(Scheduler):
    """Without chunked prefill the threshold does not chunk either."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.scheduler_config.enable_chunked_prefill:
            self.scheduler_config.long_prefill_token_threshold = 0
        return super().schedule(throttle_prefills)


@dataclass(frozen=True, slots=True)
class Difference:
    """ours, theirs: what each does; why: what ours gains; model: makes vLLM do the same."""

    ours: str
    theirs: str
    why: str
    model: type[Scheduler]


DIFFERENCES = {
    "refuses": Difference(
        "the core refuses at once, with the numbers, what can never fit the context or the pool",
        "its front end does, and a context larger than the pool at start; its scheduler takes whatever comes",
        "one door for every caller; a refusal says what to change",
        RefusesWhatNeverFits,
    ),
    "decodes first": Difference(
        "decodes take their token before running prompts take their chunks",
        "goes through the running requests as they were admitted",
        "on a CPU the budget shrinks as contexts grow: whoever answers keeps its token",
        DecodesFirst,
    ),
    "goes on": Difference(
        "a request that had to preempt itself leaves the rest of the step to the others",
        "ends the running part of the step there",
        "those who still fit lose a step for nothing",
        GoesOnAfterSelfPreemption,
    ),
    "promises": Difference(
        "blocks that running prompts still need are not given to an admission",
        "asks only that the newcomer's whole prompt fits now; reserves for prompts only against remote loads",
        "two half-computed prompts that cannot both go on compute one of them twice",
        PromisesBlocks,
    ),
    "stores computed": Difference(
        "a block that a sampled token filled is findable from the commit of the step that wrote it",
        "is findable from its scheduling",
        "a token that was sampled, or drafted, is no proof of its KV; only known prompts are shared in a step",
        StoresWhatWasComputed,
    ),
    "drops unwritten": Difference(
        "a preemption or abort before the forward takes the hashes with it that the step stored ahead",
        "its scheduler keeps them: the next equal prompt is sent to blocks that nothing wrote",
        "no look-up ever returns KV that was not written",
        DropsHashesOfUnwrittenKV,
    ),
    "youngest copy": Difference(
        "of several blocks with one content the latest takes over when the first is evicted",
        "the oldest left takes over",
        "the latest is usually also the last to be evicted",
        PromotesTheYoungestCopy,
    ),
    "whole without chunks": Difference(
        "without chunked prefill nothing cuts a prompt",
        "a long-prefill threshold does",
        "the knob says that prompts are computed whole",
        NeverCutsWithoutChunks,
    ),
}
"""Name -> difference. "goes on" comes last where it is laid over vLLM: it replaces schedule() itself."""


def models(without: str | None = None) -> tuple[type[Scheduler], ...]:
    """All switches, or all but one, in the order in which they are laid over vLLM's Scheduler."""
    names = sorted(DIFFERENCES, key=lambda name: name == "goes on")
    return tuple(DIFFERENCES[name].model for name in names if name != without)


def as_table() -> str:
    """The list as it stands in the README."""
    rows = [f"| {d.ours} | {d.theirs} | {d.why} |" for d in DIFFERENCES.values()]
    return "\n".join(["| ours | vLLM 0.32.0 | why |", "|---|---|---|", *rows])
