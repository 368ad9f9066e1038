"""Recorder: writes a stream of batches to a file, in a separate thread.

Owns the queue between the engine and the disk, and the file while it is written. The engine only puts batches into a
queue of limited length. A full or blocked disk ends the recording, not the engine, and is reported once. The file then
has no closing PoolSnapshot and EngineStopped, so every reader sees that it is truncated. Invariant: a file that has
contents, or that another process writes, is never changed.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import queue
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from engine.events import POOL_EVENTS, EngineStarted, PoolSnapshot, StepBatch, encode_batch
from kvtop.record.recording import RecordingError, header_line
from kvtop.record.redact import Redactor

KEY_FRAME_S = 5.0
"""Seconds on the batches' clock between the snapshots that the recorder asks for."""
HASHES_A_BATCH = 8
"""For this many hashes in the last snapshot, one batch must come before the next. Snapshots are then about half of the
file."""
FLUSH_S = 0.5
"""Seconds between flushes to the system, so that a crash loses little."""
CAPACITY = 8192
"""Batches that may wait for the disk: over a minute of a busy engine."""


class Recorder:
    """A sink for Engine.subscribe. Call `close` after the engine has stopped.

    request_snapshot: the engine's method; it is called every 5 s of `t` if the pool has changed. on_problem: called
    once, in the writer's thread, with one line, if the recording ends early.
    """

    def __init__(
        self,
        path: str | Path,
        redact: bool = False,
        *,
        request_snapshot: Callable[[], None] | None = None,
        on_problem: Callable[[str], None] | None = None,
        capacity: int = CAPACITY,
        patient: bool = False,
    ) -> None:
        """A name that ends with `.gz` is compressed. patient: the engine waits for the disk (for simulated time).

        Raises RecordingError if the file cannot be created or exists. A device, a pipe or an empty file may exist.
        """
        self.path = Path(path).expanduser()
        self.failed: str | None = None
        """Why the recording ended early, in one line; None if it did not."""
        self.batches = 0
        self._started = False
        """EngineStarted was written."""
        self._redact = Redactor() if redact else None
        self._request_snapshot = request_snapshot
        self._on_problem = on_problem
        self._patient = patient
        self._queue: queue.Queue[StepBatch | None] = queue.Queue(capacity)
        self._changed = False
        self._last_snapshot: float | None = None
        self._taken = self._taken_then = 0
        """Batches so far, and batches at the last snapshot."""
        self._spacing = 0
        self._flushed = 0.0
        try:
            descriptor, self._made = _opened(self.path)
            self._raw = os.fdopen(descriptor, "wb", buffering=1 << 16)
            # The fastest level saves three quarters of what the best level saves, in a fifth of its time.
            self._zip = gzip.GzipFile("", "wb", 1, self._raw, 0) if self.path.suffix == ".gz" else None
            self._file.write(header_line())
            self._flush()
        except OSError as error:
            raise RecordingError(self.path, f"cannot be written: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="kvtop-recorder", daemon=True)
        self._thread.start()

    def __call__(self, batch: StepBatch) -> None:
        """Queue a batch (in the engine's thread). Waits only if `patient`."""
        if self.failed is not None:
            return
        try:
            self._queue.put(batch, block=self._patient)
        except queue.Full:
            self._give_up(f"the disk is too slow, {self._queue.maxsize:,} batches were waiting")
            return
        self._watch(batch)

    def close(self, timeout: float = 10.0) -> None:
        """Write the waiting batches and close the file. Gives up if the disk does not answer in `timeout` s."""
        end = time.monotonic() + timeout
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"the disk did not answer within {timeout:g} s")

    # ---------------------------------------------------------------------------- the writer's thread

    @property
    def _file(self) -> BinaryIO:
        return self._raw if self._zip is None else self._zip  # type: ignore[return-value]

    def _run(self) -> None:
        open_ = True
        while open_:
            items = self._next()
            open_ = None not in items
            self._guard(partial(self._write, [b for b in items if b is not None]))
        self._guard(self._finish)

    def _next(self) -> list[StepBatch | None]:
        """All waiting items, at least one."""
        try:
            items = [self._queue.get(timeout=FLUSH_S)]
        except queue.Empty:
            self._guard(self._flush)
            items = [self._queue.get()]
        try:
            while len(items) < 256 and items[-1] is not None:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return items

    def _write(self, batches: list[StepBatch]) -> None:
        out = bytearray()
        for batch in batches:
            if self._redact is not None:
                batch = self._redact(batch)
            out += encode_batch(batch)
            out += b"\n"
            self.batches += 1
            self._started = self._started or any(type(e) is EngineStarted for e in batch.events)
        self._file.write(out)
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._flush()

    def _watch(self, batch: StepBatch) -> None:
        """Ask for the next key-frame once it is due. In the engine's thread, so that its position does not depend on
        the disk."""
        self._taken += 1
        for e in batch.events:
            if type(e) in POOL_EVENTS:
                self._changed = True
            elif type(e) is PoolSnapshot:
                self._begin_frame(batch)
                # A snapshot of a large pool is as long as many batches. Snapshots must not become most of the file.
                self._spacing = len(e.hashed_ids) // HASHES_A_BATCH
        if self._last_snapshot is None:
            self._last_snapshot = batch.t
        due = batch.t - self._last_snapshot >= KEY_FRAME_S and self._taken - self._taken_then >= self._spacing
        if self._changed and due and self._request_snapshot:
            self._begin_frame(batch)  # the snapshot that is asked for will contain the changes until then
            self._request_snapshot()

    def _begin_frame(self, batch: StepBatch) -> None:
        self._changed, self._last_snapshot, self._taken_then = False, batch.t, self._taken

    def _guard(self, work: Callable[[], None]) -> None:
        """Do `work` unless the recording has ended early. An error of the disk ends it."""
        if self.failed is None:
            try:
                work()
            except OSError as error:
                self._give_up(f"{error.strerror or error}; free space or record elsewhere")

    def _finish(self) -> None:
        if self._zip is not None:
            self._zip.close()
        self._raw.close()
        if self._made and not self._started:
            self.path.unlink(missing_ok=True)  # the engine never started: free the name for the next try

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._zip is not None:
            self._zip.flush(zlib.Z_SYNC_FLUSH)
        self._raw.flush()

    def _give_up(self, why: str) -> None:
        if self.failed is not None:
            return
        self.failed = f"recording stopped early: {self.path.name[-60:]}: {why}"[:200]
        if self._on_problem is not None:
            self._on_problem(self.failed)


_DESCRIPTOR = re.compile(r"/dev/(?:fd/(\d+)|(stdin)|(stdout)|(stderr))")


def _opened(path: Path) -> tuple[int, bool]:
    """(descriptor for writing, whether the file was created here).

    A file that exists is never overwritten, unless it is empty. The file is locked against other recorders until this
    process ends in any way. Raises OSError, RecordingError.
    """
    own = _DESCRIPTOR.fullmatch(str(path))
    if own is not None:
        return os.dup(int(own[1]) if own[1] else (own.lastindex or 2) - 2), False
    made = True
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        made = False
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _lock(path, descriptor)
            if os.fstat(descriptor).st_size:
                raise RecordingError(path, "exists already; record to another name, or remove it first")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, made


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RecordingError(path, "is being written by another kvtop; record to another name") from None
        # The file system has no locks. An existing file is still written to only if it is empty.
