"""Built: a loaded model as the engine takes it over, whether it computes with weights or simulates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.chat.conversation import ChatTokenizer
from engine.clock import VirtualClock
from engine.events import DeviceSample
from engine.step.runner import ModelRunner


class TextTokenizer(ChatTokenizer, Protocol):
    """What an engine needs of engine.files.tokenizer.Tokenizer."""

    def is_special(self, token_id: int) -> bool: ...


@dataclass(slots=True)
class Built:
    """A loaded model. tokenizer None: the engine takes token ids only and shows no text."""

    runner: ModelRunner
    tokenizer: TextTokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    """See ModelConfig.generation."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """What the start decided beyond the config, for EngineStarted.knobs."""
    source: Literal["live", "simulated"] = "live"
    clock: VirtualClock | None = None
    """What the engine lives by from here on; None: the wall's."""
    sample: Callable[[], DeviceSample] | None = None
    """The device since the last call, where the runner itself knows; None: the machine is asked."""
