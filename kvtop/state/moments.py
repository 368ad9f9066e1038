"""Moments: the lines of the event log, and what the map animates.

Owns the latest moments and how many there have been. Invariant: a moment is made after every other part has handled
the event, so it can say what the event changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from engine import events as ev
from kvtop.state.part import Part, takes
from kvtop.units import duration

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

MOST_MOMENTS = 4096
"""Moments that are kept, the newest."""


class Moment(NamedTuple):
    """One line.

    kind: queued, admitted, blocked, hit, forked, copied, stored, evicted, released, preempted, finished, cleared,
    profiled, graph, error, lost. ids: blocks in the event's order; (src, dst) for copied. hashes: those of evicted and
    stored blocks; the history has their text. detail: one line of text.
    """

    t: float
    seq: int
    kind: str
    ids: tuple[int, ...] = ()
    request_id: int | None = None
    detail: str = ""
    hashes: tuple[str, ...] = ()


class Moments(Part):
    """Iterates over the latest moments, oldest first."""

    __slots__ = ("_latest", "total")

    def __init__(self) -> None:
        self._latest: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self.total = 0
        """All moments so far. A reader that remembers this number knows how many are new."""

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._latest)

    def __reversed__(self) -> Iterator[Moment]:
        return reversed(self._latest)

    def __len__(self) -> int:
        return len(self._latest)

    def clear(self) -> None:
        """Forget the lines, but not their number."""
        self._latest.clear()

    def note(
        self,
        state: DashboardState,
        kind: str,
        ids: Iterable[int] = (),
        request_id: int | None = None,
        detail: str = "",
        hashes: Iterable[str] = (),
    ) -> None:
        """Add a line at the present time."""
        at = state.stream
        self._latest.append(Moment(at.t, at.seq, kind, tuple(ids), request_id, detail, tuple(hashes)))
        self.total += 1

    # ------------------------------------------------------------------------------------- blocks

    @takes(ev.BlocksTouched)
    def _touched(self, e: ev.BlocksTouched, state: DashboardState) -> None:
        kind = "hit" if e.why == "hit" else "forked"
        self.note(state, kind, e.ids, state.requests.of_sequence(e.seq_id))

    @takes(ev.BlocksCopied)
    def _copied(self, e: ev.BlocksCopied, state: DashboardState) -> None:
        request = state.requests.of_sequence(e.seq_id)
        self.note(state, "copied", (e.src, e.dst), request, f"{e.src}→{e.dst}")

    @takes(ev.BlocksReleased)
    def _released(self, e: ev.BlocksReleased, state: DashboardState) -> None:
        self.note(state, "released", e.ids, state.requests.of_sequence(e.seq_id))

    @takes(ev.BlocksStored)
    def _stored(self, e: ev.BlocksStored, state: DashboardState) -> None:
        self.note(state, "stored", e.ids, state.requests.of_sequence(e.seq_id), hashes=e.hashes)

    @takes(ev.BlocksEvicted)
    def _evicted(self, e: ev.BlocksEvicted, state: DashboardState) -> None:
        taken = e.why == "reallocated" and e.by_seq is not None
        request = state.requests.of_sequence(e.by_seq) if taken and e.by_seq is not None else None
        self.note(state, "evicted", e.ids, request, e.why, e.hashes)

    @takes(ev.CacheCleared)
    def _cleared(self, e: ev.CacheCleared, state: DashboardState) -> None:
        self.note(state, "cleared", [b for content in state.pool.lost for b in content.blocks])

    # ----------------------------------------------------------------------------------- requests

    @takes(ev.RequestQueued)
    def _queued(self, e: ev.RequestQueued, state: DashboardState) -> None:
        self.note(state, "queued", request_id=e.request_id)

    @takes(ev.AdmissionBlocked)
    def _blocked(self, e: ev.AdmissionBlocked, state: DashboardState) -> None:
        detail = f"{e.reason}: needs {e.need}, {e.free} free"
        self.note(state, "blocked", request_id=e.request_id, detail=detail)

    @takes(ev.RequestAdmitted)
    def _admitted(self, e: ev.RequestAdmitted, state: DashboardState) -> None:
        if e.request_id in state.requests:
            detail = "resumed" if e.resumed else ""
            self.note(state, "admitted", request_id=e.request_id, detail=detail)

    @takes(ev.RequestPreempted)
    def _preempted(self, e: ev.RequestPreempted, state: DashboardState) -> None:
        if e.request_id in state.requests:
            detail = f"{e.tokens_lost} tokens lost"
            self.note(state, "preempted", request_id=e.request_id, detail=detail)

    @takes(ev.RequestFinished)
    def _finished(self, e: ev.RequestFinished, state: DashboardState) -> None:
        if e.request_id in state.requests:
            self.note(state, "finished", request_id=e.request_id, detail=e.reason)

    # ------------------------------------------------------------------------------------- engine

    @takes(ev.EngineError)
    def _error(self, e: ev.EngineError, state: DashboardState) -> None:
        self.note(state, "error", request_id=e.request_id, detail=e.message)

    @takes(ev.KernelsProfiled)
    def _profiled(self, e: ev.KernelsProfiled, state: DashboardState) -> None:
        detail = f"{e.tokens:,} token{'s' * (e.tokens != 1)}: {duration(e.forward)}"
        if e.names:
            detail += f", longest {max(zip(e.seconds, e.names, strict=True))[1]}"
        self.note(state, "profiled", detail=detail)

    @takes(ev.GraphCaptured)
    def _graph(self, e: ev.GraphCaptured, state: DashboardState) -> None:
        how = f"captured in {duration(e.seconds)}" if e.graphs else "not captured, steps run without"
        self.note(state, "graph", detail=f"up to {e.bucket:,} sequence{'s' * (e.bucket != 1)}: {how}")
