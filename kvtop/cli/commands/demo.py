"""`kvtop demo`: a scripted scene that drives a real engine and checks what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from engine import EngineConfig, Knob
from kvtop.cli.command import Command, Given
from kvtop.cli.dashboard import Recording, before_torch, dashboard, has_terminal
from kvtop.options import Options

_HERE = ("demo",)


@dataclass(frozen=True, slots=True)
class Demo:
    """Which scene, and where it plays."""

    # fmt: off
    name: Annotated[str, Knob("A demo's name, a .py file, or `list`.", "output", _HERE, argument=True, metavar="NAME|list")] = ""
    headless: Annotated[bool, Knob("No dashboard. This is the default without a terminal.", "output", _HERE)] = False
    json: Annotated[bool, Knob("JSON: the verdict, or the list.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """Exit code 1 where the verdict is no."""
    from kvtop.play import demo as demos

    what, recording = given.make(Demo), Recording.of(given)
    if what.name == "list":
        print(demos.listing(what.json))
        return 0
    scene = demos.load(what.name)
    config = given.make(EngineConfig)
    before_torch()
    if what.headless or what.json or not has_terminal():
        record, redact = recording.record, recording.redact
        return demos.run_headless(scene, config, as_json=what.json, record=record, redact=redact)
    options = given.make(Options, recording=recording.name, demo=scene)
    return dashboard(scene.config(config), options, recording)


COMMAND = Command(
    "demo",
    "A scripted scene that drives a real engine and checks what it shows.",
    (Demo, Recording, Options, EngineConfig),
    run,
)
