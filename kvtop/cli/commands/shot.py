"""`kvtop shot`: a picture of the dashboard over a recording."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from engine import Knob
from kvtop.cli.command import Command, Given
from kvtop.options import Options

_HERE = ("shot",)


@dataclass(frozen=True, slots=True)
class Shot:
    """What to show, and where to write it."""

    # fmt: off
    file: Annotated[Path | None, Knob("A recording.", "output", _HERE, argument=True, metavar="FILE")] = None
    out: Annotated[Path | None, Knob("Where to write it; - is stdout.", "output", _HERE, short=("-o",), metavar="FILE", required=True, example="shot.svg")] = None
    at: Annotated[float | None, Knob("Second of the recording. Default: its end.", "display", _HERE, ge=-1e12, le=1e12, says="a number of seconds", example=12.5)] = None
    size: Annotated[str, Knob("Columns x rows.", "display", _HERE, metavar="WIDTHxHEIGHT")] = "100x30"
    format: Annotated[Literal["txt", "svg", "png"] | None, Knob("Default: by the ending of the file's name.", "output", _HERE)] = None
    # fmt: on


def run(given: Given) -> int:
    """Writes the picture and prints its path on stderr."""
    from kvtop.picture import shot

    what, shown = given.make(Shot), given.make(Options)
    assert what.file is not None and what.out is not None
    path = shot.shot(
        what.file,
        at=what.at,
        size=shot.parse_size(what.size),
        theme=shown.theme,
        view=shown.view,
        motion=shown.motion,
        format=what.format,
        out=what.out,
    )
    if str(what.out) != "-":
        print(path, file=sys.stderr)
    return 0


COMMAND = Command("shot", "A picture of the dashboard over a recording at one moment.", (Shot, Options), run)
