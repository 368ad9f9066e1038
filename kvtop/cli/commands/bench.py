"""`kvtop bench`: speed of the engine on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from engine import EngineConfig, Knob
from kvtop.cli.command import Command, Given
from kvtop.cli.dashboard import before_torch

_HERE = ("bench",)


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure, and how to report it."""

    # fmt: off
    json: Annotated[bool, Knob("The figures as JSON.", "output", _HERE)] = False
    with_dashboard: Annotated[bool, Knob("What the dashboard costs: CPU a frame, and the engine's speed with it.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """Measures with the engine's own settings."""
    what, config = given.make(Bench), given.make(EngineConfig)
    before_torch()
    if what.with_dashboard:
        from kvtop.app import dashboard_bench

        return dashboard_bench.main(config, as_json=what.json)
    from engine import bench

    return bench.main(config, as_json=what.json)


COMMAND = Command("bench", "Speed of the engine on this machine.", (Bench, EngineConfig), run)
