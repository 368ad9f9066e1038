"""The simulated engine: the live engine's own books on a virtual clock, and the article's examples on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine import events as ev
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import SetupError
from engine.params import SamplingParams
from engine.sim import workload as w
from engine.sim.simulated import Simulation
from kvtop.record.verify import verify_batches
from kvtop.state.dashboard import DashboardState

H100 = Simulation("llama-3.1-70b", "h100", "int4")
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Run:
    """An engine that was asked, has answered everything and is stopped; `state` has seen it all."""

    def __init__(
        self,
        simulation: Simulation,
        ask: Callable[[Engine], list[int]],
        *,
        wall: float = 60.0,
        interval: float = 1.0,
        **knobs: Any,
    ) -> None:
        config = EngineConfig(**{"hash_seed": 1, **knobs})
        engine = Engine(config, build=simulation.build, device_interval=interval)
        self.batches: list[ev.StepBatch] = []
        self.state = DashboardState(strict=True)
        done = threading.Event()
        finished = 0

        def sink(batch: ev.StepBatch) -> None:
            nonlocal finished
            self.batches.append(batch)
            finished += sum(type(e) is ev.RequestFinished for e in batch.events)
            if engine.load_over and finished >= self.asked + engine.load_requests:
                done.set()

        self.asked = 1 << 30  # until everything is asked nothing is over
        engine.subscribe(sink)
        engine.start()
        engine.wait_ready(wall)
        engine.pause()  # so that all that is asked comes at the same virtual moment
        self.asked = len(ask(engine))
        engine.resume()
        assert done.wait(wall), "the simulated engine did not come to an end"
        engine.stop()
        for batch in self.batches:
            self.state.apply(batch)

    def events(self, kind: type[Any]) -> list[Any]:
        return [e for b in self.batches for e in b.events if type(e) is kind]


def asking(*prompts: Sequence[int], params: SamplingParams = ONE) -> Callable[[Engine], list[int]]:
    return lambda engine: [engine.submit(prompt, params) for prompt in prompts]


def loaded(*loads: w.Workload) -> Callable[[Engine], list[int]]:
    def ask(engine: Engine) -> list[int]:
        for load in loads:
            engine.play(load)
        return []

    return ask


def one_after_another(*prompts: Sequence[int], simulation: Simulation = H100) -> DashboardState:
    """Each prompt is asked when the one before is answered: a closed loop of one user."""
    state = DashboardState(strict=True)
    engine = Engine(EngineConfig(hash_seed=1), build=simulation.build)
    ended = threading.Event()

    def sink(batch: ev.StepBatch) -> None:
        state.apply(batch)
        if any(type(e) is ev.RequestFinished for e in batch.events):
            ended.set()

    engine.subscribe(sink)
    engine.start()
    for prompt in prompts:
        ended.clear()
        engine.submit(prompt, ONE)
        assert ended.wait(60)
    engine.stop()
    return state


# ------------------------------------------------------------------------------ the article's examples


def system_and(question: int) -> list[int]:
    return [*range(300, 2300), *(10_000 * question + i for i in range(200))]


@pytest.mark.parametrize(
    ("simulation", "least", "most"),
    [
        # The article's 100 to 200 ms: four GPUs, or one of the next generation.
        (Simulation("llama-3.1-70b", "4xh100", "fp8"), 0.1, 0.2),
        (Simulation("llama-3.1-70b", "b200", "fp8"), 0.1, 0.2),
        # One H100 would take 0.277 s if its tensor cores ran at their full BF16 rate.
        (H100, 0.35, 0.5),
    ],
    ids=["4xh100-fp8", "b200-fp8", "h100-int4"],
)
def test_a_system_prompt_of_2000_tokens(simulation: Simulation, least: float, most: float) -> None:
    state = one_after_another(system_and(1), system_and(2), simulation=simulation)
    cold, hit = state.requests[1], state.requests[2]
    assert -(-cold.prompt_tokens // 16) == 138
    assert (cold.hit_blocks, hit.hit_blocks) == (0, 125)
    assert -(-(hit.prompt_tokens - hit.cached_tokens) // 16) == 13
    assert state.started is not None
    assert 125 * state.started.bytes_per_block == 625 << 20
    assert cold.ttft is not None
    assert hit.ttft is not None
    assert least <= cold.ttft - hit.ttft <= most, "what computing the 2,000 tokens takes"


def test_the_pool_of_the_article() -> None:
    """80 GB, 35 GB of weights, 42 GB for KV."""
    state = one_after_another([1, 2, 3])
    started = state.started
    assert started is not None
    assert started.source == "simulated"
    assert started.weights_bytes == pytest.approx(35.3e9, rel=0.01)
    assert started.bytes_per_block == 16 * 327_680
    assert started.num_blocks * started.bytes_per_block == pytest.approx(42e9, rel=0.01)


def fixed(tokens: int, output: int) -> w.Unique:
    return w.Unique(w.Length(tokens, tokens, tokens), w.Length(output, output, output))


@pytest.mark.parametrize("chunked", [True, False])
def test_100_000_tokens_beside_decodes(chunked: bool) -> None:
    """In one piece it stalls everybody for as long as it takes; in chunks a decode waits for one chunk."""
    talk = w.Stream("talk", 4, w.Bursts(1e6, 4), fixed(200, 400))
    page = w.Stream("page", 1, w.Bursts(1e6, 1), fixed(100_000, 1), start=1.0)
    run = Run(
        H100,
        loaded(w.Workload("long", "", 0, (talk, page))),
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=2048 if chunked else 101_000,
        max_model_len=100_500,
        max_num_seqs=8,
    )
    gap, ttft = max(run.state.requests[1].itl), run.state.requests[5].ttft
    assert ttft is not None
    assert 40 < ttft < 60
    steps = [e for e in run.events(ev.StepScheduled) if max(e.n) > 200]
    if chunked:
        assert gap < 1.6
        assert len(steps) == -(-100_000 // 2044)
        assert all(sum(e.n) <= 2048 for e in steps)
    else:
        assert 0.98 * ttft < gap < ttft
        assert [sorted(e.n) for e in steps] == [[1, 1, 1, 1, 100_000]]


def test_10_000_tokens_beside_one_decode_with_a_budget_of_2048() -> None:
    """B gets a token every step while A is computed in five."""
    spec = w.Workload(
        "a and b",
        "",
        0,
        (
            w.Stream("b", 1, w.Bursts(1e6, 1), fixed(16, 400)),
            w.Stream("a", 1, w.Bursts(1e6, 1), fixed(10_000, 5), start=2.0),
        ),
    )
    run = Run(H100, loaded(spec), max_num_batched_tokens=2048)
    steps = [dict(zip(e.seq_ids, e.n, strict=True)) for e in run.events(ev.StepScheduled)]
    (b,), together = list(steps[0]), [s for s in steps if any(n > 1 for n in s.values())][1:]
    assert [n for s in together for q, n in s.items() if q != b] == [2047, 2047, 2047, 2047, 1812]
    assert all(s[b] == 1 for s in together)
    assert run.state.requests[2].t_arrival == 2.0


# ---------------------------------------------------------------------------------------- the stream


def small_hour(part: int = 20) -> w.Workload:
    hour = w.load_workload("hour")
    return replace(hour, streams=tuple(replace(s, requests=max(2, s.requests // part)) for s in hour.streams))


def test_an_hour_in_small_is_true_and_the_same_each_time() -> None:
    load = small_hour()
    first, again = (
        Run(H100, loaded(load), num_blocks=2000, max_num_seqs=16, interval=interval)
        for interval in (1.0, 1.0)
    )
    report = verify_batches(first.batches)
    assert report.ok, report.violations[:3]
    started = [i for i, e in enumerate(first.batches[0].events) if type(e) is ev.EngineStarted]
    assert started == [0], "nothing was reported before"
    assert first.batches[1:] == again.batches[1:]
    assert len(first.state.requests) == load.requests
    assert all(v.finish_reason == "length" for v in first.state.requests.values())
    assert first.state.pool.evictions > 1000
    assert (first.state.cache.hit_rate() or 0) > 0.2


def test_what_a_step_takes_is_what_its_events_say() -> None:
    run = Run(H100, asking(list(range(300, 900)), params=SamplingParams(max_tokens=30, ignore_eos=True)))
    steps = [(b.t, e) for b in run.batches for e in b.events if type(e) is ev.StepCompleted]
    for (before, _), (t, e) in pairwise(steps):
        assert t - before == pytest.approx(e.t_prepare + e.t_forward + e.t_sample)
        assert e.t_gpu == pytest.approx(e.t_forward + e.t_sample)
        assert e.t_schedule == 0
    assert steps[5][1].t_forward == pytest.approx(0.02, rel=0.2)


def test_the_device_tells_of_itself() -> None:
    run = Run(H100, asking(list(range(300, 900)), params=SamplingParams(max_tokens=200, ignore_eos=True)))
    samples = run.events(ev.DeviceSample)
    assert 3 <= len(samples) <= 5, "one a second of about four"
    for s in samples:
        assert 80 < s.util <= 100
        assert 1e12 < s.bandwidth < 3.35e12
        assert s.memory < s.memory_total == 80 << 30
        assert (s.power, s.temperature) == (None, None), "what a model cannot know"
    started = run.events(ev.EngineStarted)[0]
    assert started.capabilities == ["blocks", "timings", "text", "device"]
    assert started.device == "H100"
    quiet = Run(H100, asking([1, 2, 3]), interval=0)
    assert not quiet.events(ev.DeviceSample)
    assert "device" not in quiet.events(ev.EngineStarted)[0].capabilities


def test_its_text_is_told_and_ends_with_a_sentence() -> None:
    params = SamplingParams(max_tokens=500)
    run = Run(H100, lambda e: [e.submit("Where is the lighthouse?", params, system="Be kind.")])
    view = run.state.requests[1]
    assert view.finish_reason == "stop"
    assert view.text.startswith(" The ")
    assert view.text.endswith(".")
    assert 24 <= len(view.output_ids) <= 24 + 200 + 14


def test_an_answer_does_not_depend_on_who_else_is_there() -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=5)
    prompts = [[100 + i, *range(400, 1000)] for i in range(12)]
    alone = Run(H100, asking(prompts[0], params=params))
    crowded = Run(H100, asking(*prompts, params=params), num_blocks=200, max_num_seqs=12)
    assert crowded.state.requests.preemptions > 0
    assert crowded.state.requests[1].output_ids == alone.state.requests[1].output_ids


# -------------------------------------------------------------------------------------- time and life


def test_paced_it_keeps_up_with_the_wall_and_stops_at_once() -> None:
    engine = Engine(EngineConfig(hash_seed=1), build=replace(H100, speed=40.0).build)
    batches: list[ev.StepBatch] = []
    ended = threading.Event()

    def sink(batch: ev.StepBatch) -> None:
        batches.append(batch)
        if any(type(e) is ev.RequestFinished for e in batch.events):
            ended.set()

    engine.subscribe(sink)
    engine.start()
    engine.wait_ready(30)
    start, t = time.perf_counter(), engine.clock()
    engine.submit(list(range(300, 900)), SamplingParams(max_tokens=400, ignore_eos=True))
    assert ended.wait(30)
    took = time.perf_counter() - start
    assert engine.clock() - t >= 8.0
    assert took >= 0.19, "eight seconds at forty times their speed"
    engine.submit([i % 50_000 for i in range(100_000)], ONE)
    stopping = time.perf_counter()
    engine.stop()
    assert time.perf_counter() - stopping < 5, "the long step under way does not hold it up"
    assert type(batches[-1].events[-1]) is ev.EngineStopped
    assert verify_batches(batches).ok


def test_paused_no_time_passes() -> None:
    engine = Engine(EngineConfig(hash_seed=1), build=replace(H100, speed=1000.0).build)
    engine.start()
    engine.wait_ready(30)
    engine.pause()
    engine.reset_prefix_cache()  # heard after the pause
    seen = threading.Event()
    engine._post(seen.set)
    assert seen.wait(30)
    a = engine.clock()
    time.sleep(0.02)
    assert engine.clock() == a
    engine.stop()


def test_a_load_beside_another_is_told_and_left_out() -> None:
    load = small_hour(200)

    run = Run(H100, loaded(load, load))
    assert [e.message for e in run.events(ev.EngineError)] == ["a load is under way: hour was not started"]
    assert len(run.state.requests) == load.requests


# ----------------------------------------------------------------------------------------- what fits


def started(simulation: Simulation, **knobs: Any) -> ev.EngineStarted:
    engine = Engine(EngineConfig(**knobs), build=simulation.build)
    batches: list[ev.StepBatch] = []
    engine.subscribe(batches.append)
    engine.start()
    try:
        engine.wait_ready(30)
    finally:
        engine.stop()
    event = batches[0].events[0]
    assert type(event) is ev.EngineStarted
    return event


@pytest.mark.parametrize(
    ("model", "machine", "weights", "kv", "per_token"),
    [
        ("qwen3-235b-a22b", "8xh100", "fp8", "auto", 192_512),
        ("minimax-m2.5", "4xh200", "fp8", "auto", 253_952),
        ("llama-3.1-70b", "h200", "int8", "fp8", 163_840),
        ("deepseek-v3", "8xh200", "fp8", "auto", 70_272),
        ("qwen3-8b", "rtx-4070", "int4", "fp8", 73_728),
        ("gemma-3-27b", "b200", None, "auto", None),
        ("smollm2-135m", "l4", None, "float32", 46_080),
    ],
)
def test_any_model_on_any_gpu(
    model: str, machine: str, weights: str | None, kv: Any, per_token: int | None
) -> None:
    e = started(Simulation(model, machine, weights, kv))
    assert e.model == model
    assert per_token is None or e.bytes_per_block == 16 * per_token
    assert e.num_blocks > 100
    assert e.knobs.weights == e.dtype


def test_with_more_gpus_than_heads_some_hold_the_same() -> None:
    four, eight, sixteen = (
        started(Simulation("qwen3-235b-a22b", f"{n}xb200", "fp8")).num_blocks for n in (4, 8, 16)
    )
    assert eight < 1.5 * four
    assert sixteen < 2.3 * eight


@pytest.mark.parametrize(
    ("simulation", "knobs", "says"),
    [
        (("llama-3.1-70b", "h100"), {}, "does not fit on H100: 141 GB of bf16 weights, 86 GB x 0.9; try"),
        (("llama-3.1-405b", "8xh100"), {}, "does not fit on 8x H100"),
        (
            ("llama-3.1-70b", "h100", "int4"),
            {"num_blocks": 9000},
            "9,000 blocks are not possible on H100: 2 to 8,017",
        ),
        (("llama-3.1-70b", "h100", "int4"), {"kv_cache_memory": 1 << 20}, "0 blocks are not possible"),
        (
            ("llama-3.1-70b", "h100", "int4"),
            {"max_model_len": 200_000},
            "--max-model-len 200,000 is over what 8,016",
        ),
        (("llama-3.1-8b", "h100"), {"max_model_len": 200_000}, "is over the model's limit: 131,072 tokens"),
        (("llama-3.1-8b", "h1000"), {}, "no device 'h1000'"),
        (("llama-4-8b", "h100"), {}, "no model"),
        (("llama-3.1-8b", "h100", "int3"), {}, "--weights int3: one of"),
        (("llama-3.1-8b", "h100", "x" * 300), {}, "--weights xxx"),
        (("llama-3.1-8b", "h100", None, "auto", 0.0), {}, "--speed must be over 0"),
    ],
)
def test_what_does_not_go_is_told_in_one_line(
    simulation: tuple[Any, ...], knobs: dict[str, Any], says: str
) -> None:
    with pytest.raises(SetupError) as error:
        started(Simulation(*simulation), **knobs)
    assert says in str(error.value)
    assert len(str(error.value)) <= 200
