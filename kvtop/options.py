"""Options: what a start of the dashboard may be told, apart from the engine's own settings.

Plain data, no textual, so that the command line can build it before it knows whether a terminal is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine import SamplingParams

if TYPE_CHECKING:
    from kvtop.play.demo import Demo

View = Literal["chat", "ops", "all"]
VIEWS: tuple[View, ...] = ("chat", "ops", "all")


@dataclass(frozen=True, slots=True)
class Options:
    """See the command line's help for what each does; None is the default that the start finds out."""

    theme: str | None = None
    """Name or .toml file; None: the default, `ansi` under NO_COLOR."""
    view: View | None = None
    """None: chat, or all where 200 x 60 cells are at hand."""
    fps: float | None = None
    """Frames a second; None: 10 on a CPU engine, 30 on a GPU."""
    motion: bool = True
    system: str | None = None
    """System message of typed conversations."""
    system_name: str = ""
    """File it came from."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """For typed prompts."""
    salt: str | None = None
    """Of typed prompts: they share cached blocks only with the same salt."""
    prompts: Sequence[str] = ()
    """Sent at the start, one conversation each."""
    slow: float = 0.0
    """Seconds that slow motion waits between steps, from the start on."""
    recording: str = ""
    """File that is being written, for the badge."""
    demo: Demo | None = None
    """Scene to play; the dashboard then starts in key mode."""
