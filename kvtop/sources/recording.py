"""RecordingSource: a recording as a source that can be paused, stepped, sped up and sought in.

Owns the index of the file (where each batch lies, at which t) and the key-frames: copies of the state taken on the
way, further apart the longer the recording is, so that their memory is bounded. Invariant: the state after a seek is
exactly the state after applying the first n batches in order, whatever was done before. Batches are decoded when they
are needed, so an hour's recording does not have to fit into memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from engine.events import Count, Duration, ModelLoading, StepBatch
from kvtop.record.door import Door
from kvtop.record.recording import ClaimError, RecordingError, lines, open_recording, parse
from kvtop.state.dashboard import DashboardState

FRAME_BATCHES = 1000
"""Batches between key-frames at first: applying them takes longer than a key-frame's copy."""
MOST_FRAMES = 64
FRAME_MEMORY = 256 << 20
"""Bytes, roughly, that all key-frames may take; there are always four."""
MOST_PER_DRAIN = 2000
"""Batches handed out at once: at a high speed the clock waits rather than the screen."""
CHECKED_BATCHES = 500
"""Batches that are checked before anything is played: a wrong file is refused, as everywhere. What is wrong
further on ends the playback there, with its reason in the badge."""
SEEK_S = 0.2
"""Seconds of work that one call may spend on a long seek; the next calls go on."""
SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


class _Head(msgspec.Struct):
    t: Duration
    seq: Count


