"""The start of a dashboard over an engine, and of its recording.

Owns the look for a terminal and the environment that libraries read once. Imports no textual until a dashboard starts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from engine import EngineConfig, Knob, SetupError
from kvtop.cli.command import Given
from kvtop.text import safe_text

if TYPE_CHECKING:
    from engine import Simulation, Workload
    from kvtop.options import Options

_RECORDED = ("run", "demo")


@dataclass(frozen=True, slots=True)
class Recording:
    """Where the events go to."""

    # fmt: off
    record: Annotated[Path | None, Knob("Write a recording, .jsonl or .jsonl.gz.", "output", _RECORDED, metavar="FILE", example="run.jsonl.gz")] = None
    redact: Annotated[bool, Knob("Keep no text and no token ids in the recording.", "output", _RECORDED)] = False
    # fmt: on

    @classmethod
    def of(cls, given: Given) -> Recording:
        """Raises SetupError where --redact is a word of this command line and there is nothing to redact."""
        made = given.make(cls)
        if made.record is None and made.redact and given.source("redact") == "flag":
            raise SetupError("--redact without --record: there is no recording to redact; add --record FILE")
        return made

    @property
    def name(self) -> str:
        """The file's name; empty where nothing is recorded."""
        return self.record.name if self.record else ""


def dashboard(
    config: EngineConfig,
    options: Options,
    recording: Recording,
    simulated: Simulation | None = None,
    load: Workload | None = None,
) -> int:
    """The dashboard over a live or simulated engine; the exit code."""
    from engine import Engine
    from kvtop.app.launch import run_live

    engine = Engine(config) if simulated is None else Engine(config, build=simulated.build)
    if load is not None:
        engine.play(load)
    if recording.record is None:
        return run_live(engine, options)
    from kvtop.record.recorder import Recorder

    # While the screen is up this goes to the log; what ended a recording is said again after it.
    recorder = Recorder(recording.record, recording.redact, request_snapshot=engine.request_snapshot)
    engine.subscribe(recorder)
    try:
        code = run_live(engine, options, recorder)
    finally:
        engine.stop()
        recorder.close()
        if recorder.failed is not None:
            print(safe_text(recorder.failed), file=sys.stderr)
    return code or int(recorder.failed is not None)


def has_terminal() -> bool:
    """Both ends of a dashboard: a screen and keys."""
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def before_torch() -> None:
    """Environment that libraries read once, when they are first imported."""
    # Threads that spin for ever starve the dashboard, passive ones cost a third of the speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
