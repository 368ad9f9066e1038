"""Where we differ from vLLM 0.32.0 on purpose: the whole list.

Each row says what ours does, what theirs does and why, and carries the switch that models it: a class
over vLLM's Scheduler that does the same there. With all of them laid over it the storms find nothing else
that differs (test_storms.py); without one of them its own test shows the difference (test_differences.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm import models


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
        models.RefusesWhatNeverFits,
    ),
    "decodes first": Difference(
        "decodes take their token before running prompts take their chunks",
        "goes through the running requests as they were admitted",
        "on a CPU the budget shrinks as contexts grow: whoever answers keeps its token",
        models.DecodesFirst,
    ),
    "goes on": Difference(
        "a request that had to preempt itself leaves the rest of the step to the others",
        "ends the running part of the step there",
        "those who still fit lose a step for nothing",
        models.GoesOnAfterSelfPreemption,
    ),
    "promises": Difference(
        "blocks that running prompts still need are not given to an admission",
        "asks only that the newcomer's whole prompt fits now; reserves for prompts only against remote loads",
        "two half-computed prompts that cannot both go on compute one of them twice",
        models.PromisesBlocks,
    ),
    "stores computed": Difference(
        "a block that a sampled token filled is findable from the commit of the step that wrote it",
        "is findable from its scheduling",
        "a token that was sampled, or drafted, is no proof of its KV; only known prompts are shared in a step",
        models.StoresWhatWasComputed,
    ),
    "drops unwritten": Difference(
        "a preemption or abort before the forward takes the hashes with it that the step stored ahead",
        "keeps them: a prompt preempted after its turn (by priority) comes back to blocks that nothing wrote",
        "no look-up ever returns KV that was not written",
        models.DropsHashesOfUnwrittenKV,
    ),
    "looks again": Difference(
        "a running prompt asks the cache at each chunk for what others have computed since",
        "asks once, at the admission",
        "two long equal prompts that start together compute and hold their rest once, not twice",
        models.LooksAgain,
    ),
    "youngest copy": Difference(
        "of several blocks with one content the latest takes over when the first is evicted",
        "the oldest left takes over",
        "the latest is usually also the last to be evicted",
        models.PromotesTheYoungestCopy,
    ),
    "usable blocks": Difference(
        "the watermark is a part of the blocks that can be used",
        "of all, the null block included",
        "the knob says what stays free of what there is",
        models.KeepsAPartOfTheUsableBlocks,
    ),
    "whole without chunks": Difference(
        "without chunked prefill nothing cuts a prompt",
        "a long-prefill threshold does",
        "the knob says that prompts are computed whole",
        models.NeverCutsWithoutChunks,
    ),
}


def laid_over(without: str | None = None) -> tuple[type[Scheduler], ...]:
    """All switches, or all but one."""
    return tuple(d.model for name, d in DIFFERENCES.items() if name != without)


def as_table() -> str:
    """The list as it stands in the README."""
    rows = [f"| {d.ours} | {d.theirs} | {d.why} |" for d in DIFFERENCES.values()]
    return "\n".join(["| ours | vLLM 0.32.0 | why |", "|---|---|---|", *rows])
