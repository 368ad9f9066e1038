"""`kvtop explain`: why each request of a recording hit or missed the prefix cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine import Knob
from kvtop.cli.command import Command, Given
from kvtop.cli.replayed import replayed

_HERE = ("explain",)


@dataclass(frozen=True, slots=True)
class Explain:
    """What to explain, and how."""

    # fmt: off
    file: Annotated[Path | None, Knob("A recording.", "output", _HERE, argument=True, metavar="FILE")] = None
    json: Annotated[bool, Knob("The explanations as JSON.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """A line or a row a request. Exit code 1 where the end of the recording is missing."""
    state, code = replayed(given.get("file"))
    whys = [(v.request_id, v.explanation) for v in state.requests.values() if v.explanation is not None]
    if given.get("json"):
        print(json.dumps({"requests": [why.row(i) for i, why in whys]}))
        return code
    for i, why in whys:
        reason = "" if why.reason == "none" else f" ({why.reason.replace('_', ' ')})"
        print(f"#{i} hit {why.hit_blocks} of {why.queried_blocks} blocks{reason}. {why.sentence}")
    return code


COMMAND = Command(
    "explain", "Why each request of a recording hit or missed the prefix cache.", (Explain,), run
)
