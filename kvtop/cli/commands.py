"""The command line: words to values, one command a function, errors as one line.

Owns the commands, the choice between dashboard and headless, and the exit codes: 0 ok, 1 a check failed, 2 bad
input or set-up, 130 ctrl+c, 143 and 129 SIGTERM and SIGHUP (headless). A flag goes over KVTOP_ variables, those
over the config file (invoking.py), that over the default. Imports torch and textual only where a command needs
them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine import EngineConfig, SetupError
from kvtop import __version__
from kvtop.cli import invoke as invoking
from kvtop.cli.inputs import Ask, parse_size, read_prompts, read_system, sampling
from kvtop.cli.options import (
    Adaptive,
    AsJson,
    Async,
    Attention,
    AuditOf,
    AvgTokens,
    BadWords,
    Beam,
    BlockSize,
    Budget,
    Caching,
    Chunked,
    Concurrent,
    Contexts,
    Device,
    Dtype,
    EarlyStop,
    File,
    Fps,
    Frequency,
    GpuHour,
    GpuPart,
    HashSeed,
    Headless,
    IgnoreEos,
    Itl,
    KvDtype,
    KvMemory,
    LengthPenalty,
    LoadName,
    LogProbs,
    LongPrefill,
    MaxLen,
    MaxSeqs,
    MaxTokens,
    Memory,
    MinP,
    MinTokens,
    Model,
    Motion,
    NumBlocks,
    On,
    Once,
    Ops,
    Overhead,
    Policy,
    Presence,
    Prompt,
    Prompts,
    Quantize,
    QueuedRequests,
    QueuedTokens,
    Record,
    Redact,
    Repetition,
    Revision,
    Salt,
    Samples,
    Seed,
    Simulate,
    Slow,
    Speculate,
    Speed,
    Stop,
    StopIds,
    System,
    Temperature,
    Theme,
    Threads,
    TopK,
    TopP,
    View,
    ViewName,
    Watermark,
    Weights,
    opt,
)
from kvtop.cli.simulation import simulation
from kvtop.text import safe_text

if TYPE_CHECKING:
    from engine import SamplingParams, Simulation, Workload
    from kvtop.options import Options

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Watch the KV blocks of an LLM engine. Plain `kvtop` is `kvtop run`: a dashboard over a live model.",
    epilog="Every option can be set as KVTOP_… in the environment or in config.toml.",
)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """Before any command."""
    if version:
        print(f"kvtop {__version__}")
        raise typer.Exit


@app.command()
def run(
    ctx: typer.Context,
    prompt: Prompt = None,
    prompts: Prompts = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    stop_token_ids: StopIds = None,
    ignore_eos: IgnoreEos = None,
    min_tokens: MinTokens = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    bad_words: BadWords = None,
    logprobs: LogProbs = None,
    n: Samples = None,
    beam_width: Beam = None,
    length_penalty: LengthPenalty = None,
    early_stopping: EarlyStop = None,
    salt: Salt = None,
    headless: Headless = False,
    json: AsJson = False,
    once: Once = False,
    concurrent: Concurrent = False,
    record: Record = None,
    redact: Redact = False,
    slow: Slow = 0.0,
    load: LoadName = None,
    simulate: Simulate = None,
    on: On = None,
    weights: Weights = None,
    kv_cache_dtype: KvDtype = "auto",
    speed: Speed = None,
    theme: Theme = None,
    view: View = None,
    fps: Fps = None,
    motion: Motion = True,
    model: Model = None,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    attention_backend: Attention = "auto",
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: KvMemory = None,
    gpu_memory_utilization: GpuPart = 0.9,
    max_model_len: MaxLen = None,
    max_num_batched_tokens: Budget = None,
    max_num_seqs: MaxSeqs = 64,
    speculate: Speculate = 0,
    enable_prefix_caching: Caching = True,
    async_scheduling: Async = None,
    enable_chunked_prefill: Chunked = True,
    long_prefill_token_threshold: LongPrefill = 0,
    long_prefill_token_threshold_adaptive: Adaptive = False,
    scheduling_policy: Policy = "fcfs",
    watermark: Watermark = 0.0,
    max_num_queued_requests: QueuedRequests = None,
    max_num_queued_tokens: QueuedTokens = None,
    audit: AuditOf = 0,
    seed: Seed = 0,
    hash_seed: HashSeed = None,
    quantization: Quantize = None,
    threads: Threads = None,
) -> int:
    """A live model, or a simulated one: the dashboard, or headless answers."""
    need_record(ctx, record)
    config = engine_config(ctx.params)
    simulated = simulation(simulate, on, weights, kv_cache_dtype, speed, live=model)
    workload = None
    if load is not None:
        from engine import load_workload

        workload = load_workload(load)
    params = sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad_words=bad_words,
        logprobs=logprobs,
        n=n,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    text, name = read_system(system)
    like = Ask("", text, name, salt, params=params)
    asks = [replace(like, prompt=p) for p in prompt or ()]
    if prompts is not None:
        asks += read_prompts(prompts, like)
    before_torch()
    if headless or json or not has_terminal():
        if not asks and workload is None:
            raise SetupError(
                "no prompt and no terminal: give --prompt TEXT, --prompts FILE or --load NAME, "
                "or start kvtop in a terminal"
            )
        if theme is not None and is_typed(ctx, "theme"):  # not used here, but wrong all the same
            from kvtop.paint import themes

            themes.find(theme)
        from kvtop.cli.headless import Wishes
        from kvtop.cli.headless import run as answer

        wishes = Wishes(json, once, concurrent, record, redact, slow, workload, simulated)
        return answer(config, asks, wishes)
    texts = [a.prompt for a in asks if isinstance(a.prompt, str)]
    options = show_options(theme, view, fps, motion, slow, record, text, name, params, texts, salt=salt)
    if simulated is not None and simulated.speed is None:
        simulated = replace(simulated, speed=1.0)
    return dashboard(config, options, record, redact, simulated, workload)


@app.command()
def replay(
    file: File,
    speed: Annotated[float, opt("Recorded seconds a second.", "--speed", min=0.01, max=1000)] = 1.0,
    at: Annotated[float | None, opt("Start at this second.", "--at", min=0)] = None,
    json: Annotated[bool, opt("No dashboard: the summary of the recording.", "--json")] = False,
    theme: Theme = None,
    view: View = None,
    fps: Fps = None,
    motion: Motion = True,
) -> int:
    """A recording in the dashboard: pause, step, seek, speed."""
    if json:
        state, code = _replayed(file)
        _print_json(state.summary())
        return code
    if not has_terminal():
        raise SetupError("replay needs a terminal; without one try `kvtop replay --json`, `verify` or `shot`")
    from kvtop.app.launch import run_replay
    from kvtop.sources import RecordingSource

    source = RecordingSource(file)
    source.set_speed(speed)
    source.start_at(at)
    return run_replay(source, show_options(theme, view, fps, motion))


@app.command()
def demo(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A demo's name, a .py file, or `list`.", metavar="NAME|list")],
    headless: Headless = False,
    json: Annotated[bool, opt("JSON: the verdict, or the list.", "--json")] = False,
    record: Record = None,
    redact: Redact = False,
    slow: Slow = 0.0,
    theme: Theme = None,
    view: View = None,
    fps: Fps = None,
    motion: Motion = True,
    model: Model = None,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    threads: Threads = None,
    hash_seed: HashSeed = None,
) -> int:
    """A scripted scene that drives a real engine and checks what it shows."""
    from kvtop.play import demo as demos

    need_record(ctx, record)
    if name == "list":
        print(demos.listing(json))
        return 0
    scene = demos.load(name)
    base = engine_config(ctx.params)
    before_torch()
    if headless or json or not has_terminal():
        return demos.run_headless(scene, base, as_json=json, record=record, redact=redact)
    options = show_options(theme, view, fps, motion, slow, record, demo=scene)
    return dashboard(scene.config(base), options, record, redact)


@app.command()
def shot(
    file: File,
    out: Annotated[Path, opt("Where to write it; - is stdout.", "-o", "--out", metavar="FILE")],
    at: Annotated[float | None, opt("Second of the recording; its end without.", "--at")] = None,
    size: Annotated[str, opt("Columns x rows.", "--size")] = "100x30",
    theme: Theme = None,
    view: View = None,
    motion: Motion = True,
    format: Annotated[
        Literal["txt", "svg", "png"] | None, opt("By the file's ending without.", "--format")
    ] = None,
) -> int:
    """A picture of the dashboard over a recording at one moment."""
    from kvtop.picture import shot as shots

    path = shots.shot(
        file,
        at=at,
        size=shots.parse_size(size),
        theme=theme,
        view=view,
        motion=motion,
        format=format,
        out=out,
    )
    if str(out) != "-":
        print(path, file=sys.stderr)
    return 0


@app.command()
def verify(file: File, json: Annotated[bool, opt("The report as JSON.", "--json")] = False) -> int:
    """Check that a recording is whole and true."""
    from kvtop.record.verify import verify as check

    report = check(file)
    if json:
        _print_json(report.as_dict())
    else:
        for line in report.lines():
            print(safe_text(line))
    return 0 if report.ok else 1


@app.command()
def explain(file: File, json: Annotated[bool, opt("The explanations as JSON.", "--json")] = False) -> int:
    """Why each request of a recording hit or missed the prefix cache."""
    state, exit_code = _replayed(file)
    views = state.requests.values()
    told = [(v.request_id, v.explanation) for v in views if v.explanation is not None]
    if json:
        _print_json({"requests": [why.row(i) for i, why in told]})
        return exit_code
    for i, why in told:
        code = "" if why.reason == "none" else f" ({why.reason.replace('_', ' ')})"
        print(f"#{i} hit {why.hit_blocks} of {why.queried_blocks} blocks{code}. {why.sentence}")
    return exit_code


@app.command()
def size(
    model: Annotated[
        str,
        typer.Argument(help="Hub id, config.json, a known name, or `list`.", metavar="MODEL|list"),
    ],
    json: Annotated[bool, opt("The figures as JSON.", "--json")] = False,
    memory: Memory = "80GiB",
    weights: Weights = None,
    overhead: Overhead = "3GiB",
    avg_tokens: AvgTokens = 500,
    context: Contexts = None,
    gpu_hour: GpuHour = None,
    itl: Itl = 50.0,
    kv_cache_dtype: KvDtype = "auto",
    block_size: BlockSize = 16,
    max_num_batched_tokens: Budget = None,
    revision: Revision = None,
) -> int:
    """What a model's KV cache takes, and how many requests fit. Nothing but config.json is read."""
    from kvtop.cli.size_table import Question, answer

    chunk = 2048 if max_num_batched_tokens is None else max_num_batched_tokens
    shape = (block_size, kv_cache_dtype)
    question = Question(
        model, revision, memory, weights, overhead, avg_tokens, context or (), chunk, gpu_hour, itl, *shape
    )
    return answer(question, json)


