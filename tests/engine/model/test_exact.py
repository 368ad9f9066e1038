"""The whole engine in float64: the tokens of transformers' generate under chunking, cache hits, eviction,
preemption, forks and aborts, all at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from engine.event_log import EventLog
from engine.events import (
    BlocksCopied,
    BlocksEvicted,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepBatch,
)
from engine.files.model_config import ModelConfig
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.sequence import Request
from tests.engine.rig import fork
from tests.engine.tiny import CPU64, LLAMA3, QWEN2, QWEN3, Case

NEW = 20


def families(config: ModelConfig) -> list[list[int]]:
    """Prompts of two families that share prefixes of many lengths, and some that share nothing."""
    r = random.Random(config.architecture)
    trunks = [[r.randrange(config.vocab_size) for _ in range(90)] for _ in range(2)]
    shared = [t[:n] + [r.randrange(config.vocab_size) for _ in range(m)] for t in trunks for n, m in CUTS]
    return shared + [[r.randrange(config.vocab_size) for _ in range(n)] for n in (1, 16, 61)]


CUTS = ((16, 1), (32, 0), (33, 9), (64, 20), (90, 0), (90, 30))


@pytest.fixture(scope="module", params=[LLAMA3, QWEN2, QWEN3], ids=lambda c: c.architecture)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, 1 if request.param is not QWEN2 else 0, families(request.param), NEW)


class Run:
    """An EngineCore over the case's model, and what came out of it."""

    def __init__(self, case: Case, **knobs: object) -> None:
        config = replace(CPU64, **{"max_num_seqs": 8} | knobs)  # type: ignore[arg-type]
        self.case = case
        self.batches: list[StepBatch] = []
        ticks = count()
        log = EventLog(lambda: next(ticks) * 1e-3, self.batches.append)
        self.core = EngineCore(config, case.runner(config), log, hash_seed=1)
        self.requests: list[tuple[int, Request]] = []

    def add(self, i: int, tokens: int = NEW, **options: object) -> Request:
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = self.core.add_request(len(self.requests), self.case.prompts[i], params, **options)  # type: ignore[arg-type]
        self.requests.append((i, request))
        return request

    def finish(self, each: Callable[[], None] = lambda: None) -> None:
        """Steps to the end; every branch that was not aborted must say what transformers says."""
        for _ in range(20_000):
            if not self.core.has_work:
                break
            self.core.step()
            self.core.check()
            each()
        assert not self.core.has_work
        for i, request in self.requests:
            for branch in request.branches:
                got = list(branch.tokens[len(self.case.prompts[i]) :])
                assert got == self.case.tokens[i][: len(got)]
                assert (
                    len(got) == NEW
                    or request.finish_reason != "length"
                    or len(got) == request.params.max_tokens
                )

    def events(self, kind: type) -> list[object]:
        return [e for b in self.batches for e in b.events if isinstance(e, kind)]


@pytest.mark.parametrize("budget", [9, 40, 2048])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.conformance(100)
def test_all_prompts_twice(case: Case, budget: int, caching: bool) -> None:
    run = Run(case, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for _ in range(2):
        for i in range(len(case.prompts)):
            run.add(i)
    run.finish()
    hits = sum(e.hit_tokens for e in run.events(PrefixLookup))  # type: ignore[attr-defined]
    assert (hits > 500) is caching


@pytest.mark.conformance(100)
def test_a_pool_so_small_that_everything_is_evicted_and_preempted(case: Case) -> None:
    run = Run(case, num_blocks=19, max_num_batched_tokens=33)
    for _ in range(2):
        for i in range(len(case.prompts)):
            run.add(i)
    run.finish()
    assert len(run.events(RequestPreempted)) > 3
    assert len(run.events(BlocksEvicted)) > 10
    assert len(run.events(RequestFinished)) == 2 * len(case.prompts)


def test_forks_copy_and_go_on_alike(case: Case) -> None:
    run = Run(case, num_blocks=200, max_num_batched_tokens=50)
    r = random.Random(1)
    for i in range(len(case.prompts)):
        run.add(i)

    def now_and_then() -> None:
        running = [b for _, q in run.requests for b in q.branches if q.finish_reason is None]
        ready = [b for b in running if len(b.tokens) > len(b.request.prompt_token_ids)]
        if ready and r.random() < 0.2:
            fork(run.core, r.choice(ready))

    run.finish(now_and_then)
    assert run.events(BlocksCopied)


@pytest.mark.conformance(44, 100)
def test_aborts_and_resets_disturb_nobody(case: Case) -> None:
    run = Run(case, num_blocks=40, max_num_batched_tokens=25)
    r = random.Random(2)
    waiting = [i for i in range(len(case.prompts)) for _ in range(2)]
    r.shuffle(waiting)

    def disturb() -> None:
        if waiting and r.random() < 0.3:
            run.add(waiting.pop())
        if r.random() < 0.05:
            run.core.abort(r.randrange(len(run.requests)))
        if r.random() < 0.03:
            run.core.reset_prefix_cache(reset_running=True)

    run.add(waiting.pop())
    while waiting:
        run.finish(disturb)
        if waiting:
            run.add(waiting.pop())
    run.finish(disturb)
