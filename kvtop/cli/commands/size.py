"""`kvtop size`: what a model's KV cache takes, and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from engine import EngineConfig, Knob
from kvtop.cli.command import Command, Given
from kvtop.cli.commands.run import Formats

_HERE = ("size",)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """What memory there is, and what is asked of it."""

    # fmt: off
    model: Annotated[str, Knob("Hub id, config.json, a known name, or `list`.", "model", _HERE, argument=True, metavar="MODEL|list")] = ""
    json: Annotated[bool, Knob("The figures as JSON.", "output", _HERE)] = False
    memory: Annotated[int, Knob("Memory of the GPU, or the sum of several.", "memory and cache", _HERE, gt=0, unit="bytes")] = 80 * _GIB
    overhead: Annotated[int, Knob("For activations, graphs and libraries.", "memory and cache", _HERE, ge=0, unit="bytes")] = 3 * _GIB
    avg_tokens: Annotated[int, Knob("Tokens of an average request, prompt and answer.", "memory and cache", _HERE)] = 500
    context: Annotated[tuple[int, ...], Knob("Longest sequence to plan for; may be given several times.", "memory and cache", _HERE, example=8192)] = ()
    gpu_hour: Annotated[float | None, Knob("Dollars an hour for the GPUs with that memory.", "output", _HERE, example=2.5)] = None
    itl: Annotated[float, Knob("Milliseconds a token of each request, for the price.", "output", _HERE)] = 50.0
    # fmt: on


def run(given: Given) -> int:
    """Reads nothing of the model but its config.json."""
    from kvtop.cli.size_table import Question, answer

    what, formats = given.make(Size), given.make(Formats)
    question = Question(
        what.model,
        given.get("revision"),
        what.memory,
        formats.weights,
        what.overhead,
        what.avg_tokens,
        what.context,
        given.get("max_num_batched_tokens", 2048),
        what.gpu_hour,
        what.itl,
        given.get("block_size"),
        formats.kv_cache_dtype,
    )
    return answer(question, what.json)


COMMAND = Command(
    "size",
    "What a model's KV cache takes, and how many requests fit. Nothing but config.json is read.",
    (Size, Formats, EngineConfig),
    run,
)