@app.command()
def bench(
    ctx: typer.Context,
    json: Annotated[bool, opt("The figures as JSON.", "--json")] = False,
    with_dashboard: Annotated[
        bool,
        opt("What the dashboard costs: CPU a frame, and the engine's speed beside it.", "--with-dashboard"),
    ] = False,
    model: Model = None,
    revision: Revision = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    attention_backend: Attention = "auto",
    num_blocks: NumBlocks = None,
    kv_cache_memory: KvMemory = None,
    kv_cache_dtype: KvDtype = "auto",
    quantization: Quantize = None,
    threads: Threads = None,
) -> int:
    """Speed of the engine on this machine."""
    config = engine_config(ctx.params)
    before_torch()
    if with_dashboard:
        from kvtop.app import dashboard_bench

        return dashboard_bench.main(config, as_json=json)
    from engine import bench as engine_bench

    return engine_bench.main(config, as_json=json)


# --------------------------------------------------------------------------------------- from words


def engine_config(params: dict[str, Any]) -> EngineConfig:
    """EngineConfig from the options of a command that share its fields' names. Raises SetupError."""
    known = {n: params[n] for n in EngineConfig.__slots__ if n in params}
    if params.get("simulate") is not None:
        known.pop("kv_cache_dtype", None)  # the simulation's own, which has more of them
    elif params.get("weights") in ("int8", "int4", "fp8"):
        known["quantization"] = params["weights"]
    memory = known.get("kv_cache_memory")
    if memory is not None:
        known["kv_cache_memory"] = parse_size(memory, "--kv-cache-memory")
    return EngineConfig(**known)