class RecordingSource:
    """Plays from the moment the engine had started. wall: monotonic seconds, for tests.

    problem: None, or why the recording ends early (it is played up to there).
    """

    def __init__(self, path: str | Path, *, wall: Callable[[], float] = time.monotonic) -> None:
        """Reads the index. Raises RecordingError if it is no recording or holds no batch."""
        self.path = Path(path).expanduser()
        self.problem: str | None = None
        self.paused = False
        self.speed = 1.0
        self._wall = wall
        self._door = Door()
        self._file, times, places = self._index()
        if not times:
            raise RecordingError(self.path, self.problem or "holds no batch of events")
        self._times = np.array(times)
        self._places = np.array(places, np.int64).reshape(-1, 3)  # offset, length, line number
        self._state = DashboardState()
        self._frames: list[tuple[int, DashboardState]] = []
        """(batches applied, a copy of the state), ascending."""
        self._spacing = FRAME_BATCHES
        self._at = 0
        """Batches handed out or applied so far."""
        self._target: int | None = None
        """Where a long seek still has to get."""
        self._origin = 0
        """Where it began."""
        self._t = self._start()
        self._since: float | None = None

    def attach(self, state: DashboardState) -> None:
        """`state` is moved in place by seek and step, and at once to where this source stands."""
        if self._at:
            state.restore(self._state)
        self._state = state

    @property
    def duration(self) -> float:
        """t of the last batch."""
        return float(self._times[-1]) if len(self._times) else 0.0

    @property
    def t(self) -> float:
        """The moment that is played, seconds on the batches' clock."""
        if self.paused or self._since is None or self._target is not None:
            return self._t
        return min(self.duration, self._t + (self._wall() - self._since) * self.speed)

    @property
    def place(self) -> str:
        """ "12.5 / 80.0 s ×2", for the badge."""
        speed = "" if self.speed == 1 else f" ×{self.speed:g}"
        what = f" {self.loading}" if self.loading else " ended" if self.ended else ""
        return f"{self.t:.1f} / {self.duration:.1f} s{speed}{what}"

    @property
    def loading(self) -> str:
        """ "LOADING 35 %" during a long seek, else ""."""
        if self._target is None:
            return ""
        part = (self._at - self._origin) / max(1, self._target - self._origin)
        return f"LOADING {int(100 * part)} %"

    @property
    def ended(self) -> bool:
        """Every batch was handed out."""
        return self._at == len(self._times)

    def start_at(self, t: float | None) -> None:
        """Begin here instead, seconds on the batches' clock; call before the first drain. The way there is as of
        a seek: the first drains go it, so that the screen does not wait for it."""
        if t is not None:
            t = max(float(self._times[0]), min(t, self.duration))
            self._restart(t)
            self._target = bisect_right(self._times, t)

    # ---------------------------------------------------------------------------------- playing

    def drain(self) -> list[StepBatch]:
        """The batches that are due at this moment."""
        if self._target is not None:
            self._go_on(SEEK_S)
            self._restart(self._t)
            return []
        self._keep_frame()
        if self._since is None:
            self._restart(self._t)
        now = self.t
        due = bisect_right(self._times, now) if not self.paused else self._at
        end = min(due, self._at + MOST_PER_DRAIN)
        out = []
        while self._at < end and (batch := self._next()) is not None:
            out.append(batch)
        end = self._at
        if end < due and end:
            self._restart(float(self._times[end - 1]))
        if self.ended and not self.paused:
            self._restart(self.duration)
            self.paused = True
        return out

    def pause(self) -> None:
        """Stand still."""
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
        """That many batches on, or back; then stands still."""
        self.paused = True
        here = self._at if self._target is None else self._target
        target = max(0, min(len(self._times), here + batches))
        self._jump(target, float(self._times[target - 1]) if target else float(self._times[0]), wait=False)

    def seek(self, t: float, *, wait: bool = False) -> None:
        """The state at t: all batches up to and with t applied. A long way takes more than one drain,
        unless `wait`. Outside the recording: its start or end."""
        t = max(float(self._times[0]), min(t, self.duration))
        self._jump(bisect_right(self._times, t), t, wait)

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
        for i in range(len(self._times)):
            try:
                loading = all(isinstance(e, ModelLoading) for e in self._batch(i).events)
            except RecordingError as error:
                if i == 0:
                    raise
                self.problem = str(error)
                break
            if not loading:
                return float(self._times[i])
        return float(self._times[0])

    def _next(self) -> StepBatch | None:
        """The batch at the present place, going on; None (the recording ends here) if it is damaged."""
        try:
            batch = self._batch(self._at)
        except RecordingError as error:
            self.problem = str(error)
            self._times, self._places = self._times[: self._at], self._places[: self._at]
            return None
        self._at += 1
        return batch

    def _batch(self, i: int) -> StepBatch:
        offset, length, number = (int(x) for x in self._places[i])
        try:
            line = os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            raise RecordingError(self.path, f"cannot be read: {error.strerror or error}", number) from None
        return parse(self.path, number, line, self._door)

    def _index(self) -> tuple[BinaryIO, list[float], list[int]]:
        """One pass: where the batches lie. A compressed file is unpacked into a nameless temporary one."""
        head = msgspec.json.Decoder(_Head)
        times: list[float] = []
        places: list[int] = []
        kept: BinaryIO = tempfile.TemporaryFile(prefix="kvtop-")  # noqa: SIM115 (lives as long as the source)
        offset = 0
        try:
            with open_recording(self.path) as file:
                for number, line in lines(self.path, file):
                    try:
                        at = head.decode(line)
                    except (msgspec.DecodeError, RecursionError, ValueError):
                        parse(self.path, number, line, self._door)  # says what is wrong
                        raise
                    if times and at.t < times[-1]:
                        raise RecordingError(self.path, f"t went back from {times[-1]} to {at.t}", number)
                    if len(times) < CHECKED_BATCHES:
                        parse(self.path, number, line, self._door)
                    times.append(at.t)
                    places += (offset, len(line), number)
                    kept.write(line)
                    offset += len(line)
            kept.flush()
        except RecordingError as error:
            if error.line < 2 or not times or isinstance(error, ClaimError):
                raise
            self.problem = str(error)
            kept.flush()
        except OSError as error:
            raise RecordingError(
                self.path, f"cannot be unpacked: {error.strerror or error} (set TMPDIR to a larger disk)"
            ) from None
        return kept, times, places
