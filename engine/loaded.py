"""Built: what the engine gets from a start: a runner with weights or a simulated one, and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.chat.conversation import ChatTokenizer
from engine.clock import VirtualClock
from engine.events import DeviceSample
from engine.step.runner import ModelRunner


class TextTokenizer(ChatTokenizer, Protocol):
    """The part of engine.files.tokenizer.Tokenizer that an engine needs."""

    def is_special(self, token_id: int) -> bool: ...


@dataclass(slots=True)
class Built:
    """A loaded model. tokenizer None: the engine accepts only token ids and shows no text."""

    runner: ModelRunner
    tokenizer: TextTokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    """See ModelConfig.generation."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """What the start chose, for EngineStarted.knobs."""
    source: Literal["live", "simulated"] = "live"
    clock: VirtualClock | None = None
    """The clock of the engine from now on. None: real time."""
    sample: Callable[[], DeviceSample] | None = None
    """Samples the device since the last call. None: the engine samples the machine."""
