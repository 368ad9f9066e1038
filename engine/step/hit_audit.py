"""Audit: computes one of N prefix hits again and compares, so that a running engine can prove its cache.

Owns the choice of hits (every Nth admission that read from the cache), what is still worth comparing once the step
is committed, and what follows from it. Blocks that a request of the same step published are written only then, and
those whose hash was dropped meanwhile prove nothing. A request that reads a block which is not what its tokens give
goes on computing wrong KV: it ends, and what it stored is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.errors import one_line
from engine.events import EngineError, Event, HitAudited
from engine.kv.paging import Paging
from engine.step.ending import Ending
from engine.step.flight import Flights
from engine.step.runner import ModelRunner
from engine.step.scheduler import Scheduler
from engine.step.sequence import Request, Sequence

_Hit = tuple[Sequence, list[int]]


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

    @property
    def reason(self) -> str:
        """What is wrong, with the numbers."""
        return (
            f"{len(self.bad)} of {len(self.blocks)} cached blocks do not hold what their tokens give "
            f"(off by {self.error:.2g}, at most {self.tolerance:.2g})"
        )


class Auditor:
    """`every` 0 audits nothing."""

    def __init__(
        self,
        every: int,
        paging: Paging,
        runner: ModelRunner,
        scheduler: Scheduler,
        ending: Ending,
        emit: Callable[[Event], None],
    ) -> None:
        self._every = every
        self._paging = paging
        self._pool = paging.pool
        self._runner = runner
        self._scheduler = scheduler
        self._ending = ending
        self._emit = emit
        self._seen = 0

    def examine(self, hits: list[_Hit], flights: Flights) -> None:
        """The hits of the step that was just committed or undone: report, and end who read bad blocks."""
        for verdict in self._verdicts(hits) if self._every else ():
            request = verdict.request
            if verdict.problem is not None:
                self._emit(EngineError(f"an audit could not run: {verdict.problem:.200}", request.request_id))
                continue
            if not verdict.blocks:
                continue
            self._emit(
                HitAudited(request.request_id, verdict.blocks, verdict.bad, verdict.error, verdict.tolerance)
            )
            if verdict.bad:
                self._emit(EngineError(f"audit: {verdict.reason}; they were dropped", request.request_id))
                self._convict(verdict, flights)

    def _convict(self, verdict: Verdict, flights: Flights) -> None:
        bad = set(verdict.bad)
        readers = [
            request
            for request in self._scheduler.running[:]
            if request is not verdict.request and any(not bad.isdisjoint(s.table) for s in request.branches)
        ]
        self._pool.unpublish(verdict.bad, None, "invalid")
        for reader in (verdict.request, *readers):
            if reader.branches:
                self._paging.invalidate(reader.branches[0], flights)
            if reader.finish_reason is None:
                self._ending.finish(reader, "error", verdict.reason)

    def _verdicts(self, hits: list[_Hit]) -> Iterator[Verdict]:
        due: list[_Hit] = []
        for hit in hits:
            self._seen += 1
            if self._seen % self._every == 0:
                due.append(hit)
        for seq, blocks in due:
            pairs = zip(blocks, seq.hashes, strict=False)
            kept = next((i for i, (b, h) in enumerate(pairs) if self._pool.hash_of(b) != h), len(blocks))
            if kept:
                yield self._judge(seq, blocks[:kept])

    def _judge(self, seq: Sequence, blocks: list[int]) -> Verdict:
        request = seq.request
        tokens = seq.tokens[: len(blocks) * self._pool.block_size]
        try:
            errors, tolerance = self._runner.audit(tokens, blocks)
        except Exception as error:  # no memory for the second copy, a kernel: the hit itself may be sound
            return Verdict(request, [], [], problem=one_line(error))
        bad = [b for b, e in zip(blocks, errors, strict=False) if not e <= tolerance]  # NaN is bad
        worst = max((e if e == e else float("inf") for e in errors), default=0.0)
        return Verdict(request, blocks[: len(errors)], bad, worst, tolerance)
