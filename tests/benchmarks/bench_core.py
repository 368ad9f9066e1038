"""Speed of pool, paging, scheduler and commit, compared with vLLM's core on exactly the same work.

    .venv/bin/python -m tests.benchmarks.bench_core [--json FILE]

Each figure is the least CPU time (process_time) of several runs with the garbage collector off. vLLM's figures were
measured the same way: BlockPool, KVCacheManager and Scheduler of vLLM 0.32.0 under Python 3.11 on two shared x86
cores, without a model. kvtop always emits an event for every move. vLLM emits events only for stores and evictions,
so those are compared with vLLM's events on. ratio = theirs / ours: above 1 kvtop is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.kv.hashing import extend_chain, root_hash
from engine.kv.paging import Paging
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.runner import Plan, StepOutput
from engine.step.sequence import Request, Sequence
from tests.engine.rig import Pool, new_flight
from tests.toy_runner import ToyRunner

BLOCK = 16
BLOCKS = 100_000
_random = random.Random(0)
TOKENS = [_random.randrange(151_936) for _ in range(100_000)]

THEIRS: dict[str, float] = {
    "pool of 100,001 blocks made": 26.1e-3,
    "100,000 blocks allocated and freed": 26.5e-3,
    "100,000 x (1 block allocated and freed)": 65.9e-3,
    "100,000 blocks as requests of 128": 27.5e-3,
    "100,000 tokens hashed": 7.0e-3,
    "100,000-token prompt looked up, all cached": 2.9e-3,
    "a look-up that misses at once": 1.7e-6,
    "100,000 new tokens allocated and stored": 16.3e-3,
    "6,249 hit blocks taken out of the queue": 0.85e-3,
    "6,250 cached blocks freed": 0.62e-3,
    "6,250 cached blocks evicted by new tokens": 29.7e-3,
    "one decode token: append, slot, hash": 3.7e-6,
    "schedule, 1 decoding": 20e-6,
    "schedule, 32 decoding": 201e-6,
    "schedule, 256 decoding": 1534e-6,
    "commit, 1 decoding": 11e-6,
    "commit, 32 decoding": 93e-6,
    "commit, 256 decoding": 828e-6,
}
"""Seconds. vLLM hashes with xxhash here, the faster of its two hash functions."""


def least(work: Callable[..., object], setup: Callable[[], tuple[Any, ...]] = tuple, runs: int = 7) -> float:
    """CPU seconds of the fastest of `runs`. Each run gets a fresh `setup()`."""
    best = float("inf")
    for _ in range(runs):
        args = setup()
        gc.collect()
        gc.disable()
        begun = process_time()
        work(*args)
        best = min(best, process_time() - begun)
        gc.enable()
    return best


def sequence(tokens: list[int]) -> Sequence:
    request = Request(0, tokens, SamplingParams(), 0.0)
    branch = Sequence(0, request)
    request.branches.append(branch)
    return branch


def start(paging: Paging, seq: Sequence) -> Sequence:
    """A sequence that was admitted with its cached blocks, scheduled as a whole, and computed."""
    flight = new_flight()
    paging.admit(seq, paging.lookup(seq), flight)
    assert paging.grow(seq, seq.num_computed, len(seq), flight)
    paging.publish(seq, len(seq), flight)
    seq.num_computed = len(seq)
    return seq


def pool_figures() -> dict[str, float]:
    """Works on blocks alone, without hashes."""

    def singly(pool: Pool) -> None:
        for _ in range(BLOCKS // 100):
            for _ in range(100):
                pool.release(0, pool.allocate(0, 1))
            pool.events.clear()  # as it is when the batch of a step is taken

    def by_128(pool: Pool) -> None:
        held = [pool.allocate(0, 128) for _ in range(BLOCKS // 128)]
        for ids in held:
            pool.release(0, ids[::-1])

    def fresh() -> tuple[Pool]:
        return (Pool(BLOCKS + 1, BLOCK),)

    return {
        "pool of 100,001 blocks made": least(fresh),
        "100,000 blocks allocated and freed": least(
            lambda p: p.release(0, p.allocate(0, BLOCKS)[::-1]), fresh
        ),
        "100,000 x (1 block allocated and freed)": least(singly, fresh, 3),
        "100,000 blocks as requests of 128": least(by_128, fresh),
    }


def paging_figures() -> dict[str, float]:
    """Works on one prompt of 100,000 tokens: hash, look up, store, hit, free, evict."""

    def hashed() -> None:
        extend_chain([], array("i", TOKENS), BLOCK, root_hash(1))

    def empty(blocks: int = BLOCKS) -> tuple[Paging, Sequence]:
        paging, seq = Paging(Pool(blocks + 1, BLOCK), 1), sequence(TOKENS)
        paging.queried(seq)  # vLLM hashes when the request is created, so this is not part of the measurement
        return paging, seq

    def stored(paging: Paging, seq: Sequence) -> None:
        flight = new_flight()
        paging.grow(seq, 0, len(seq), flight)
        paging.publish(seq, len(seq), flight)

    def held() -> tuple[Paging, Sequence]:
        paging, seq = empty()
        return paging, start(paging, seq)

    def freed() -> tuple[Paging, Sequence, list[int]]:
        paging, seq = held()
        paging.release(seq)
        again = sequence(TOKENS)
        return paging, again, paging.lookup(again)

    def full() -> tuple[Paging, Sequence]:
        paging, seq = empty(len(TOKENS) // BLOCK)
        paging.release(start(paging, seq))
        other = sequence([t ^ 1 for t in TOKENS])
        paging.queried(other)
        return paging, other

    def hit(paging: Paging, seq: Sequence, hits: list[int]) -> None:
        flight = new_flight()
        paging.admit(seq, hits, flight)
        paging.grow(seq, seq.num_computed, len(seq), flight)

    paging, again, _ = freed()
    stranger = sequence([1, *TOKENS[1:]])
    paging.queried(stranger)

    def misses() -> None:
        for _ in range(1000):
            paging.lookup(stranger)

    def decoding() -> tuple[Paging, Sequence]:
        paging, _ = empty()
        return paging, start(paging, sequence(TOKENS[:1000]))

    def decode(paging: Paging, seq: Sequence) -> None:
        flight = new_flight()
        for token in range(10_000):
            seq.tokens.append(token)
            paging.grow(seq, seq.num_computed, len(seq.tokens), flight)
            seq.num_computed += 1
            paging.publish(seq, seq.num_computed)

    return {
        "100,000 tokens hashed": least(hashed),
        "100,000-token prompt looked up, all cached": least(lambda: paging.lookup(again)),
        "a look-up that misses at once": least(misses) / 1000,
        "100,000 new tokens allocated and stored": least(stored, empty),
        "6,249 hit blocks taken out of the queue": least(hit, freed),
        "6,250 cached blocks freed": least(lambda p, s: p.release(s), held),
        "6,250 cached blocks evicted by new tokens": least(stored, full),
        "one decode token: append, slot, hash": least(decode, decoding) / 10_000,
    }


def step_figures(count: int, steps: int = 200, runs: int = 5) -> tuple[float, float]:
    """Seconds of (schedule, commit) of a step in which `count` sequences of 200 tokens decode."""

    def output(plan: Plan) -> StepOutput:
        return StepOutput([[7] if row.draws else [] for row in plan.rows])

    best = float("inf"), float("inf")
    for _ in range(runs):
        config = EngineConfig(max_num_batched_tokens=65_536, max_num_seqs=256)
        runner = ToyRunner(40_000, BLOCK, 151_936)
        core = EngineCore(config, runner, EventLog(perf_counter, lambda batch: None), hash_seed=1)
        params = SamplingParams(max_tokens=30_000, temperature=0, ignore_eos=True)
        for i in range(count):
            core.add_request(i, [i, *TOKENS[1:200]], params)
        schedule = commit = 0.0
        gc.collect()
        gc.disable()
        for step in range(-10, steps):
            begun = process_time()
            plan = core.begin()
            planned = process_time()
            assert plan is not None
            out = output(plan)
            ready = process_time()
            core.finish(plan, out)
            done = process_time()
            if step >= 0:
                schedule, commit = schedule + planned - begun, commit + done - ready
        gc.enable()
        best = min(best[0], schedule / steps), min(best[1], commit / steps)
    return best


def figures() -> list[dict[str, Any]]:
    """Rows of work, peer, ours, theirs, unit, ratio, target."""
    ours = pool_figures() | paging_figures()
    for count in (1, 32, 256):
        schedule, commit = step_figures(count)
        ours |= {f"schedule, {count} decoding": schedule, f"commit, {count} decoding": commit}
    return [
        {
            "work": work,
            "peer": "vllm 0.32.0",
            "ours": ours[work],
            "theirs": theirs,
            "unit": "s",
            "ratio": round(theirs / ours[work], 2),
            "target": 1.0,
        }
        for work, theirs in THEIRS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    path = parser.parse_args().json
    rows = figures()
    for row in rows:
        scale, unit = (1e3, "ms") if row["theirs"] >= 0.5e-3 else (1e6, "us")
        print(
            f"{row['work']:46}{row['ours'] * scale:9.2f} {unit}   vllm {row['theirs'] * scale:9.2f} {unit}"
            f"   x {row['ratio']:.2f}"
        )
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
