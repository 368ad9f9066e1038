"""Options of the dashboard: what the screen shows and how. The engine's settings are in EngineConfig.

Owns the knobs of the group "display". Plain data without Textual, so the command line can build it before it knows
whether there is a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from engine import Knob, SamplingParams, check_fields

if TYPE_CHECKING:
    from kvtop.play.demo import Demo as Scene

View = Literal["chat", "ops", "all"]
VIEWS: tuple[View, ...] = ("chat", "ops", "all")

_SCREENS = ("run", "replay", "demo")
_PICTURES = (*_SCREENS, "shot")


@dataclass(frozen=True, slots=True)
class Options:
    """None: the start chooses the value. Raises KnobError on a value out of range."""

    # fmt: off
    theme: Annotated[str | None, Knob("Name of a theme, or a .toml file. Default: kvtop-dark, or ansi under NO_COLOR.", "display", _PICTURES, example="kvtop-light")] = None
    view: Annotated[View | None, Knob("What to show first. Default: chat, or all on a large terminal.", "display", _PICTURES)] = None
    fps: Annotated[float | None, Knob("Frames a second. Default: 10 on a CPU engine, 30 on a GPU.", "display", _SCREENS, ge=0.5, le=120)] = None
    motion: Annotated[bool, Knob("Sweeps and flashes.", "display", _PICTURES)] = True
    slow: Annotated[float, Knob("Slow motion: seconds between two steps.", "display", ("run", "demo"), ge=0, le=60)] = 0.0
    # fmt: on
    system: str | None = None
    """System message of typed conversations."""
    system_name: str = ""
    """The file of the system message."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """For typed prompts."""
    salt: str | None = None
    """Salt of typed prompts: they share cached blocks only with requests of the same salt."""
    prompts: Sequence[str] = ()
    """Sent at the start, each in its own conversation."""
    recording: str = ""
    """The recording that is being written, for the badge."""
    demo: Scene | None = None
    """Scene to play; the dashboard then starts in key mode."""

    def __post_init__(self) -> None:
        check_fields(self)
