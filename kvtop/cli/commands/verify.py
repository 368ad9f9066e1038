"""`kvtop verify`: is a recording whole and true?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine import Knob
from kvtop.cli.command import Command, Given
from kvtop.text import safe_text

_HERE = ("verify",)


@dataclass(frozen=True, slots=True)
class Verify:
    """What to check, and how to report it."""

    # fmt: off
    file: Annotated[Path | None, Knob("A recording.", "output", _HERE, argument=True, metavar="FILE")] = None
    json: Annotated[bool, Knob("The report as JSON.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """Exit code 1 where the recording breaks a law."""
    from kvtop.record.verify import verify

    report = verify(given.get("file"))
    if given.get("json"):
        print(json.dumps(report.as_dict()))
    else:
        for line in report.lines():
            print(safe_text(line))
    return 0 if report.ok else 1


COMMAND = Command("verify", "Check that a recording is whole and true.", (Verify,), run)
