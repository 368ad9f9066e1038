"""What the engine reports about itself: start and end, steps, cache look-ups, and the text of its tokens.

Owns four small parts: EngineInfo, Steps, PrefixCache and Vocabulary. Invariant: a figure that no event has given yet is
None or absent, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import events as ev
from kvtop.state.part import Part, takes
from kvtop.state.pool_mirror import StateError

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

MOST_BLOCKS = 1 << 24
"""Most physical blocks; a stream with more is refused."""
MOST_ERRORS = 1000
"""The newest errors that are kept."""
UNKNOWN = b"\xef\xbf\xbd"
"""U+FFFD: the text of a token whose bytes the stream has not given."""


@dataclass(slots=True, eq=False)
class EngineInfo(Part):
    """Start, errors and end of the engine, and its device."""

    started: ev.EngineStarted | None = None
    loading: ev.ModelLoading | None = None
    stopped: ev.EngineStopped | None = None
    errors: list[ev.EngineError] = field(default_factory=list)
    device: ev.DeviceSample | None = None
    profile: ev.KernelsProfiled | None = None
    """The latest."""
    graphs: tuple[int, ...] = ()
    """Batch sizes for which decode steps run as CUDA graphs, ascending."""

    @takes(ev.ModelLoading)
    def _loading(self, e: ev.ModelLoading, state: DashboardState) -> None:
        self.loading = e

    @takes(ev.EngineStarted)
    def _started(self, e: ev.EngineStarted, state: DashboardState) -> None:
        if self.started is not None:
            raise StateError("a second EngineStarted")
        if not 2 <= e.num_blocks <= MOST_BLOCKS or e.block_size < 1:
            raise StateError(f"EngineStarted: {e.num_blocks} blocks of {e.block_size} tokens are impossible")
        self.started = e

    @takes(ev.EngineStopped)
    def _stopped(self, e: ev.EngineStopped, state: DashboardState) -> None:
        self.stopped = e

    @takes(ev.EngineError)
    def _error(self, e: ev.EngineError, state: DashboardState) -> None:
        self.errors.append(e)
        del self.errors[:-MOST_ERRORS]

    @takes(ev.DeviceSample)
    def _device(self, e: ev.DeviceSample, state: DashboardState) -> None:
        self.device = e

    @takes(ev.KernelsProfiled)
    def _profiled(self, e: ev.KernelsProfiled, state: DashboardState) -> None:
        counts = [n for _, *row in zip(e.names, e.calls, e.bytes, e.flops, strict=True) for n in row]
        times = [e.forward, *(s for _, s in zip(e.names, e.seconds, strict=True))]
        rates = [rate for rate in (e.bandwidth, e.peak) if rate is not None]
        if (
            min(counts, default=0) < 0
            or min(rates, default=1.0) < 1
            or not 0 <= min(times) <= max(times) < 1e6
        ):
            raise StateError("KernelsProfiled: impossible figures")
        self.profile = e

    @takes(ev.GraphCaptured)
    def _graph(self, e: ev.GraphCaptured, state: DashboardState) -> None:
        if e.graphs <= 1:
            self.graphs = ()
        if e.graphs:
            self.graphs = tuple(sorted({*self.graphs, e.bucket}))


@dataclass(slots=True, eq=False)
class Steps(Part):
    """The latest step, and sums over all steps."""

    scheduled: ev.StepScheduled | None = None
    completed: ev.StepCompleted | None = None
    output_tokens: int = 0
    drafts: int = 0
    """Draft tokens that were computed."""
    drafts_accepted: int = 0
    """Draft tokens that were accepted."""

    @takes(ev.StepScheduled)
    def _scheduled(self, e: ev.StepScheduled, state: DashboardState) -> None:
        self.scheduled = e

    @takes(ev.TokensSampled)
    def _sampled(self, e: ev.TokensSampled, state: DashboardState) -> None:
        self.output_tokens += sum(e.counts)

    @takes(ev.DraftVerified)
    def _verified(self, e: ev.DraftVerified, state: DashboardState) -> None:
        self.drafts += e.proposed
        self.drafts_accepted += e.accepted

    @takes(ev.StepCompleted)
    def _completed(self, e: ev.StepCompleted, state: DashboardState) -> None:
        self.completed = e


@dataclass(slots=True, eq=False)
class PrefixCache(Part):
    """What the first admissions of requests read from the cache, and what audits of hits found."""

    lookups: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    latest_lookup: int | None = None
    """The request of the latest look-up."""
    audited_hits: int = 0
    """Hits that the engine computed again."""
    audited_blocks: int = 0
    wrong_blocks: int = 0

    def hit_rate(self) -> float | None:
        """Hit tokens / prompt tokens, 0..1; None without look-ups."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    @takes(ev.PrefixLookup)
    def _looked_up(self, e: ev.PrefixLookup, state: DashboardState) -> None:
        if e.resumed:
            return
        self.lookups += 1
        self.query_tokens += e.prompt_tokens
        self.hit_tokens += e.hit_tokens
        self.latest_lookup = e.request_id

    @takes(ev.HitAudited)
    def _audited(self, e: ev.HitAudited, state: DashboardState) -> None:
        self.audited_hits += 1
        self.audited_blocks += len(e.blocks)
        self.wrong_blocks += len(e.bad)


@dataclass(slots=True, eq=False)
class Vocabulary(Part):
    """The bytes of each token that has occurred."""

    pieces: dict[int, bytes] = field(default_factory=dict)

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token, perhaps half a character. U+FFFD if the stream has not given them."""
        return self.pieces.get(token_id, UNKNOWN)

    def text(self, token_ids: Iterable[int]) -> str:
        """The tokens as text, with U+FFFD for what is not UTF-8."""
        pieces = self.pieces
        return b"".join([pieces.get(i, UNKNOWN) for i in token_ids]).decode("utf-8", "replace")

    @takes(ev.TokenPieces)
    def _learn(self, e: ev.TokenPieces, state: DashboardState) -> None:
        self.pieces.update(zip(e.ids, e.bytes, strict=True))