def is_typed(ctx: typer.Context, name: str) -> bool:
    """The option is a word of this command line, not a setting for all of them."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def need_record(ctx: typer.Context, record: Path | None) -> None:
    """Raises SetupError where --redact is typed and there is nothing to redact."""
    if record is None and is_typed(ctx, "redact"):
        raise SetupError("--redact without --record: there is no recording to redact; add --record FILE")


def show_options(
    theme: str | None,
    view: ViewName | None,
    fps: float | None,
    motion: bool,
    slow: float = 0.0,
    record: Path | None = None,
    system: str | None = None,
    system_name: str = "",
    params: SamplingParams | None = None,
    prompts: Sequence[str] = (),
    demo: Any = None,
    salt: str | None = None,
) -> Options:
    """What the dashboard is told."""
    from kvtop.options import Options

    more: dict[str, Any] = {} if params is None else {"params": params}
    return Options(
        theme=theme,
        view=view,
        fps=fps,
        motion=motion,
        slow=slow,
        recording=record.name if record else "",
        system=system,
        system_name=system_name,
        prompts=prompts,
        demo=demo,
        salt=salt,
        **more,
    )


def dashboard(
    config: EngineConfig,
    options: Options,
    record: Path | None,
    redact: bool,
    simulated: Simulation | None = None,
    load: Workload | None = None,
) -> int:
    """The dashboard over a live or simulated engine, recorded if wished, with a load if wished."""
    from engine import Engine
    from kvtop.app.launch import run_live

    engine = Engine(config) if simulated is None else Engine(config, build=simulated.build)
    if load is not None:
        engine.play(load)
    if record is None:
        return run_live(engine, options)
    from kvtop.record.recorder import Recorder

    # While the screen is up this goes to the log; what ended a recording is said again after it.
    recorder = Recorder(record, redact, request_snapshot=engine.request_snapshot)
    engine.subscribe(recorder)
    try:
        code = run_live(engine, options)
    finally:
        engine.stop()
        recorder.close()
        if recorder.failed is not None:
            print(safe_text(recorder.failed), file=sys.stderr)
    return code or int(recorder.failed is not None)


def has_terminal() -> bool:
    """Both ends of a dashboard: a screen and keys."""
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def before_torch() -> None:
    """Environment that libraries read once, when they are first imported."""
    # Threads that spin for ever starve the dashboard, passive ones cost a third of the speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _replayed(file: Path) -> tuple[Any, int]:
    """(the state after the whole recording, 0), or after its readable part, 1, and a line on stderr."""
    from kvtop.record.recording import read_readable
    from kvtop.state.dashboard import DashboardState

    state = DashboardState()
    missing = read_readable(file, state.apply)
    if missing is not None:
        print(safe_text(f"kvtop: {missing}"), file=sys.stderr)
    return state, int(missing is not None)


def _print_json(value: Any) -> int:
    print(json.dumps(value))
    return 0


# --------------------------------------------------------------------------------------------- main


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `kvtop` script; exits."""
    code = invoke(sys.argv[1:] if args is None else args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        invoking.forget_stdout()
    sys.exit(code)


def invoke(args: Sequence[str]) -> int:
    """One command line; returns the exit code. See kvtop.invoking."""
    return invoking.invoke(app, args)
