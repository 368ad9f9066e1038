"""Random lives of both engines, equal block for block after every step once the listed differences are modelled."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.vllm.differences import models
from tests.vllm.storm import Disagreement, Storm
from tests.vllm.terms import Setup

STEPS = 320


@pytest.mark.parametrize("seed", range(210))
def test_nothing_but_the_listed_differences_differs(seed: int) -> None:
    Storm(seed, models=models()).run(STEPS)


def test_the_storms_go_everywhere_and_every_answer_is_right() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1020):
        storm = Storm(seed, models=models())
        storm.run(STEPS)
        ours = storm.pair.ours
        seen += storm.seen
        seen["evicted"] += ours.evicted
        seen["hits"] += ours.counts().hits
        seen["hits after preemption"] += ours.counts().preempted_hits
        assert all(ours.answer_is_right(request) for request in ours.answered())
    rare = {"refused": 50, "reset": 10, "aborted inside a step": 50, "hits after preemption": 100}
    often = {"admitted": 1000, "preempted": 100, "aborted": 100, "evicted": 1000, "hits": 1000}
    assert all(seen[what] >= least for what, least in (rare | often).items()), seen


@pytest.mark.parametrize("name", ["decodes first", "promises", "stores computed"])
def test_the_comparison_sees_what_is_not_modelled(name: str) -> None:
    with pytest.raises(Disagreement):  # noqa: PT012
        for seed in range(60):
            Storm(seed, models=models(without=name)).run(200)


def test_without_chunk_thresholds_and_tight_prompts_there_is_little_to_model() -> None:
    """First come, first served with whole budgets: the order of the running list is theirs."""
    setup = Setup(num_blocks=40, block_size=4, budget=64, max_num_seqs=6)
    for seed in range(10):
        Storm(seed, setup, models(without="decodes first")).run(STEPS)
