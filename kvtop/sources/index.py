"""Index of a recording: where each batch lies in the file, and at which moment it happened.

Owns the file on the disk (a compressed one is unpacked into a temporary file without a name) and 32 bytes of memory a
batch. It is read in slices, so that nobody waits for a large file. Invariant: the first CHECKED_BATCHES are checked
when an Index is made, so a wrong file is refused at once; what is wrong further on ends the recording there.
"""

from __future__ import annotations

import os
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.events import Count, Duration, StepBatch
from kvtop.record.door import Door
from kvtop.record.recording import ClaimError, RecordingError, lines, open_recording, parse

CHECKED_BATCHES = 500


class _Head(msgspec.Struct):
    t: Duration
    seq: Count


class Index:
    """times: t of each batch that was found so far. whole: the end of the file was reached. problem: None, or why the
    recording ends early."""

    def __init__(self, path: Path) -> None:
        """Reads the first batches. Raises RecordingError if it is no recording or holds no batch."""
        self.path = path
        self.times = array("d")
        self.whole = False
        self.problem: str | None = None
        self.num_bytes = 0
        """What was read so far, unpacked."""
        self._places = array("q")  # offset, length and line number of each batch
        self._door = Door()
        self._kept: BinaryIO = tempfile.TemporaryFile(prefix="kvtop-")  # noqa: SIM115 (lives as long as the index)
        self._ahead = self._read()
        self.read_on(0.0, CHECKED_BATCHES)
        if not self.times:
            raise RecordingError(path, self.problem or "holds no batch of events")

    def __len__(self) -> int:
        return len(self.times)

    def read_on(self, seconds: float | None, batches: int = 0) -> None:
        """Go on for that long, and until that many batches are known; None: to the end of the file."""
        if self.whole:
            return
        end = None if seconds is None else time.perf_counter() + seconds
        checking = len(self.times) < CHECKED_BATCHES
        try:
            self.whole = self._go_on(end, batches)
            return
        except RecordingError as error:
            if checking and (error.line < 2 or not self.times or isinstance(error, ClaimError)):
                raise
            self.problem = str(error)
        except OSError as error:
            what = f"cannot be unpacked: {error.strerror or error} (set TMPDIR to a larger disk)"
            if checking:
                raise RecordingError(self.path, what) from None
            self.problem = str(RecordingError(self.path, what))
        self.whole = True

    def _go_on(self, end: float | None, batches: int) -> bool:
        """True at the end of the file."""
        try:
            for _ in self._ahead:
                known = len(self.times)
                if end is not None and known >= batches and known % 16 == 0 and time.perf_counter() > end:
                    return False
            return True
        finally:
            self._kept.flush()  # `batch` reads beneath this buffer

    def batch(self, i: int) -> StepBatch:
        """Batch i. Raises RecordingError."""
        offset, length, number = self._places[3 * i : 3 * i + 3]
        try:
            line = os.pread(self._kept.fileno(), length, offset)
        except OSError as error:
            raise RecordingError(self.path, f"cannot be read: {error.strerror or error}", number) from None
        return parse(self.path, number, line, self._door)

    def end_at(self, i: int, problem: str) -> None:
        """The recording ends before batch i, because that one is damaged."""
        self.problem, self.whole = problem, True
        del self.times[i:], self._places[3 * i :]

    def _read(self) -> Iterator[None]:
        """Takes in one line each time."""
        head = msgspec.json.Decoder(_Head)
        times, places = self.times, self._places
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
                self._kept.write(line)
                places.extend((self.num_bytes, len(line), number))
                times.append(at.t)
                self.num_bytes += len(line)
                yield
