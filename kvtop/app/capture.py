"""Capture: what anything prints while the dashboard has the terminal goes to a log file instead.

Owns file descriptors 1 and 2 between enter and exit: C libraries write there, past Python. Textual draws
on `sys.__stderr__` and asks `sys.__stdout__` for the size, so both are pointed at a duplicate of the
terminal first; the other way round the screen would stay blank. Invariants: on exit both descriptors are
what they were, whatever happened in between; a log file has one writer at a time.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, overload

_MOST = 2000
"""Lines kept for the panel."""
_LARGEST = 4 << 20
"""Bytes after which the log file starts anew."""
_MOST_FILES = 32
"""Processes that find a log file of their own."""
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Captured(Sequence[str]):
    """Lines of a log file as it grows, newest last; `poll` reads what is new."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lines: list[str] = []
        self._rest = b""

    def poll(self) -> bool:
        """True if lines came."""
        data = self._file.read()
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        del self._lines[:-_MOST]
        return bool(lines)

    def add(self, text: str) -> None:
        """A line that did not come through a descriptor."""
        self._lines.append(text)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._lines[index]


class Capture:
    """Context manager; gives the Captured lines. `path`: the log file, a temporary one if it cannot be
    written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._undo = ExitStack()

    def __enter__(self) -> Captured:
        with ExitStack() as undo:
            log = self._open(undo)
            reader = undo.enter_context(open(self.path, "rb", buffering=0))
            reader.seek(0, os.SEEK_END)
            terminal = undo.enter_context(
                open(_terminal(), "w", encoding="utf-8", errors="replace", newline="")
            )
            for name in ("__stderr__", "__stdout__"):  # drawn on; asked for the terminal's size
                undo.callback(setattr, sys, name, getattr(sys, name))
                setattr(sys, name, terminal)
            for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
                self._redirect(undo, stream, fd, log)
            self._log(undo)
            self._undo = undo.pop_all()
        return Captured(reader)

    def _open(self, undo: ExitStack) -> int:
        log = self._own()
        if log is None:
            handle, name = tempfile.mkstemp(prefix="kvtop-", suffix=".log")
            os.close(handle)
            self.path = Path(name)
            undo.callback(self.path.unlink, missing_ok=True)
            log = os.open(name, _APPEND)
        undo.callback(os.close, log)
        if os.fstat(log).st_size > _LARGEST:
            os.ftruncate(log, 0)
        os.write(log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n".encode())
        return log

    def _own(self) -> int | None:
        """`path`, or the first of its kind (kvtop-2.log …) that no other process writes; None if there is none."""
        first = self.path
        for number in range(1, _MOST_FILES + 1):
            self.path = first if number == 1 else first.with_stem(f"{first.stem}-{number}")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                log = os.open(self.path, _APPEND, 0o600)
            except OSError:
                return None
            if _locked(log):
                return log
            os.close(log)
        return None

    @staticmethod
    def _redirect(undo: ExitStack, stream: object, fd: int, log: int) -> None:
        flush = getattr(stream, "flush", lambda: None)
        flush()
        saved = os.dup(fd)

        def back() -> None:
            with suppress(OSError, ValueError):
                flush()  # what is buffered belongs into the log
            os.dup2(saved, fd)
            os.close(saved)

        os.dup2(log, fd)
        undo.callback(back)

    @staticmethod
    def _log(undo: ExitStack) -> None:
        stream = undo.enter_context(os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8"))
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        undo.callback(logging.getLogger().removeHandler, handler)
        logging.captureWarnings(True)
        undo.callback(logging.captureWarnings, False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()


def _terminal() -> int:
    """A descriptor of its own to draw on: stderr's terminal, else stdout's (`kvtop 2>file`), else the process' own."""
    for fd in (2, 1):
        if os.isatty(fd):
            return os.dup(fd)
    try:
        return os.open("/dev/tty", os.O_WRONLY)
    except OSError:
        return os.dup(2)


def _locked(fd: int) -> bool:
    """This process alone writes the file from now on, until it has closed it."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
