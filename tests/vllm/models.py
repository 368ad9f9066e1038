"""Classes over vLLM's Scheduler. Each makes vLLM do what kvtop does in one of the intended differences.

The table in differences.py lists them. They can be combined in any order. Some differences are in the middle of vLLM's
schedule(). For these, `Hooked` takes the source of that function and turns four places into methods, which do by
default what the source did there.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched import scheduler as theirs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

IN_LINE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

HOOKS = {
    "num_new_tokens = (\n            request.num_tokens_with_spec\n": (
        "self.visit(request)\n        num_new_tokens = (\n            request.num_tokens_with_spec\n"
    ),
    "max(\n                        self.running,\n                        key=lambda r: (r.priority, r.arrival_time),\n"
    "                    )": "self.next_victim()",
    "if preempted_req == request:": "if self.gave_up(request):",
    "if new_blocks is None:\n            # Cannot schedule this request.\n            break": (
        "if new_blocks is None:\n            if self.goes_on:\n                continue\n            break"
    ),
}


def _hooked() -> Any:
    source = textwrap.dedent(inspect.getsource(Scheduler.schedule))
    for before, after in HOOKS.items():
        assert source.count(before) == 1, "this is not the schedule() of vLLM 0.32.0"
        source = source.replace(before, after)
    scope: dict[str, Any] = {}
    exec(source, vars(theirs), scope)
    return scope["schedule"]


class Hooked(Scheduler):
    """vLLM's schedule(), unchanged, with methods that subclasses can override."""

    schedule = _hooked()
    goes_on = False
    """After a request that preempted itself: continue with the next one, or end the running part of the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[str, int] = {}
        """Tokens at the latest admission of each request. Later tokens were sampled since then."""
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.status in IN_LINE:
                self.known[request.request_id] = request.num_tokens
            return allocate(request, *args, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate_slots

    def visit(self, request: Request) -> None:
        """It is the turn of a running request."""

    def next_victim(self) -> Request:
        return max(self.running, key=lambda r: (r.priority, r.arrival_time))

    def gave_up(self, request: Request) -> bool:
        """Whether the request whose turn it is was itself preempted."""
        return request.status is RequestStatus.PREEMPTED

    def reads(self, request: Request, blocks: Iterable[int]) -> None:
        """The request got these blocks from the cache in this step."""


class RefusesWhatNeverFits(Hooked):
    def add_request(self, request: Request) -> None:
        if 0 < request.num_tokens < self.max_model_len:
            super().add_request(request)
        else:
            request.status = RequestStatus.FINISHED_IGNORED


class PromisesBlocks(Hooked):
    """Blocks that running prompts will still need are not free for an admission."""

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


class DecodesFirst(Hooked):
    """Schedules decodes first. The request that is preempted is still the one that was admitted last.

    So the preempted request may have had its turn already. vLLM's first-come branch cannot undo a turn, but its
    priority branch can. With the places in the running list as arrival times it chooses the same request.
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


class GoesOnAfterSelfPreemption(Hooked):
    goes_on = True


