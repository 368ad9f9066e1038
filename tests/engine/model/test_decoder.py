"""The decoder against transformers: float64 logits and tokens, whatever the chunking, batch and blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.files.model_config import ModelConfig
from tests.engine.tiny import CPU64, MODELS, Case, Driver

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 100)
NEW = 12


SEEDS = {"qwen3-yarn": 1}


def random_prompts(config: ModelConfig) -> list[list[int]]:
    r = random.Random(config.architecture)
    return [[r.randrange(config.vocab_size) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(
        MODELS[request.param], SEEDS.get(request.param, 0), random_prompts(MODELS[request.param]), NEW
    )


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17, 1000])
def test_tokens_are_those_of_generate_whatever_the_chunking(case: Case, chunk: int) -> None:
    assert Driver(case.runner(), seed=chunk).generate(case.prompts, NEW, chunk) == list(case.tokens)


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_tokens_are_those_of_generate_whatever_the_blocks(case: Case, block_size: int) -> None:
    runner = case.runner(replace(CPU64, block_size=block_size, num_blocks=2048 // block_size))
    with torch.inference_mode():
        runner.cache.fill_(float("nan"))  # what was never written must never be read
    assert Driver(runner, seed=1).generate(case.prompts, NEW, 20, batch=3) == list(case.tokens)


def test_logits_are_those_of_transformers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def record(logits: torch.Tensor, rows: Any) -> tuple[list[int], list[int]]:
        seen.append(logits)
        return logits.argmax(-1).tolist(), []

    runner = case.runner()
    monkeypatch.setattr(runner.model.ops, "sample", record)
    Driver(runner).generate(case.prompts[-1:], NEW, 32)
    # transformers computes its norms in float32 whatever the dtype, we do not: hence not 1e-12.
    torch.testing.assert_close(
        torch.cat([s for s in seen if len(s)]).float(), case.logits[-1], rtol=0, atol=1e-4
    )


def test_float32_gives_the_same_tokens(case: Case) -> None:
    for ops in ("reference", "cpu"):
        runner = case.runner(replace(CPU64, dtype="float32", ops=ops))
        assert Driver(runner).generate(case.prompts, NEW, 33) == list(case.tokens), ops


def test_computing_again_after_a_preemption_changes_nothing(case: Case) -> None:
    driver = Driver(case.runner(), seed=5)
    seqs = [driver.add(p) for p in case.prompts]
    preempt = random.Random(5)
    while todo := [s for s in seqs if len(s) < s.request.prompt_tokens + NEW]:
        driver.step(9, todo)
        victim = preempt.choice(todo)
        if preempt.random() < 0.2:
            driver.drop(victim, forget=False)
    assert [list(s.tokens[-NEW:]) for s in seqs] == list(case.tokens)
