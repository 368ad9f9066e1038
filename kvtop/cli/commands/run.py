"""`kvtop run`, which is also plain `kvtop`: a live or simulated engine in the dashboard, or headless answers.

Owns which options go together. Prompts, output and simulation have their knobs here; the engine's, the sampler's and
the display's are those of EngineConfig, SamplingParams and Options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from engine import EngineConfig, Knob, SamplingParams, SetupError
from kvtop.cli.command import Command, Given
from kvtop.cli.dashboard import Recording, before_torch, dashboard, has_terminal
from kvtop.cli.prompts import Prompt, read_prompts, read_system
from kvtop.options import Options

if TYPE_CHECKING:
    from engine import Simulation, Workload

_HERE = ("run",)
_LIVE_FORMATS = ("int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is asked."""

    # fmt: off
    prompt: Annotated[tuple[str, ...], Knob("Ask this; may be given several times.", "prompts and loads", _HERE, short=("-p",), metavar="TEXT", example="Who was Ada?")] = ()
    prompts: Annotated[str | None, Knob("A prompt a line, or JSONL {prompt, system, max_tokens, …}; - reads stdin.", "prompts and loads", _HERE, metavar="FILE", example="prompts.jsonl")] = None
    system: Annotated[str | None, Knob("System message.", "prompts and loads", _HERE, metavar="TEXT|@FILE", example="Be brief.")] = None
    salt: Annotated[str | None, Knob("Share cached blocks only between requests with the same salt.", "prompts and loads", _HERE, example="salt")] = None
    load: Annotated[str | None, Knob("Requests that arrive by themselves: hour, chat, … or a .toml.", "prompts and loads", _HERE, metavar="NAME|FILE", example="chat")] = None
    concurrent: Annotated[bool, Knob("All prompts at once, not one after another.", "prompts and loads", _HERE)] = False
    # fmt: on


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats that a simulation and `kvtop size` calculate with."""

    # fmt: off
    weights: Annotated[str | None, Knob("bf16, fp8, int8, int4, and with `size` a SIZE. In a live run the same as --quantization.", "simulation", ("run", "size"), metavar="FORMAT|SIZE", example="int4")] = None
    kv_cache_dtype: Annotated[Literal["auto", "bfloat16", "fp8", "float32"], Knob("Format of keys and values. A live engine supports auto and fp8.", "memory and cache", ("run", "size"))] = "auto"
    # fmt: on


@dataclass(frozen=True, slots=True)
class Simulated:
    """What to simulate instead of computing."""

    # fmt: off
    simulate: Annotated[str | None, Knob("Compute nothing: this model as it would run --on a GPU.", "simulation", _HERE, metavar="MODEL", example="llama-3.1-70b")] = None
    on: Annotated[str | None, Knob("The simulated GPU, like h100 or 4xh200.", "simulation", _HERE, metavar="DEVICE", example="h100")] = None
    speed: Annotated[float | None, Knob("Simulated seconds a second. Default: 1 in the dashboard, else as fast as possible.", "simulation", _HERE, gt=0, le=1e6)] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Output:
    """Where the answers go to."""

    # fmt: off
    headless: Annotated[bool, Knob("No dashboard. This is the default without a terminal.", "output", _HERE)] = False
    json: Annotated[bool, Knob("JSON on stdout: a line a step, then the summary.", "output", _HERE)] = False
    once: Annotated[bool, Knob("With --json: the summary alone.", "output", _HERE)] = False
    # fmt: on


def run(given: Given) -> int:
    """The dashboard where a terminal is there and neither --headless nor --json is given."""
    output, recording = given.make(Output), Recording.of(given)
    config = engine_config(given)
    simulated = simulation(given)
    load = _load(given.get("load"))
    params = given.make(SamplingParams)
    text, file = read_system(given.get("system"))
    like = Prompt("", text, file, given.get("salt"), params)
    prompts = [replace(like, prompt=p) for p in given.get("prompt")]
    if given.get("prompts") is not None:
        prompts += read_prompts(given.get("prompts"), like)
    before_torch()
    if output.headless or output.json or not has_terminal():
        return _headless(given, config, prompts, load, simulated)
    options = given.make(
        Options,
        recording=recording.name,
        system=text,
        system_name=file,
        params=params,
        prompts=[p.prompt for p in prompts if isinstance(p.prompt, str)],
        salt=given.get("salt"),
    )
    if simulated is not None and simulated.speed is None:
        simulated = replace(simulated, speed=1.0)
    return dashboard(config, options, recording, simulated, load)


def _headless(
    given: Given,
    config: EngineConfig,
    prompts: list[Prompt],
    load: Workload | None,
    simulated: Simulation | None,
) -> int:
    if not prompts and load is None:
        raise SetupError(
            "no prompt and no terminal: give --prompt TEXT, --prompts FILE or --load NAME, "
            "or start kvtop in a terminal"
        )
    if given.source("theme") == "flag":  # not used here, but wrong all the same
        from kvtop.paint import themes

        themes.find(given.get("theme"))
    from kvtop.cli import headless

    recording, output = Recording.of(given), given.make(Output)
    job = headless.Job(
        prompts,
        as_json=output.json,
        once=output.once,
        concurrent=given.get("concurrent"),
        record=recording.record,
        redact=recording.redact,
        slow=given.get("slow"),
        load=load,
        simulation=simulated,
    )
    return headless.run(config, job)


def engine_config(given: Given) -> EngineConfig:
    """The engine's settings. --kv-cache-dtype is the simulation's where one is asked for; --weights is another
    word for --quantization where none is."""
    formats = given.make(Formats)
    if given.get("simulate") is not None:
        return given.make(EngineConfig)
    more = {"quantization": formats.weights} if formats.weights in _LIVE_FORMATS else {}
    return given.make(EngineConfig, kv_cache_dtype=formats.kv_cache_dtype, **more)


def simulation(given: Given) -> Simulation | None:
    """None: a live engine. Raises SetupError where words of this command line do not go together: a variable or a
    key of the config file may be there for other calls."""
    what, formats = given.make(Simulated), given.make(Formats)
    if what.simulate is None:
        foreign = None if formats.weights in _LIVE_FORMATS else formats.weights
        beyond = {"on": what.on, "weights": foreign, "speed": what.speed}
        extra = next(
            (n for n, value in beyond.items() if value is not None and given.source(n) == "flag"), None
        )
        if extra is not None:
            raise SetupError(f"{given.spell(extra)} goes with --simulate MODEL --on DEVICE")
        return None
    if what.on is None:
        raise SetupError("--simulate needs --on DEVICE, like --on h100, --on rtx-4070 or --on 4xh200")
    if given.source("model") == "flag":
        raise SetupError("--simulate names the model; leave out --model")
    from engine import Simulation

    weights = formats.weights or given.get("quantization")
    return Simulation(what.simulate, what.on, weights, formats.kv_cache_dtype, what.speed)


def _load(name: str | None) -> Workload | None:
    if name is None:
        return None
    from engine import load_workload

    return load_workload(name)


COMMAND = Command(
    "run",
    "A live model, or a simulated one: the dashboard, or headless answers.",
    (EngineConfig, Formats, SamplingParams, Prompts, Simulated, Options, Recording, Output),
    run,
    epilog='Each option is also a variable and a key of config.toml: --model is KVTOP_MODEL and model = "…". A flag '
    "overrides the variable, and the variable overrides the file. Exit codes: 0 ok, also if only some requests "
    "failed; 1 all requests failed, or the engine or the recording ended early; 2 bad input or set-up, or all requests "
    "were refused; 130 ctrl+c.",
)
