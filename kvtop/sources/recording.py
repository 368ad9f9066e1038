"""RecordingSource: a recording as a source that can be paused, stepped, sped up and sought in.

Owns the moment that is played and the key-frames: copies of the state taken on the way, further apart the longer the
recording is, so that their memory is bounded. Invariant: the state after a seek is exactly the state after applying the
first n batches in order, whatever was done before. Batches are decoded when they are needed, so an hour's recording
does not have to fit into memory. Long work (reading the index, a long seek) is done in slices, one a call of `drain`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from engine.events import ModelLoading, StepBatch
from kvtop.record.recording import RecordingError
from kvtop.sources.index import Index
from kvtop.sources.source import Loading, Transport
from kvtop.state.dashboard import DashboardState

FRAME_BATCHES = 1000
"""Batches between key-frames at first: applying them takes longer than a key-frame's copy."""
MOST_FRAMES = 64
FRAME_MEMORY = 256 << 20
"""Bytes, roughly, that all key-frames may take; there are always four."""
MOST_PER_DRAIN = 2000
"""Batches handed out at once: at a high speed the clock waits rather than the screen."""
OPEN_S = 0.1
"""Seconds that opening may spend on the index; the first drains read the rest of it."""
SEEK_S = 0.2
"""Seconds of work that one call may spend on a long seek; the next calls go on."""
SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


