"""kvtop shot: the dashboard over a recording at one moment, as a picture.

Runs the real app without a terminal. Invariant: every clock it sees is the recording's, so the same
recording, moment, size, theme and view give the same bytes; marks of motion stand where they stood then.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import SetupError
from engine.events import StepBatch
from kvtop.app.app import KvtopApp
from kvtop.options import Options, View
from kvtop.paint import themes
from kvtop.picture.cells import PictureError
from kvtop.picture.frame import FORMATS, render
from kvtop.play.session import Session
from kvtop.record.recording import RecordingError, read
from kvtop.state.dashboard import DashboardState
from kvtop.text import cut, safe_text

LARGEST = 500
"""Cells a side."""
_MOTION = 3.0
"""Seconds before the moment that are replayed batch by batch: no mark of motion stands longer."""

Size = tuple[int, int]


def parse_size(text: str) -> Size:
    """ "100x30" -> (100, 30), columns and rows. Raises SetupError."""
    found = re.fullmatch(r"\s*(\d{1,4})\s*[xX×]\s*(\d{1,4})\s*", text)
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(1 <= cells <= LARGEST for cells in size):
        shown = cut(safe_text(text), 30)
        raise SetupError(f"--size {shown!r}: columns x rows, each from 1 to {LARGEST}, for example 100x30")
    return size


def shot(
    recording: str | Path,
    *,
    at: float | None = None,
    size: Size = (100, 30),
    theme: str | None = None,
    view: View | None = None,
    motion: bool = True,
    format: str | None = None,
    out: str | Path,
) -> Path:
    """Writes the picture to `out` and returns its path.

    at: seconds since the recording's start; None or beyond the end is its last moment. motion: False
    shows a hit whole, not in mid-sweep. format: one of FORMATS, None goes by the ending of `out`. `out` "-"
    is stdout. Raises
    SetupError (one line) for whatever cannot be read, found or written.
    """
    path = Path(out)
    kind = format or path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise PictureError(f"which format? give --format {'|'.join(FORMATS)}, or end the file's name in one")
    data = picture(recording, at=at, size=size, theme=theme, view=view, motion=motion, format=kind)
    try:
        if str(out) == "-":
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            path.write_bytes(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(
            cut(f"{safe_text(str(path))}: cannot be written: {error.strerror or error}", 200)
        ) from None
    return path


def picture(
    recording: str | Path,
    *,
    at: float | None = None,
    size: Size = (100, 30),
    theme: str | None = None,
    view: View | None = None,
    motion: bool = True,
    format: str = "png",
) -> bytes:
    """The picture as bytes; arguments and errors as `shot`."""
    if at is not None and not at >= 0:
        raise SetupError("--at counts seconds from the recording's start: 0 or more")
    chosen = theme or themes.DEFAULT
    themes.find(chosen)
    batches, more_follow = _until(Path(recording), at)
    moment = at if at is not None and more_follow else batches[-1].t
    with _own_colours():
        return asyncio.run(
            _picture(batches, moment, size, Options(theme=chosen, view=view, motion=motion), format)
        )


class _Nothing:
    """A source whose batches were applied already. It cannot be driven; `place` is what the badge says."""

    transport = None
    loading = None
    problem = None

    def __init__(self, place: str) -> None:
        self.place = place

    def attach(self, state: DashboardState) -> None:
        """The app's state is filled by hand."""

    def drain(self) -> list[StepBatch]:
        """No batch."""
        return []


class _ShotApp(KvtopApp):
    """Its clock stands still at `moment`."""

    moment = 0.0

    @property
    def now(self) -> float:
        """The recording's clock at the moment asked for."""
        return self.moment


async def _picture(batches: list[StepBatch], moment: float, size: Size, options: Options, kind: str) -> bytes:
    app = _ShotApp(Session(_Nothing(f"{moment:.1f} s"), options), wall=lambda: moment)
    app.moment = moment
    app.animation_level = "none"
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        state, motion = app.state, app.motion
        for batch in batches:
            state.apply(batch)
            if batch.t >= moment - _MOTION:
                motion.update(state, batch.t)
        motion.update(state, moment)
        # Twice: the first frame may change titles and with them what the second has to show.
        for _ in range(2):
            app.paint()
            await pilot.pause()
        return render(app, kind)


def _until(path: Path, at: float | None) -> tuple[list[StepBatch], bool]:
    """(batches with t <= at, at least one; whether more follow). Of a file that breaks off, what is there."""
    batches: list[StepBatch] = []
    try:
        for batch in read(path):
            if at is not None and batch.t > at and batches:
                return batches, True
            batches.append(batch)
    except RecordingError as error:
        if not batches or not error.truncated:
            raise
    if not batches:
        raise RecordingError(path, "holds no batch")
    return batches, False


@contextmanager
def _own_colours() -> Iterator[None]:
    """A picture is no terminal: NO_COLOR asks terminals to be plain, a theme was asked for here."""
    kept = os.environ.pop("NO_COLOR", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["NO_COLOR"] = kept
