"""The file format of recordings: a header line, then one StepBatch in each line, plain or gzip.

Owns the header and the reading. Invariant: whatever a file contains, a reader gets batches or a RecordingError, which
is one line with the line number. Every batch has passed the door (door.py), and the length of a line is limited while
it is read.
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine import SetupError
from engine.events import SCHEMA, EngineStopped, StepBatch, decode_batch
from kvtop import __version__
from kvtop.record.door import Door, Refused
from kvtop.text import cut, safe_text

LONGEST_LINE = 256 << 20
"""Bytes. A snapshot of a million blocks takes about 40 MB."""


class RecordingError(SetupError):
    """A file that cannot be read as a recording, or not to its end. line: counts from 1; 0: none."""

    truncated = False
    """The file ends too early. Everything before this line is complete."""

    def __init__(self, path: Path, what: str, line: int = 0) -> None:
        where = f"{safe_text(path.name)[-60:]}" + (f": line {line:,}" if line else "")
        super().__init__(cut(f"{where}: {safe_text(what)}", 200))
        self.line = line


class TruncatedError(RecordingError):
    """A recording that was not closed, or whose end is missing."""

    truncated = True


class ClaimError(RecordingError):
    """A line that has the form of a batch, with an impossible value in a field."""


class Header(msgspec.Struct):
    """First line of a recording: the version of kvtop that wrote it, and the major version of its events."""

    kvtop: str
    schema: int


def header_line() -> bytes:
    """The first line of a recording, including the newline."""
    return msgspec.json.encode(Header(__version__, SCHEMA)) + b"\n"


def read(path: str | Path) -> Iterator[StepBatch]:
    """Batches in order.

    Raises RecordingError if the file cannot be opened, is no recording or has a newer schema, and at the first line
    that cannot be read (if the file is cut off, for example).
    """
    path = Path(path)
    door = Door()
    with open_recording(path) as file:
        for number, line in lines(path, file):
            yield parse(path, number, line, door)


def read_readable(path: str | Path, take: Callable[[StepBatch], Any]) -> str | None:
    """Calls `take` with every batch that can be read.

    Returns None, or one line that says what is missing if the recording ends too early. Raises RecordingError if
    nothing can be read or a line is wrong.
    """
    path, number, ended = Path(path), 0, False
    try:
        for batch in read(path):
            take(batch)
            number += 1
            ended = bool(batch.events) and isinstance(batch.events[-1], EngineStopped)
    except TruncatedError as error:
        if not number:
            raise
        return cut(f"{error}; shown are the {number:,} batches before it", 190)
    if not number:
        raise RecordingError(path, "holds no batch of events")
    if not ended:
        missing = "the end is missing (no EngineStopped); shown is what came before"
        return str(TruncatedError(path, missing, number + 2))  # the header is a line too
    return None


@contextmanager
def open_recording(path: Path) -> Iterator[BinaryIO]:
    """The file after its header, decompressed. Raises RecordingError."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise RecordingError(path, f"cannot be opened: {error.strerror or error}") from None
    with raw:
        file: BinaryIO = raw
        if _peek(path, raw) == b"\x1f\x8b":
            file = io.BufferedReader(_Unzipped(raw), 1 << 16)
        _check_header(path, _line(path, file, 1))
        yield file


def lines(path: Path, file: BinaryIO, first: int = 2) -> Iterator[tuple[int, bytes]]:
    """(line number, line without newline) for the rest of `file`. Raises RecordingError."""
    number = first
    while line := _line(path, file, number):
        if not line.endswith(b"\n") and not _is_whole(line):
            raise TruncatedError(path, "is cut off, the rest of the recording is missing", number)
        if line.strip():
            yield number, line.rstrip(b"\r\n")
        number += 1


def parse(path: Path, number: int, line: bytes, door: Door) -> StepBatch:
    """The batch in one line. `door` has seen the lines before it. Raises RecordingError."""
    try:
        batch = decode_batch(line)
        door.check(batch)
    except Refused as error:
        raise ClaimError(path, str(error), number) from None
    except msgspec.ValidationError as error:
        raise ClaimError(path, _with_field(str(error)), number) from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        field = _not_finite(line)
        if field is not None:
            raise ClaimError(path, f"{field} is no finite number", number) from None
        raise RecordingError(path, f"is not a batch of events: {error}", number) from None
    return batch


_FIELD = re.compile(r"(?:(\w+): )?(.*) - at `\$\.?(.*)`")


def _with_field(error: str) -> str:
    """A message like "TokensSampled: Expected `int` >= 0 - at `$.counts[0]`" with the field at its start."""
    found = _FIELD.fullmatch(error)
    if found is None:
        return f"is not a batch of events: {error}"
    event, what, field = found.groups()
    return f"{event}.{field}: {what}" if event else f"{field}: {what}"


def _not_finite(line: bytes) -> str | None:
    """The first field that is NaN or Infinity. JSON has neither, but some programs write them."""
    try:
        return next(_not_finite_in("", json.loads(line)), None)
    except (ValueError, RecursionError):
        return None


def _not_finite_in(field: str, value: Any) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield field.lstrip(".")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite_in(
                f"{value['type']}.{name}" if "type" in value else f"{field}.{name}", item
            )
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _not_finite_in(f"{field}[{place}]", item)


class _Unzipped(io.RawIOBase):
    """The decompressed contents of a gzip file, as far as they can be read.

    A file that was never closed gives everything before its EOFError. In a damaged file (zlib.error) at most the
    contents of PIECE compressed bytes are lost.
    """

    PIECE = 1024

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._zip = zlib.decompressobj(31)
        self._packed = b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises EOFError, zlib.error, OSError."""
        while True:
            if self._zip.eof:  # another gzip member or padding may follow
                self._packed = self._zip.unused_data.lstrip(b"\0") or self._raw.read(self.PIECE).lstrip(b"\0")
                if not self._packed:
                    return 0
                self._zip = zlib.decompressobj(31)
            packed = self._packed or self._raw.read(self.PIECE)
            data = self._zip.decompress(packed, len(buffer))
            self._packed = self._zip.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not packed:
                raise EOFError


def _peek(path: Path, raw: BinaryIO) -> bytes:
    try:
        start = raw.read(2)
        raw.seek(0)
    except OSError as error:
        raise RecordingError(path, f"cannot be read: {error.strerror or error}") from None
    return start


def _line(path: Path, file: BinaryIO, number: int) -> bytes:
    try:
        line = file.readline(LONGEST_LINE)
    except EOFError:
        raise TruncatedError(path, "the compressed file ends too early", number) from None
    except zlib.error as error:
        raise TruncatedError(path, f"the compressed file is damaged: {error}", number) from None
    except OSError as error:
        raise RecordingError(path, f"cannot be read: {error.strerror or error}", number) from None
    if len(line) == LONGEST_LINE:
        raise RecordingError(path, f"is longer than {LONGEST_LINE >> 20} MiB", number)
    return line


def _is_whole(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _check_header(path: Path, line: bytes) -> None:
    if not line:
        raise RecordingError(path, "is empty")
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, RecursionError):
        raise RecordingError(
            path, 'is not a kvtop recording: its first line is no {"kvtop":…,"schema":…}'
        ) from None
    if header.schema > SCHEMA:
        raise RecordingError(
            path,
            f"was written by kvtop {header.kvtop[:20]} with schema {header.schema}; this kvtop "
            f"({__version__}) reads up to schema {SCHEMA}: update it",
        )
    if header.schema < 1:
        raise RecordingError(path, f"has schema {header.schema}, which does not exist")