class RecordingSource:
    """Plays from the moment the engine had started. wall: monotonic seconds, for tests."""

    def __init__(self, path: str | Path, *, wall: Callable[[], float] = time.monotonic) -> None:
        """Raises RecordingError if it is no recording or holds no batch."""
        self.paused = False
        self.speed = 1.0
        self._wall = wall
        self._index = Index(Path(path).expanduser())
        self._index.read_on(OPEN_S)
        self._state = DashboardState()
        self._frames: list[tuple[int, DashboardState]] = []
        """(batches applied, a copy of the state), ascending."""
        self._spacing = FRAME_BATCHES
        self._at = 0
        """Batches handed out or applied so far."""
        self._target: int | None = None
        """Where a long seek has to get to."""
        self._origin = 0
        """Where it began."""
        self._later: list[Callable[[], None]] = []
        """Jumps that wait for the index, or for the first drain."""
        self._t = self._start()
        self._since: float | None = None

    def attach(self, state: DashboardState) -> None:
        """`state` is changed in place by seek and step, and now to the moment where this source is."""
        if self._at:
            state.restore(self._state)
        self._state = state

    @property
    def transport(self) -> Transport:
        """This source can be driven."""
        return self

    @property
    def problem(self) -> str | None:
        """Why the recording ends early (it is played up to there), or None."""
        return self._index.problem

    @property
    def duration(self) -> float:
        """t of the last batch, as far as the index was read."""
        return self._index.times[-1] if len(self._index) else 0.0

    @property
    def t(self) -> float:
        """The moment that is played, seconds on the batches' clock."""
        if self.paused or self._since is None or self._is_loading:
            return self._t
        return min(self.duration, self._t + (self._wall() - self._since) * self.speed)

    @property
    def place(self) -> str:
        """ "12.5 / 80.0 s ×2", for the badge."""
        whole = f" / {self.duration:.1f}" if self._index.whole else ""
        speed = "" if self.speed == 1 else f" ×{self.speed:g}"
        loading = self.loading
        what = f" {loading.badge}" if loading is not None else " ended" if self.ended else ""
        return f"{self.t:.1f}{whole} s{speed}{what}"

    @property
    def _is_loading(self) -> bool:
        return self._target is not None or bool(self._later) or not self._index.whole

    @property
    def loading(self) -> Loading | None:
        """How far a long seek, or the reading of the file's index, is."""
        if not self._is_loading:
            return None
        if not self._index.whole:
            done = f"{self._index.num_bytes / 1e6:.0f} MB"
            return Loading(f"READING {done}", f"reading the recording: {done} so far")
        way = 0 if self._target is None else self._target - self._origin
        done = f"{100 * (self._at - self._origin) // max(1, way) if way else 0} %"
        return Loading(f"LOADING {done}", f"going to {self._t:,.1f} s of the recording: {done} of the way")

    @property
    def ended(self) -> bool:
        """Every batch was handed out."""
        return self._index.whole and self._at == len(self._index)

    def start_at(self, t: float | None) -> None:
        """Begin here instead, seconds on the batches' clock; call before the first drain. The first drains go there,
        as after a seek, so that the screen does not wait for it."""
        if t is not None:
            self._do_later(partial(self.seek, t), max(self._index.times[0], t))

    # ---------------------------------------------------------------------------------- playing

    def drain(self) -> list[StepBatch]:
        """The batches that are due at this moment."""
        if self._is_loading:
            self._load()
            return []
        self._keep_frame()
        if self._since is None:
            self._restart(self._t)
        now = self.t
        due = bisect_right(self._index.times, now) if not self.paused else self._at
        end = min(due, self._at + MOST_PER_DRAIN)
        out = []
        while self._at < end and (batch := self._next()) is not None:
            out.append(batch)
        end = self._at
        if end < due and end:
            self._restart(self._index.times[end - 1])
        if self.ended and not self.paused:
            self._restart(self.duration)
            self.paused = True
        return out

    def pause(self) -> None:
        """Let time stand."""
        self._t, self.paused = self.t, True

    def play(self) -> None:
        """Go on; from the start, if it had ended."""
        if self.paused:
            self.paused = False
            self._restart(self._t)
            if self.ended:
                self.seek(self._start())

    def toggle(self) -> None:
        """Pause or play."""
        if self.paused:
            self.play()
        else:
            self.pause()

    def set_speed(self, speed: float) -> None:
        """Recorded seconds per second, over 0."""
        self._restart(self.t)
        self.speed = speed

    def change_speed(self, direction: int) -> None:
        """The next faster (1) or slower (-1) of SPEEDS."""
        near = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        self.set_speed(SPEEDS[max(0, min(len(SPEEDS) - 1, near + direction))])

    # ---------------------------------------------------------------------------------- jumping

    def step(self, batches: int = 1) -> None:
        """That many batches on, or back; then it pauses."""
        self._t, self.paused = self.t, True
        if not self._index.whole:
            self._do_later(partial(self.step, batches), self._t)
            return
        here, times = self._at if self._target is None else self._target, self._index.times
        target = max(0, min(len(times), here + batches))
        self._jump(target, times[target - 1] if target else times[0], wait=False)

    def seek(self, t: float, *, wait: bool = False) -> None:
        """The state at t: all batches up to and with t applied. A long way takes more than one drain,
        unless `wait`. Outside the recording: its start or end."""
        if wait:
            self._index.read_on(None)
            self._later.clear()
        times = self._index.times
        if not self._index.whole:
            self._do_later(partial(self.seek, t), max(times[0], t))
            return
        t = max(times[0], min(t, times[-1]))
        self._jump(bisect_right(times, t), t, wait)

    def _do_later(self, jump: Callable[[], None], t: float) -> None:
        self._later.append(jump)
        self._restart(t)

    def _load(self) -> None:
        """A slice of what takes long: the index first, then the jumps that waited for it, then the way."""
        if not self._index.whole:
            self._index.read_on(SEEK_S)
        elif self._later:
            jumps, self._later = self._later, []
            for jump in jumps:
                jump()
        else:
            self._go_on(SEEK_S)
        self._restart(self._t)

    def _jump(self, target: int, t: float, wait: bool) -> None:
        self._restart(t)
        frames = [f for f in self._frames if f[0] <= target]
        best = frames[-1] if frames else None
        applied = self._state.stream.num_batches
        if applied != self._at:  # drained, but the owner threw batches away: start from what is known
            best = best or (0, DashboardState())
        if best is not None and (target < self._at or best[0] > self._at or applied != self._at):
            self._at = best[0]
            self._state.restore(best[1])
        elif target < self._at:
            self._at = 0
            self._state.restore(DashboardState())
        self._target, self._origin = target, self._at
        self._go_on(None if wait else SEEK_S)

    def _go_on(self, budget: float | None) -> None:
        end = None if budget is None else time.perf_counter() + budget
        assert self._target is not None
        while self._at < self._target:
            batch = self._next()
            if batch is None:
                break
            self._state.apply(batch)
            self._keep_frame()
            if end is not None and self._at % 16 == 0 and time.perf_counter() > end:
                return
        self._target = None

    def _keep_frame(self) -> None:
        """A key-frame of the attached state, if one is due and the state is where we are."""
        at, frames = self._at, self._frames
        if not at or self._state.stream.num_batches != at:
            return
        place = bisect_right(frames, at, key=lambda f: f[0])
        before = frames[place - 1][0] if place else 0
        if before == at:
            return
        if at - before < self._spacing:
            return
        frames.insert(place, (at, self._state.copy()))
        if len(frames) > max(4, min(MOST_FRAMES, FRAME_MEMORY // self._state.weight())):
            self._spacing *= 2
            del frames[::2]

    # ----------------------------------------------------------------------------------- inside

    def _restart(self, t: float) -> None:
        self._t, self._since = t, self._wall()

    def _start(self) -> float:
        """t of the first batch that is more than loading."""
        index = self._index
        for i in count():
            if i == len(index) and not index.whole:
                index.read_on(OPEN_S)
            if i == len(index):
                break
            try:
                loading = all(isinstance(e, ModelLoading) for e in index.batch(i).events)
            except RecordingError as error:
                if i == 0:
                    raise
                index.end_at(i, str(error))
                break
            if not loading:
                return index.times[i]
        return index.times[0]

    def _next(self) -> StepBatch | None:
        """The batch at the present place, going on; None (the recording ends here) if it is damaged."""
        try:
            batch = self._index.batch(self._at)
        except RecordingError as error:
            self._index.end_at(self._at, str(error))
            return None
        self._at += 1
        return batch
