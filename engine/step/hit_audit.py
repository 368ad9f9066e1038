"""Audit: computes one of N prefix hits again and compares, so that a running engine can prove its cache.

Owns the choice of hits (every Nth admission that read from the cache) and what is still worth comparing once
the step is committed: blocks that a request of the same step published are written only then, and those
whose hash was dropped meanwhile prove nothing. Changes nothing; the core tells the verdict and acts on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from engine.kv.blocks import BlockPool
from engine.step.runner import ModelRunner
from engine.step.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class _Hit:
    seq: Sequence
    blocks: list[int]
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """blocks: of the hit, as far as they were compared; bad: those over the tolerance; error: the largest one,
    relative; problem: why nothing could be compared."""

    request: Request
    blocks: list[int]
    bad: list[int]
    error: float = 0.0
    tolerance: float = 0.0
    problem: str | None = None


class Auditor:
    """`every` 0 audits nothing."""

    def __init__(self, every: int, pool: BlockPool, runner: ModelRunner) -> None:
        self._every = every
        self._pool = pool
        self._runner = runner
        self._seen = 0
        self._due: list[_Hit] = []

    def note(self, hits: list[tuple[Sequence, list[int]]]) -> None:
        """The hits of the step that was just scheduled."""
        for seq, blocks in hits if self._every else ():
            self._seen += 1
            if self._seen % self._every == 0:
                tokens = seq.tokens[: len(blocks) * self._pool.block_size]
                self._due.append(_Hit(seq, blocks, tokens))

    def verdicts(self) -> Iterator[Verdict]:
        """Of the hits noted in the step that was just committed or undone."""
        due, self._due = self._due, []
        for hit in due:
            pairs = zip(hit.blocks, hit.seq.hashes, strict=False)
            kept = next((i for i, (b, h) in enumerate(pairs) if self._pool.hash_of(b) != h), len(hit.blocks))
            blocks = hit.blocks[:kept]
            if blocks:
                yield self._judge(hit, blocks)

    def _judge(self, hit: _Hit, blocks: list[int]) -> Verdict:
        request = hit.seq.request
        try:
            errors, tolerance = self._runner.audit(hit.tokens[: len(blocks) * self._pool.block_size], blocks)
        except Exception as error:  # no memory for the second copy, a kernel: the hit itself may be sound
            return Verdict(request, [], [], problem=f"{type(error).__name__}: {error}")
        bad = [b for b, e in zip(blocks, errors, strict=False) if not e <= tolerance]  # NaN is bad
        worst = max((e if e == e else float("inf") for e in errors), default=0.0)
        return Verdict(request, blocks[: len(errors)], bad, worst, tolerance)
