"""`kvtop replay`: a recording in the dashboard."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine import Knob, SetupError
from kvtop.cli.command import Command, Given
from kvtop.cli.dashboard import has_terminal
from kvtop.cli.replayed import replayed
from kvtop.options import Options

_HERE = ("replay",)


@dataclass(frozen=True, slots=True)
class Replay:
    """What to replay, from where, and how fast."""

    # fmt: off
    file: Annotated[Path | None, Knob("A recording.", "output", _HERE, argument=True, metavar="FILE")] = None
    speed: Annotated[float, Knob("Recorded seconds a second.", "display", _HERE, ge=0.01, le=1000)] = 1.0
    at: Annotated[float | None, Knob("Start at this second of the recording.", "display", _HERE, ge=0, le=1e12, says="0 or more", example=12.5)] = None
    json: Annotated[bool, Knob("No dashboard: the summary of the recording.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """The dashboard, or the summary as JSON. Exit code 1 where the end of the recording is missing."""
    what = given.make(Replay)
    assert what.file is not None
    if what.json:
        state, code = replayed(what.file)
        print(json.dumps(state.summary()))
        return code
    options = given.make(Options)
    if not has_terminal():
        raise SetupError("replay needs a terminal; without one try `kvtop replay --json`, `verify` or `shot`")
    from kvtop.app.launch import run_replay
    from kvtop.sources import RecordingSource

    source = RecordingSource(what.file)
    source.set_speed(what.speed)
    source.start_at(what.at)
    return run_replay(source, options)


COMMAND = Command("replay", "A recording in the dashboard: pause, step, seek, speed.", (Replay, Options), run)
