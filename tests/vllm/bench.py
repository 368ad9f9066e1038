"""`make bench-vllm`: the work of tests/benchmarks/bench_core.py done by kvtop and by vLLM, in one process and one run.

Each figure is the least CPU time of several runs with the garbage collector off; the two sides run in turns. kvtop
always appends its events. vLLM is measured without its KV events (its default) and with them. vLLM hashes with xxhash
over pickle, its fastest hash, and counts its statistics, as it does by default. ratio = theirs / ours.
"""

from __future__ import annotations

import gc
import json
import platform
from pathlib import Path
from time import process_time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.benchmarks import bench_core
from tests.benchmarks.bench_core import BLOCK, BLOCKS, TOKENS, least
from tests.vllm.terms import Setup
from tests.vllm.theirs import build, kv_config

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "vllm-core.json"
HASH = get_hash_fn_by_name("xxhash")
HASHER = get_request_block_hasher(BLOCK, HASH)
RUNNING = (1, 32, 256)


def request(tokens: list[int], name: str = "r", max_tokens: int = 16) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(name, tokens, params, None, block_hasher=HASHER)


def manager(blocks: int = BLOCKS, events: bool = False) -> KVCacheManager:
    return KVCacheManager(
        kv_config(blocks + 1, BLOCK),
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_kv_cache_events=events,
    )


def pool_figures() -> dict[str, float]:
    def fresh() -> tuple[BlockPool]:
        return (BlockPool(BLOCKS + 1, True, BLOCK),)

    def at_once(pool: BlockPool) -> None:
        pool.free_blocks(reversed(pool.get_new_blocks(BLOCKS)))

    def singly(pool: BlockPool) -> None:
        for _ in range(BLOCKS):
            pool.free_blocks(pool.get_new_blocks(1))

    def by_128(pool: BlockPool) -> None:
        held = [pool.get_new_blocks(128) for _ in range(BLOCKS // 128)]
        for blocks in held:
            pool.free_blocks(reversed(blocks))

    return {
        "pool of 100,001 blocks made": least(fresh),
        "100,000 blocks allocated and freed": least(at_once, fresh),
        "100,000 x (1 block allocated and freed)": least(singly, fresh, 3),
        "100,000 blocks as requests of 128": least(by_128, fresh),
    }


def manager_figures(events: bool) -> dict[str, float]:
    """With `events`, the events are taken from the pool, as vLLM does at each step."""
    count = len(TOKENS)

    def empty(blocks: int = BLOCKS) -> tuple[KVCacheManager, Request]:
        return manager(blocks, events), request(TOKENS)

    def stored(m: KVCacheManager, r: Request) -> None:
        assert m.allocate_slots(r, r.num_tokens) is not None
        m.take_events()

    def held() -> tuple[KVCacheManager, Request]:
        m, r = empty()
        stored(m, r)
        return m, r

    def freed() -> tuple[KVCacheManager, Request, Any, int]:
        m, r = held()
        m.free(r)
        again = request(TOKENS, "again")
        blocks, hit, _ = m.get_computed_blocks(again)
        return m, again, blocks, hit

    def full() -> tuple[KVCacheManager, Request]:
        m, r = empty(count // BLOCK)
        stored(m, r)
        m.free(r)
        return m, request([t ^ 1 for t in TOKENS], "other")

    def decoding() -> tuple[KVCacheManager, Request]:
        m, r = manager(events=events), request(TOKENS[:1000])
        stored(m, r)
        r.num_computed_tokens = 1000
        return m, r

    def decode(m: KVCacheManager, r: Request) -> None:
        for token in range(10_000):
            r.append_output_token_ids(token)
            m.allocate_slots(r, 1)
            r.num_computed_tokens += 1
            m.take_events()

    m, again, _, hit = freed()
    assert hit == (count - 1) // BLOCK * BLOCK
    stranger = request([1, *TOKENS[1:]], "stranger")

    def misses() -> None:
        for _ in range(1000):
            m.get_computed_blocks(stranger)

    return {
        "100,000 tokens hashed": least(lambda: request(TOKENS)),
        "100,000-token prompt looked up, all cached": least(lambda: m.get_computed_blocks(again)),
        "a look-up that misses at once": least(misses) / 1000,
        "100,000 new tokens allocated and stored": least(stored, empty),
        "6,249 hit blocks taken out of the queue": least(
            lambda m, r, blocks, hit: m.allocate_slots(r, count - hit, hit, blocks), freed
        ),
        "6,250 cached blocks freed": least(lambda m, r: m.free(r), held),
        "6,250 cached blocks evicted by new tokens": least(stored, full),
        "one decode token: append, slot, hash": least(decode, decoding) / 10_000,
    }


def step_figures(count: int, events: bool, steps: int = 200, runs: int = 3) -> tuple[float, float]:
    """Seconds of (schedule, commit) of a step in which `count` sequences of 200 tokens decode."""

    def output(plan: SchedulerOutput) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    best = float("inf"), float("inf")
    for _ in range(runs):
        setup = Setup(num_blocks=40_000, max_model_len=40_960, budget=65_536, max_num_seqs=256)
        scheduler = build(setup)
        pool = scheduler.kv_cache_manager.block_pool
        scheduler.kv_cache_manager.enable_kv_cache_events = pool.enable_kv_cache_events = events
        for i in range(count):
            scheduler.add_request(request([i, *TOKENS[1:200]], str(i), 30_000))
        schedule = commit = 0.0
        gc.collect()
        gc.disable()
        for step in range(-10, steps):
            begun = process_time()
            plan = scheduler.schedule()
            planned = process_time()
            out = output(plan)
            ready = process_time()
            scheduler.update_from_output(plan, out)
            done = process_time()
            if step >= 0:
                schedule, commit = schedule + planned - begun, commit + done - ready
        gc.enable()
        best = min(best[0], schedule / steps), min(best[1], commit / steps)
    return best


def main() -> None:
    kv_cache_utils.init_none_hash(HASH)
    gc.freeze()  # otherwise each collection visits all objects that vLLM has imported
    ours = bench_core.pool_figures()
    theirs = pool_figures()
    ours |= bench_core.paging_figures()
    theirs |= manager_figures(events=False)
    reported = manager_figures(events=True)
    for n in RUNNING:
        for figures, measured in (
            (ours, bench_core.step_figures(n)),
            (theirs, step_figures(n, events=False)),
            (reported, step_figures(n, events=True)),
        ):
            figures[f"schedule, {n} decoding"], figures[f"commit, {n} decoding"] = measured
    gc.unfreeze()
    rows = []
    print(f"Python {platform.python_version()}, least CPU time, ratio over 1: ours is faster\n")
    print(f"{'':46}{'ours':>11}{'vLLM 0.32.0':>15}{'ratio':>8}{'with events':>15}{'ratio':>8}")
    for work, mine in ours.items():
        row = {"work": work, "peer": "vllm 0.32.0", "ours": mine, "theirs": theirs[work], "unit": "s"}
        row |= {"ratio": round(theirs[work] / mine, 2), "target": 1.0}
        scale, unit = (1e3, "ms") if mine >= 0.5e-3 else (1e6, "us")
        line = f"{work:46}{mine * scale:8.2f} {unit}{theirs[work] * scale:12.2f} {unit}{row['ratio']:8.2f}"
        if work in reported:
            row |= {"with_events": reported[work], "ratio_with_events": round(reported[work] / mine, 2)}
            line += f"{reported[work] * scale:12.2f} {unit}{row['ratio_with_events']:8.2f}"
        print(line)
        rows.append(row)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
