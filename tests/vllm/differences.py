"""The complete list of intended differences from vLLM 0.32.0.

Each row says what kvtop does, what vLLM does and why. It also has a switch: a class over vLLM's Scheduler that
makes vLLM do what kvtop does. With all switches on, the storms find no other difference (test_storms.py).
With one switch off, the test of that difference shows it (test_differences.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm import models


@dataclass(frozen=True, slots=True)
class Difference:
    """ours, theirs: what each does. why: what kvtop gains. model: a class that makes vLLM do the same."""

    ours: str
    theirs: str
    why: str
    model: type[Scheduler]


DIFFERENCES = {
    "refuses": Difference(
        "the core refuses a request that can never fit the context or the pool, at once and with the numbers",
        "its front end refuses it, and a context larger than the pool at start; its scheduler "
        "takes every request",
        "there is one check for every caller, and a refusal says what to change",
        models.RefusesWhatNeverFits,
    ),
    "decodes first": Difference(
        "decodes get their token before running prompts get their chunks",
        "serves the running requests in the order of their admission",
        "on a CPU the budget shrinks as contexts grow; a request that already answers keeps its token",
        models.DecodesFirst,
    ),
    "goes on": Difference(
        "a request that had to preempt itself leaves the rest of the step to the others",
        "ends the running part of the step there",
        "otherwise requests that still fit lose a step for nothing",
        models.GoesOnAfterSelfPreemption,
    ),
    "promises": Difference(
        "blocks that running prompts still need are not given to a new request",
        "asks only whether the whole prompt of the new request fits now; reserves blocks for "
        "prompts only against remote loads",
        "otherwise two half-computed prompts that cannot both continue compute one of them twice",
        models.PromisesBlocks,
    ),
    "stores computed": Difference(
        "a block filled by a sampled token can be found once the step that wrote it is committed",
        "can be found as soon as it is scheduled",
        "a sampled or drafted token does not prove that its KV exists; only known prompts are "
        "shared within a step",
        models.StoresWhatWasComputed,
    ),
    "drops unwritten": Difference(
        "a preemption or abort before the forward also removes the hashes that the step stored ahead",
        "keeps them: a prompt that was preempted after its turn (by priority) comes back to blocks "
        "that no step wrote",
        "no look-up ever returns KV that was not written",
        models.DropsHashesOfUnwrittenKV,
    ),
    "looks again": Difference(
        "a running prompt looks up at each chunk what other requests have computed since",
        "looks up once, at the admission",
        "two long equal prompts that start together compute and hold their rest once, not twice",
        models.LooksAgain,
    ),
    "youngest copy": Difference(
        "if several blocks have one content, the latest takes over when the first is evicted",
        "the oldest of the others takes over",
        "the latest is usually also the last to be evicted",
        models.PromotesTheYoungestCopy,
    ),
    "usable blocks": Difference(
        "the watermark is a part of the usable blocks",
        "a part of all blocks, including the null block",
        "the option says how much stays free of what there is",
        models.KeepsAPartOfTheUsableBlocks,
    ),
    "whole without chunks": Difference(
        "without chunked prefill nothing cuts a prompt",
        "a long-prefill threshold still cuts it",
        "the option says that prompts are computed whole",
        models.NeverCutsWithoutChunks,
    ),
}


def laid_over(without: str | None = None) -> tuple[type[Scheduler], ...]:
    """All switches, or all except one."""
    return tuple(d.model for name, d in DIFFERENCES.items() if name != without)


def as_table() -> str:
    """The list as docs/beside-vllm.md shows it."""
    rows = [f"| {d.ours} | {d.theirs} | {d.why} |" for d in DIFFERENCES.values()]
    return "\n".join(["| ours | vLLM 0.32.0 | why |", "|---|---|---|", *rows])