class StoresWhatWasComputed(Hooked):
    """At scheduling only blocks of tokens known at the admission are stored. Blocks of sampled tokens are stored when
    the output of the step is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager, coordinator = self.kv_cache_manager, self.kv_cache_manager.coordinator
        allocate, store = manager.allocate_slots, coordinator.cache_blocks

        def allocate_slots(*args: Any, **kwargs: Any) -> Any:
            coordinator.cache_blocks = lambda r, n: store(r, min(n, self.known[r.request_id]))
            try:
                return allocate(*args, **kwargs)
            finally:
                coordinator.cache_blocks = store

        manager.allocate_slots = allocate_slots

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request.status is RequestStatus.RUNNING:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return super().update_from_output(scheduler_output, *args)


class DropsHashesOfUnwrittenKV(Hooked):
    """If a request is preempted or aborted between its scheduling and its forward, the hashes that it stored for this
    step are removed. Requests that got those blocks are preempted too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unwritten: dict[str, dict[int, None]] = {}
        self._read: dict[str, set[int]] = {}
        self._in_flight = self._scheduling = False
        self._doomed: set[Request] = set()
        """Requests that share such blocks. They are preempted next, while schedule() goes through the running ones."""
        self._admissions = count()
        self._admitted: dict[str, int] = {}
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        allocate, store = manager.allocate_slots, pool.cache_full_blocks

        def allocate_slots(
            request: Request, *args: Any, new_computed_blocks: Any = None, **kwargs: Any
        ) -> Any:
            if self._doomed:
                return None
            new = allocate(request, *args, new_computed_blocks=new_computed_blocks, **kwargs)
            if new is not None and new_computed_blocks is not None:
                self.reads(request, (b.block_id for b in new_computed_blocks.blocks[0]))
                self._admitted[request.request_id] = next(self._admissions)
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
        self._in_flight = self._scheduling = True
        output = super().schedule(throttle_prefills)
        self._scheduling = False
        assert not self._doomed
        return output

    def update_from_output(self, *args: Any) -> Any:
        self._in_flight = False
        self._unwritten.clear()
        self._read.clear()
        return super().update_from_output(*args)

    def reads(self, request: Request, blocks: Iterable[int]) -> None:
        self._read.setdefault(request.request_id, set()).update(blocks)

    def next_victim(self) -> Request:
        if self._doomed:
            return max(self._doomed, key=self._age)
        return super().next_victim()

    def gave_up(self, request: Request) -> bool:
        return super().gave_up(request) and not self._doomed

    def _age(self, request: Request) -> int:
        return self._admitted[request.request_id]

    def _retract(self, request: Request) -> list[Request]:
        self._read.pop(request.request_id, None)
        bad = self._unwritten.pop(request.request_id, {})
        self.kv_cache_manager.evict_blocks(bad)  # one by one, in this order
        return [
            r
            for r in self.running
            if r is not request and not bad.keys().isdisjoint(self._read.get(r.request_id, ()))
        ]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._doomed.discard(request)
        sharers = self._retract(request)
        super()._preempt_request(request, *args, **kwargs)
        if self._scheduling:
            self._doomed.update(sharers)
        elif sharers:
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
        self._preempt_sharers(sharers)
        return done


class LooksAgain(Hooked):
    """At each chunk a running prompt looks up the blocks after its computed ones. A half-computed block of its own is
    given back for them."""

    def visit(self, request: Request) -> None:
        name, pool = request.request_id, self.kv_cache_manager.block_pool
        (single,) = self.kv_cache_manager.coordinator.single_type_managers
        blocks = single.req_to_blocks[name]
        first = request.num_computed_tokens // single.block_size
        if request.num_computed_tokens >= self.known[name] or not blocks:
            return
        hits = []
        for h in request.block_hashes[first : (request.num_tokens - 1) // single.block_size]:
            found = pool.get_cached_block(h, [single.kv_cache_group_id])
            if not found:
                break
            hits += found
        if hits:
            pool.free_blocks(reversed(blocks[first:]))
            pool.touch(hits)
            blocks[first:] = hits
            single.num_cached_block[name] = len(blocks)
            request.num_computed_tokens = len(blocks) * single.block_size
            self.reads(request, (b.block_id for b in hits))


class PromotesTheYoungestCopy(Hooked):
    """When the block of a hash is evicted, the hash then finds its latest copy, not the oldest of the others."""

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


class NeverCutsWithoutChunks(Hooked):
    """Without chunked prefill the threshold does not cut a prompt either."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.scheduler_config.enable_chunked_prefill:
            self.scheduler_config.long_prefill_token_threshold = 0
        return super().schedule(throttle_prefills)


class KeepsAPartOfTheUsableBlocks(Hooked):
    """The watermark is a part of the usable blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        usable = manager.block_pool.num_gpu_blocks - 1
        manager.watermark_blocks = int(self.scheduler_config.watermark * usable)
