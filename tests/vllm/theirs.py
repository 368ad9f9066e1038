"""vLLM's side: its Scheduler with its KVCacheManager and BlockPool, without a model.

It hashes with our function and root, so that the hash tables can be compared key by key. Everything else is vLLM's.
`models` are classes over its Scheduler that switch single differences off (see differences.py).
"""

from __future__ import annotations

import json
import logging
import tempfile
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.kv.hashing import pack, root_hash, salt_digest
from tests.engine.rig import block_hash
from tests.vllm.terms import HASH_SEED, VOCAB, Ask, Counts, Setup, State, Step

logging.getLogger("vllm").setLevel(logging.CRITICAL)  # importing it set another

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "refused",
}


def our_hash(content: tuple[bytes, tuple[int, ...], tuple[tuple[str, str], ...] | None]) -> bytes:
    """Our block hash, computed from what vLLM hashes: (parent, tokens, (("cache_salt", salt),) or None)."""
    parent, tokens, extra = content
    return block_hash(parent, pack(array("i", tokens)), salt_digest(extra[0][1]) if extra else b"")


@cache
def model_config() -> ModelConfig:
    """A model's config, which vLLM needs even without weights. This takes seconds, because vLLM inspects the class in a
    process of its own."""
    tiny = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
        return ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True, max_model_len=1 << 20)


def kv_config(num_blocks: int, block_size: int) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )


def build(setup: Setup, models: tuple[type, ...] = ()) -> Scheduler:
    """A Scheduler of vLLM with the settings of `setup` and the classes of `models`."""
    model = model_config()
    model.max_model_len = setup.limit
    scheduling = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget,
        max_model_len=setup.limit,
        enable_chunked_prefill=setup.chunked,
        long_prefill_token_threshold=setup.threshold,
        long_prefill_token_threshold_adaptive=setup.adaptive,
        policy="priority" if setup.priority else "fcfs",
        async_scheduling=False,
        is_encoder_decoder=False,
        watermark=setup.watermark,
    )
    cached = CacheConfig(block_size=16, cache_dtype="auto", enable_prefix_caching=setup.caching)
    config = VllmConfig(
        scheduler_config=scheduling,
        model_config=model,
        cache_config=cached,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
    )
    cached.num_gpu_blocks = setup.num_blocks
    register_all_kvcache_specs(config)
    made = type("Modelled", (*models, Scheduler), {}) if models else Scheduler
    return made(
        vllm_config=config,
        kv_cache_config=kv_config(setup.num_blocks, setup.block_size),
        block_size=setup.block_size,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


class Theirs:
    """begin() schedules. finish() gives it the tokens that our side sampled."""

    def __init__(self, setup: Setup, models: tuple[type, ...] = ()) -> None:
        kv_cache_utils.NONE_HASH = root_hash(HASH_SEED)
        self.scheduler = build(setup, models)
        self.manager = self.scheduler.kv_cache_manager
        self.manager.enable_kv_cache_events = self.manager.block_pool.enable_kv_cache_events = True
        self._size = setup.block_size
        self.scheduler.log_stats = False  # otherwise each report of a step empties the manager's counts
        self._hasher = get_request_block_hasher(setup.block_size, our_hash)
        self._step = Step()
        self._output: SchedulerOutput | None = None
        self._finished: dict[int, str] = {}
        self._watch()

    def _watch(self) -> None:
        """Records admissions and preemptions as they happen. Changes nothing."""
        scheduler, manager = self.scheduler, self.manager
        preempt, record = scheduler._preempt_request, manager.record_prefix_cache_stats
        free, take = scheduler._free_request, manager.take_events

        def noted_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
            self._step.preempted.append(int(request.request_id))
            preempt(request, *args, **kwargs)

        def noted_record(request: Request, hits: int) -> None:
            resumed = request.status is RequestStatus.PREEMPTED
            self._step.admitted.append((int(request.request_id), hits, resumed))
            record(request, hits)

        def noted_free(request: Request, *args: Any, **kwargs: Any) -> Any:
            self._finished[int(request.request_id)] = REASONS[request.status]
            return free(request, *args, **kwargs)

        def noted_take() -> list[Any]:
            events = take()
            for event in events:
                self._note(event)
            return events

        scheduler._preempt_request = noted_preempt
        manager.record_prefix_cache_stats = noted_record
        scheduler._free_request = noted_free
        manager.take_events = noted_take

    def _note(self, event: Any) -> None:
        cache, size = self._step.cache, self._size
        match event:
            case BlockStored():
                parent = event.parent_block_hash or root_hash(HASH_SEED)
                for i, h in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[i * size : (i + 1) * size])
                    cache.append(("stored", h.hex(), parent.hex(), tokens))
                    parent = h
            case BlockRemoved():
                cache += [("removed", h.hex(), "", ()) for h in event.block_hashes]
            case AllBlocksCleared():
                cache.append(("cleared", "", "", ()))

    # ---------------------------------------------------------------- what the driver does

    def add(self, ask: Ask) -> None:
        params = SamplingParams(
            max_tokens=ask.max_tokens, temperature=0, ignore_eos=True, stop_token_ids=list(ask.stop)
        )
        request = Request(
            request_id=str(ask.id),
            prompt_token_ids=ask.tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(ask.id),
            cache_salt=ask.salt,
            priority=ask.priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        if request.is_finished():
            self._finished[ask.id] = REASONS[request.status]

    def abort(self, request: int) -> None:
        self.scheduler.finish_requests(str(request), RequestStatus.FINISHED_ABORTED)

    def reset(self, running: bool) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests=running)

    def begin(self) -> Step:
        step = self._step
        self._output = self.scheduler.schedule()
        self.manager.take_events()
        for name, n in self._output.num_scheduled_tokens.items():
            end = self.scheduler.requests[name].num_computed_tokens  # counted as computed already
            step.scheduled.append((int(name), end - n, n))
        return step

    def finish(self, tokens: dict[int, list[int]]) -> None:
        """tokens: what our side sampled, by request."""
        output, self._output = self._output, None
        assert output is not None
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[tokens.get(int(name), []) for name in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        self.manager.take_events()
        self._step = Step()

    # ---------------------------------------------------------------- what it is asked

    def state(self) -> State:
        scheduler, pool = self.scheduler, self.manager.block_pool
        (single,) = self.manager.coordinator.single_type_managers
        held = {int(r): [b.block_id for b in blocks] for r, blocks in single.req_to_blocks.items() if blocks}
        return State(
            waiting=[int(r.request_id) for r in scheduler.waiting],
            running=[int(r.request_id) for r in scheduler.running],
            queue=[b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            refs={b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null},
            hashes={b.block_id: b.block_hash[:16].hex() for b in pool.blocks if b.block_hash is not None},
            num_hashes=len(pool.cached_block_hash_to_block),
            tables=held,
            computed={r: scheduler.requests[str(r)].num_computed_tokens for r in held},
            outputs={
                int(name): list(r.output_token_ids)
                for name, r in scheduler.requests.items()
                if r.output_token_ids
            },
            finished=dict(self._finished),
        )

    def counts(self) -> Counts:
        s = self.manager.prefix_cache_stats
        return Counts(
            s.requests, s.queries, s.hits, s.preempted_requests, s.preempted_queries, s.preempted_hits
        )
