"""NaiveTwin: the memory of an engine without paging that gets the same requests.

Owns a calculated copy of the pool's memory. In it every running sequence reserves max_model_len tokens in one piece,
from its admission to its end, in the first gap that is long enough. A sequence without such a gap waits. A pure
function of the batches. Invariants: reservations never overlap; filled + inside + between + idle are all slots; a
preemption loses nothing here, since a reservation is never taken away.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from engine import events as ev
from kvtop.state.part import Part, takes

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class NaiveTwin(Part):
    """All figures are token slots or sequences after the last batch.

    All reservations have the same length. So every gap but the one at the end is a multiple of it, and the first gap
    that is long enough is the lowest free place.
    """

    __slots__ = (
        "_blocks",
        "_ended",
        "_free",
        "_fresh",
        "_gap",
        "_kept",
        "_requests",
        "_seq",
        "_tokens",
        "filled",
        "length",
        "place",
        "places",
        "slots",
        "waited",
        "waiting",
    )

    def __init__(self, slots: int = 0, length: int = 1) -> None:
        """slots: tokens that fit in the memory. length: tokens of a reservation."""
        self.slots, self.length = slots, length
        self.places = slots // length
        """Sequences that fit at once. 0: none ever fits."""
        self.place: dict[int, int] = {}
        """Sequence -> number of its reservation, which begins at slot number x length."""
        self.waiting: dict[int, None] = {}
        """Sequences that run in the engine but do not fit here, oldest first."""
        self.waited = 0
        """Number of sequences that have had to wait."""
        self.filled = 0
        """Reserved slots with a token."""
        self._free: list[int] = []
        self._fresh = 0
        self._tokens: dict[int, int] = {}
        self._requests: dict[int, list[int]] = {}
        """Request -> its sequences."""
        self._kept: set[int] = set()
        """Sequences that the engine has preempted. Here they keep their tokens while the engine computes them again."""
        self._blocks: dict[int, int] = {}
        self._ended: set[int] = set()
        self._seq = -1
        self._gap = False

    # ------------------------------------------------------------------------------------ reading

    @property
    def running(self) -> int:
        """Sequences that run in the engine, including preempted ones."""
        return len(self._tokens)

    @property
    def reserved(self) -> int:
        """Slots of all reservations."""
        return len(self.place) * self.length

    @property
    def inside(self) -> int:
        """Reserved slots without a token."""
        return self.reserved - self.filled

    @property
    def between(self) -> int:
        """Slots in gaps that are too short for a reservation."""
        return self.slots - self.places * self.length

    @property
    def idle(self) -> int:
        """Slots that another sequence could reserve."""
        return self.slots - self.reserved - self.between

    def tokens(self, seq_id: int) -> int:
        """Tokens that a sequence keeps, or would keep if it had a place."""
        return self._tokens[seq_id]

    # --------------------------------------------------------------------------------- the events

    def begin(self, batch: ev.StepBatch) -> None:
        """A batch begins. After a gap in the stream the next PoolSnapshot shows which sequences are left."""
        self._gap |= batch.seq != self._seq + 1
        self._seq = batch.seq

    def end(self) -> None:
        """The batch is over."""
        # No event reports the end of a single branch. It has ended if it released all blocks and was not preempted.
        while self._ended:
            self._leave(self._ended.pop())
        self._serve()

    @takes(ev.EngineStarted)
    def _started(self, e: ev.EngineStarted, state: DashboardState) -> None:
        fresh = NaiveTwin(e.num_blocks * e.block_size, max(1, e.max_model_len))
        fresh._seq, fresh._gap = self._seq, self._gap
        for name in NaiveTwin.__slots__:
            setattr(self, name, getattr(fresh, name))

    @takes(ev.RequestAdmitted)
    def _admitted(self, e: ev.RequestAdmitted, state: DashboardState) -> None:
        if e.seq_id not in self._tokens:  # else it resumes; its reservation is still here
            self._enter(e.seq_id, e.request_id, e.cached_tokens)

    @takes(ev.SequenceForked)
    def _forked(self, e: ev.SequenceForked, state: DashboardState) -> None:
        self._enter(e.child, e.request_id, self._tokens.get(e.parent, 0))

    @takes(ev.TokensSampled)
    def _sampled(self, e: ev.TokensSampled, state: DashboardState) -> None:
        self._compute(dict(zip(e.seq_ids, e.num_computed, strict=True)))

    @takes(ev.RequestPreempted)
    def _preempted(self, e: ev.RequestPreempted, state: DashboardState) -> None:
        known = [i for i in e.seq_ids if i in self._tokens]
        self._kept.update(known)
        self._ended.difference_update(known)

    @takes(ev.BeamPruned)
    def _pruned(self, e: ev.BeamPruned, state: DashboardState) -> None:
        self._leave(e.seq_id)

    @takes(ev.RequestFinished)
    def _finished(self, e: ev.RequestFinished, state: DashboardState) -> None:
        for seq_id in self._requests.pop(e.request_id, ()):
            self._leave(seq_id)

    @takes(ev.BlocksAllocated, ev.BlocksTouched)
    def _taken(self, e: ev.BlocksAllocated | ev.BlocksTouched, state: DashboardState) -> None:
        self._blocks[e.seq_id] = self._blocks.get(e.seq_id, 0) + len(e.ids)
        self._ended.discard(e.seq_id)

    @takes(ev.BlocksReleased)
    def _released(self, e: ev.BlocksReleased, state: DashboardState) -> None:
        left = self._blocks.get(e.seq_id, 0) - len(e.ids)
        if left > 0:
            self._blocks[e.seq_id] = left
            return
        self._blocks.pop(e.seq_id, None)
        self._ended.add(e.seq_id)

    @takes(ev.PoolSnapshot)
    def _snapshot(self, e: ev.PoolSnapshot, state: DashboardState) -> None:
        if not self._gap:
            return
        self._gap = False
        alive = dict(zip(e.seq_ids, e.computed, strict=True))
        self._blocks = {i: len(t) for i, t in zip(e.seq_ids, e.tables, strict=True)}
        for seq_id in [i for i in self._tokens if i not in alive and i not in self._kept]:
            self._leave(seq_id)
        self._compute(alive)

    # ------------------------------------------------------------------------------------- inside

    def _enter(self, seq_id: int, request_id: int, tokens: int) -> None:
        self._tokens[seq_id] = tokens
        self._requests.setdefault(request_id, []).append(seq_id)
        self.waiting[seq_id] = None
        self._serve()
        self.waited += seq_id in self.waiting

    def _leave(self, seq_id: int) -> None:
        tokens = self._tokens.pop(seq_id, None)
        if tokens is None:
            return
        self._kept.discard(seq_id)
        self.waiting.pop(seq_id, None)
        place = self.place.pop(seq_id, None)
        if place is not None:
            heappush(self._free, place)
            self.filled -= tokens

    def _compute(self, now: dict[int, int]) -> None:
        """Set how many tokens sequences keep."""
        for seq_id, computed in now.items():
            before = self._tokens.get(seq_id)
            if before is None:
                continue
            if seq_id in self._kept:
                if computed < before:
                    continue
                self._kept.discard(seq_id)
            self._tokens[seq_id] = computed
            if seq_id in self.place:
                self.filled += computed - before

    def _serve(self) -> None:
        """Give places to waiting sequences, in order of arrival."""
        while self.waiting and len(self.place) < self.places:
            seq_id = next(iter(self.waiting))
            del self.waiting[seq_id]
            if self._free:
                place = heappop(self._free)
            else:
                place = self._fresh
                self._fresh += 1
            self.place[seq_id] = place
            self.filled += self._tokens[seq_id]
