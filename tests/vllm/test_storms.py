"""Random requests for both engines: with all listed differences switched off, every block is equal after every step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.vllm.differences import laid_over
from tests.vllm.storm import Disagreement, Pair, Storm, stampede
from tests.vllm.terms import Setup

STEPS = 320

# Of 20,000 random set-ups, the first ones that preempt a prompt after its turn, alone or with its readers.
ALONE = [
    87,
    143,
    192,
    306,
    552,
    784,
    838,
    910,
    946,
    996,
    1036,
    1101,
    1177,
    1283,
    1361,
    1452,
    1575,
    1607,
    1636,
]
TOGETHER = [209, 516, 976, 1207, 1555, 1704, 2182, 2698, 2758, 2791, 3063, 3064, 3252, 3412, 4220, 4256, 4320]


@pytest.mark.parametrize("seed", range(210))
def test_nothing_but_the_listed_differences_differs(seed: int) -> None:
    Storm(seed, laid_over()).run(STEPS)


@pytest.mark.parametrize("seed", [*range(20), *ALONE, *TOGETHER])
def test_a_prompt_preempted_after_its_turn_takes_the_same_others_along(seed: int) -> None:
    setup, arrivals = stampede(seed)
    pair = Pair(setup, laid_over())
    taken_along = False
    while arrivals or pair.ours.live():
        for ask in arrivals.pop(0) if arrivals else ():
            pair.add(ask)
        before = pair.ours.unwritten
        _, preempted = pair.step()
        taken_along |= pair.ours.unwritten > before and len(preempted) > 1
    assert (pair.ours.unwritten > 0) == (seed in ALONE + TOGETHER)
    assert taken_along == (seed in TOGETHER)
    assert all(pair.ours.answer_is_right(request) for request in pair.ours.answered())


def test_the_storms_go_everywhere_and_every_answer_is_right() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1020):
        storm = Storm(seed, laid_over())
        storm.run(STEPS)
        ours = storm.pair.ours
        seen += storm.seen
        seen["evicted"] += ours.evicted
        seen["unwritten"] += ours.unwritten
        seen["hits"] += ours.counts().hits
        seen["hits after preemption"] += ours.counts().preempted_hits
        seen["by priority"] += storm.setup.priority
        seen["with a watermark"] += storm.setup.watermark > 0
        assert all(ours.answer_is_right(request) for request in ours.answered())
    rare = {"refused": 40, "reset": 10, "unwritten": 5, "by priority": 5, "with a watermark": 5}
    often = {"admitted": 1000, "preempted": 100, "aborted": 100, "aborted inside a step": 100}
    hits = {"evicted": 1000, "hits": 1000, "hits after preemption": 100}
    assert all(seen[what] >= least for what, least in (rare | often | hits).items()), seen


@pytest.mark.parametrize("name", ["decodes first", "promises", "stores computed", "looks again"])
def test_the_comparison_sees_what_is_not_modelled(name: str) -> None:
    with pytest.raises(Disagreement):  # noqa: PT012
        for seed in range(60):
            Storm(seed, laid_over(without=name)).run(200)


def test_without_a_chunk_threshold_the_running_list_has_the_decodes_first_by_itself() -> None:
    setup = Setup(num_blocks=40, block_size=4, budget=64, max_num_seqs=6)
    for seed in range(10):
        Storm(seed, laid_over(without="decodes first"), setup).run(STEPS)
