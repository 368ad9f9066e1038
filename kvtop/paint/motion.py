"""Motion: marks over the true state for a moment, which never delay it.

Owns what flashes at an instant of the wall clock: the sweep of a hit (left to right over the prompt's
blocks, at most 400 ms, up to the first miss), evictions (600 ms), copies. It reads DashboardState's
moments and changes nothing. Invariant: with `still` (--no-motion) nothing moves, and a mark stays for a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState, Moment

SWEEP = 0.4
"""Longest sweep, seconds."""
PER_BLOCK = 0.025
"""Seconds a block of a short hit takes."""
FLASH = 0.15
"""How long a cell stays bright after the sweep has passed it."""
SETTLE = 1.2
"""How long a hit shows in pixels of many blocks."""
AFTERGLOW = 4.0
"""How long a hit stays marked at least, also if its request has finished by then."""
EVICTED = 0.6
COPIED = 1.5
STILL = 1.0
"""Length of every mark without motion."""
STALE = 0.5
"""Moments older than this when they are read (a seek, a stalled screen) start in the past."""

OVER = SWEEP + AFTERGLOW
"""The mark of an older moment has gone, but for the hit of a request that still runs."""

Ids = NDArray[np.intp]
_NONE: Ids = np.zeros(0, np.intp)


@dataclass(slots=True)
class Sweep:
    """A hit: `ids` in prompt order, lit one after the other from `start` on."""

    request_id: int
    ids: Ids
    start: float
    seconds: float
    gone: Ids = field(default_factory=lambda: _NONE)
    """Those of `ids` whose content was evicted since: what they hold now was not hit."""
    live: bool = True
    """The request still runs, so its hit blocks stay marked."""
    _members: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self._members = set(self.ids.tolist())

    def extend(self, ids: Ids) -> None:
        """More blocks were hit."""
        self.ids = np.concatenate((self.ids, np.setdiff1d(ids, self.ids)))
        self._members.update(ids.tolist())
        self.gone = np.setdiff1d(self.gone, ids)

    def evict(self, ids: set[int]) -> None:
        """These blocks lost their content. Most are not of this sweep, so that is found out without numpy."""
        if not self._members.isdisjoint(ids):
            self.gone = np.union1d(self.gone, np.array(sorted(self._members & ids), np.intp))

    def lit(self, wall: float) -> int:
        """Blocks that the sweep has reached."""
        n = len(self.ids)
        if self.seconds <= 0 or wall >= self.start + self.seconds:
            return n
        return min(n, max(0, int(n * (wall - self.start) / self.seconds) + 1))

    def reached(self, wall: float) -> Ids:
        """The blocks that the sweep has reached and that still hold what was hit."""
        return self._kept(self.ids[: self.lit(wall)])

    def _kept(self, ids: Ids) -> Ids:
        return ids[~np.isin(ids, self.gone)] if len(self.gone) else ids

    def flash(self, wall: float) -> Ids:
        """Blocks that are bright now."""
        n = len(self.ids)
        if self.seconds <= 0:
            return self._kept(self.ids) if wall < self.start + STILL else _NONE
        if wall >= self.start + self.seconds + FLASH:
            return _NONE
        back = int(n * (wall - FLASH - self.start) / self.seconds) + 1
        return self._kept(self.ids[max(0, back) : self.lit(wall)])

    def moving(self, wall: float) -> bool:
        """Frames differ without any new batch."""
        return wall < self.start + (self.seconds + FLASH if self.seconds > 0 else STILL)


class Motion:
    """Call `update` once a frame before the widgets paint."""

    def __init__(self, still: bool = False) -> None:
        self.still = still
        self.wall = 0.0
        self.sweeps: dict[int, Sweep] = {}
        self._evicted: dict[int, float] = {}
        self._copied: list[tuple[int, int, float]] = []
        self._seen = 0
        self._generation = -1

    def reset(self) -> None:
        """Forget all marks (the source jumped)."""
        self.sweeps.clear()
        self._evicted.clear()
        self._copied.clear()

    def update(self, state: DashboardState, wall: float) -> None:
        """Read the new moments; `wall` is a monotonic clock in seconds."""
        self.wall = wall
        if state.generation != self._generation:
            self.reset()
            self._generation, self._seen = state.generation, 0
        new = min(state.moments.total - self._seen, len(state.moments))
        self._seen = state.moments.total
        for moment in reversed(list(islice(reversed(state.moments), new))):
            age = state.t - moment.t
            if age > OVER and self._is_over(state, moment):
                continue
            self._start(state, moment, wall if age < STALE else wall - age)
        for sweep in self.sweeps.values():
            view = state.requests.get(sweep.request_id)
            sweep.live = view is not None and view.phase == "running"
        self.sweeps = {
            r: s for r, s in self.sweeps.items() if s.live or wall < s.start + s.seconds + AFTERGLOW
        }
        self._evicted = {b: until for b, until in self._evicted.items() if wall < until}
        self._copied = [c for c in self._copied if wall < c[2]]

    @staticmethod
    def _is_over(state: DashboardState, moment: Moment) -> bool:
        """An old moment whose mark has gone by now. After a long seek nearly all of them are such."""
        if moment.kind != "admitted" or moment.request_id is None:
            return moment.kind == "copied"
        view = state.requests.get(moment.request_id)
        return view is None or view.phase != "running"

    def _start(self, state: DashboardState, moment: Moment, start: float) -> None:
        ids, rid = moment.ids, moment.request_id
        if moment.kind == "admitted" and rid is not None:
            view = state.requests.get(rid)
            if view is not None and view.hit_ids and rid not in self.sweeps:
                seconds = 0.0 if self.still else min(SWEEP, PER_BLOCK * len(view.hit_ids))
                self.sweeps[rid] = Sweep(rid, np.asarray(view.hit_ids, np.intp), start, seconds)
        elif moment.kind == "hit" and rid in self.sweeps:  # found later by a running prefill: no second sweep
            self.sweeps[rid].extend(np.asarray(ids, np.intp))
        elif moment.kind == "evicted":
            blocks = {int(b) for b in ids}
            for sweep in self.sweeps.values():
                sweep.evict(blocks)
            until = start + (STILL if self.still else EVICTED)
            if self.wall < until:
                self._evicted.update(dict.fromkeys(blocks, until))
        elif moment.kind == "copied":
            self._copied.append((int(ids[0]), int(ids[1]), start + (STILL if self.still else COPIED)))

    # ------------------------------------------------------------------------ what is marked now

    def lit(self, request_id: int) -> int | None:
        """Hit blocks of this request that the sweep has reached; None once it is over."""
        sweep = self.sweeps.get(request_id)
        if sweep is None or self.wall >= sweep.start + sweep.seconds:
            return None
        return sweep.lit(self.wall)

    def hit(self) -> Ids:
        """Blocks read from the cache by requests that run (or ran a moment ago), as far as swept."""
        return _together(s.reached(self.wall) for s in self.sweeps.values())

    def fresh(self) -> Ids:
        """The part of `hit` that shows in pixels of many blocks, which cannot glow."""
        return _together(
            s.reached(self.wall) for s in self.sweeps.values() if self.wall < s.start + s.seconds + SETTLE
        )

    def flash(self) -> Ids:
        """Blocks that the sweep passes right now."""
        return _together(s.flash(self.wall) for s in self.sweeps.values())

    def evicted(self) -> Ids:
        """Blocks that lost their content a moment ago."""
        return np.fromiter(self._evicted, np.intp, len(self._evicted))

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, copy) of copies a moment ago, oldest first."""
        return [(src, dst) for src, dst, _ in self._copied]

    @property
    def moving(self) -> bool:
        """A sweep runs: the clock should tick at its fast rate."""
        return not self.still and any(s.moving(self.wall) for s in self.sweeps.values())

    @property
    def standing(self) -> bool:
        """Some mark will end by itself: frames are needed although no batch comes."""
        wall = self.wall
        return bool(self._evicted or self._copied) or any(
            s.moving(wall) or wall < s.start + s.seconds + AFTERGLOW for s in self.sweeps.values()
        )


def _together(parts: Iterable[Ids]) -> Ids:
    found = list(parts)
    return np.concatenate(found) if found else _NONE
