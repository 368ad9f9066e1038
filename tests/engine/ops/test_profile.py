"""Profiles: the same logits bit for bit, every kernel timed once, work by hand, and when a step is due."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.events import GraphCaptured, KernelsProfiled
from engine.files.model_config import ModelConfig
from engine.model.batch import DeviceRows
from engine.model.decoder import Decoder
from engine.model.kv_cache import CacheSize, allocate
from engine.model.torch_runner import TorchRunner
from engine.ops.base import Ops, StepInput
from engine.ops.cpu import library as native
from engine.ops.cpu.native_ops import NativeCpuOps
from engine.ops.cpu.packed import CpuOps
from engine.ops.fp8 import Kv, parts
from engine.ops.profiling.roofline import Roofline, roofline, work
from engine.ops.profiling.step_profile import Profiler
from engine.ops.profiling.stopwatch import stopwatch
from engine.ops.reference import ReferenceOps
from engine.params import SamplingParams
from engine.step.runner import Plan, StepOutput
from engine.step.sequence import Request, Sequence
from tests.engine.rig import row_for
from tests.engine.tiny import CPU64, LLAMA, QWEN2, QWEN3, Driver, random_weights

CPU = torch.device("cpu")
ROOF = Roofline(50e9, 1e12)
NAMES = ["embed", "norm", "qkv", "qkv_prepare", "attention", "out", "gate_up", "silu_mul", "down", "head"]
WIDE = replace(QWEN3, num_layers=3, hidden_size=96, intermediate_size=160, head_dim=32, vocab_size=131)
MIXED = [(1, 40), (1, 1), (30, 41), (9, 300)]
DECODES = [(1, 40), (1, 17)]
needs_native = pytest.mark.skipif(native.load() is None, reason="no AVX-512-bf16 or no C compiler here")


class Steps:
    """A stopwatch that counts its stamps: between two neighbours lies one second."""

    def __init__(self) -> None:
        self.now = 0
        self.reached = 1 << 30
        """What the device has done so far."""
        self.held: list[int] = []

    def hold(self) -> None:
        self.held.append(self.now)

    def stamp(self) -> int:
        self.now += 1
        return self.now

    def passed(self, stamp: int) -> bool:
        return stamp <= self.reached

    def seconds(self, start: int, end: int) -> float:
        assert self.passed(end)
        return float(end - start)


def step(lengths: list[tuple[int, int]], wanted: list[int] | None = None) -> StepInput:
    """(tokens computed, tokens attended to) of each sequence; `wanted`: rows that sample, else the last ones."""
    r = random.Random(0)
    free = r.sample(range(1, 41), 40)
    rows = []
    for i, (n, total) in enumerate(lengths):
        seq = Sequence(
            i,
            Request(i, [r.randrange(100) for _ in range(total)], SamplingParams(temperature=0.0), 0.0),
        )
        seq.table = [free.pop() for _ in range(-(-total // 16))]
        rows.append(row_for(seq, total - n, n, True))
    batch, _ = DeviceRows(len(rows), 41, 16, CPU).apply(Plan(0, rows))
    if wanted is not None:
        batch.logit_rows = torch.tensor(wanted, dtype=torch.int64)
    return batch


def blank(c: ModelConfig, ops: Ops, fp8: bool = False) -> Kv:
    width, scale = (1, 4) if fp8 else (ops.dtype.itemsize, 0)
    cache = allocate(
        CacheSize(c.num_layers, c.num_kv_heads, c.head_dim, width, 16, 41, scale), CPU, ops.dtype
    )
    for half in parts(cache):
        half.fill_(1)
    return cache


OPS = [
    pytest.param(ReferenceOps, torch.float64, None, id="reference-fp64"),
    pytest.param(CpuOps, torch.float32, None, id="torch-fp32"),
    pytest.param(CpuOps, torch.bfloat16, "int8", id="torch-bf16-int8"),
    pytest.param(NativeCpuOps, torch.bfloat16, None, id="native", marks=needs_native),
    pytest.param(NativeCpuOps, torch.bfloat16, "int4", id="native-int4", marks=needs_native),
]


def make(kind: type[Ops], dtype: torch.dtype, c: ModelConfig, quantization: Any = None) -> Ops:
    if kind is NativeCpuOps:
        return NativeCpuOps(CPU, dtype, c, quantization)
    return kind(CPU, dtype, quantization)


@pytest.mark.parametrize(("kind", "dtype", "quantization"), OPS)
@pytest.mark.parametrize("fp8", [False, True], ids=["own KV", "fp8 KV"])
@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_logits_and_kv_are_those_of_any_forward(
    kind: type[Ops], dtype: torch.dtype, quantization: Any, fp8: bool, lengths: list[tuple[int, int]]
) -> None:
    ops = make(kind, dtype, WIDE, quantization)
    model = Decoder(WIDE, random_weights(WIDE, 5), ops, 400)
    batch, caches = step(lengths), [blank(WIDE, ops, fp8) for _ in range(2)]
    profiler = Profiler(model, roof=ROOF)
    with torch.inference_mode():
        plain = model.forward(batch, caches[0])
        assert profiler.begin(batch)
        profiled = profiler.forward(batch, caches[1])
        again = model.forward(batch, caches[1])
    assert torch.equal(plain, profiled) and torch.equal(plain, again)
    for a, b in zip(*map(parts, caches), strict=True):
        assert torch.equal(a, b)
    (reported,) = profiler.take()
    assert reported.names == [n for n in NAMES if n != "silu_mul" or kind is not NativeCpuOps]
    assert all(seconds > 0 for seconds in reported.seconds)
    assert sum(reported.seconds) <= reported.forward
    assert (reported.tokens, reported.sequences) == (len(batch.token_ids), len(lengths))
    assert (reported.bandwidth, reported.peak) == (50e9, 1e12)


def test_every_call_is_timed_once_and_told_when_the_device_has_made_it() -> None:
    ops, watch = ReferenceOps(CPU, torch.float32), Steps()
    model = Decoder(QWEN2, random_weights(QWEN2), ops, 400)
    profiler = Profiler(model, watch=watch, roof=ROOF, every=0)
    cache = blank(QWEN2, ops)
    watch.reached = 0
    ends = []
    for lengths in (MIXED, DECODES):
        batch = step(lengths)
        assert profiler.begin(batch)
        assert len(watch.held) == len(ends) + 1 and watch.held[-1] == watch.now  # held before the first stamp
        profiler.forward(batch, cache)
        ends.append(watch.now)
    assert profiler.take() == []
    watch.reached = ends[0]
    (first,) = profiler.take()
    assert first.sequences == len(MIXED)
    assert dict(zip(first.names, first.seconds, strict=True)) == dict(
        zip(first.names, first.calls, strict=True)
    )
    assert first.calls == [1, 5, 2, 2, 2, 2, 2, 2, 2, 1]
    assert first.forward == 2 * sum(first.calls) + 1  # two stamps around each, and one at either end
    watch.reached = ends[1] - 1
    assert profiler.take() == []
    watch.reached = ends[1]
    assert [p.sequences for p in profiler.take()] == [len(DECODES)]
    assert profiler.take() == []


def test_a_runner_tells_with_each_step_what_there_is_to_tell() -> None:
    runner = TorchRunner.from_weights(LLAMA, random_weights(LLAMA), CPU64)
    driver, reported = Driver(runner), []
    collect = runner.collect

    def collected(ticket: Any) -> StepOutput:
        output = collect(ticket)
        reported.append(output.events)
        return output

    runner.collect = collected  # type: ignore[method-assign]
    for _ in range(2):
        driver.add([1, 2, 3, 4, 5])
    driver.step(100)
    driver.step(1)
    captured = GraphCaptured(2, 1, 0.1)
    runner._events.append(captured)
    driver.step(1)
    driver.step(1)
    (prefill,), (decode,), *rest = reported
    assert (prefill.tokens, prefill.sequences) == (10, 2)
    assert (decode.tokens, decode.sequences) == (2, 2)
    assert rest == [[captured], []]


# ------------------------------------------------------------------------------------------ the work


def found(ops: Ops, c: ModelConfig, batch: StepInput, cache: Kv, logit: int) -> dict[str, tuple[int, int]]:
    model = Decoder(c, random_weights(c), ops, 400)
    return {n: (w.bytes, w.flops) for n, w in work(ops, model.weights, batch, cache, logit).items()}


def test_bytes_and_flops_of_a_composed_step() -> None:
    """Two layers, 64 wide, 4 heads and 2 KV heads of 16, 112 between, 199 tokens; float32; 4 tokens in a step, of
    which one sees 40 and three see 8, 9 and 10."""
    ops = ReferenceOps(CPU, torch.float32)
    batch = step([(1, 40), (3, 10)], wanted=[3])
    token_kv = 2 * 2 * 16 * 4
    assert found(ops, LLAMA, batch, blank(LLAMA, ops), 4) == {
        "embed": (4 * 64 * 8, 0),
        # 17 rows are normed; the first four have nothing to add yet.
        "norm": (17 * 64 * 8 + 13 * 64 * 8, 5 * 17 * 64),
        "qkv": (2 * 4 * (128 * 64 + 4 * 64 + 4 * 128), 2 * 2 * 4 * 64 * 128),
        "qkv_prepare": (2 * (4 * 128 * 4 + 4 * 64 * 4 + 4 * token_kv), 2 * 4 * 10 * 128),
        "attention": (2 * (50 * token_kv + 2 * 4 * 64 * 4), 2 * 4 * (40 + 8 + 9 + 10) * 64),
        "out": (2 * 4 * (64 * 64 + 4 * 64 + 4 * 64), 2 * 2 * 4 * 64 * 64),
        "gate_up": (2 * 4 * (224 * 64 + 4 * 64 + 4 * 224), 2 * 2 * 4 * 64 * 224),
        "silu_mul": (2 * 4 * 3 * 4 * 112, 2 * 5 * 4 * 112),
        "down": (2 * 4 * (64 * 112 + 4 * 112 + 4 * 64), 2 * 2 * 4 * 64 * 112),
        "head": (4 * (199 * 64 + 64 + 199), 2 * 64 * 199),
    }
    none = found(ops, LLAMA, step([(3, 10)], wanted=[]), blank(LLAMA, ops), 4)
    assert none["head"] == (0, 0)
    assert none["norm"] == (12 * 64 * 8 + 9 * 64 * 8, 5 * 12 * 64)


@needs_native
def test_bytes_of_a_fused_step_in_8_bits() -> None:
    """One layer, 96 wide, 4 heads and 2 KV heads of 32, 160 between: a residual in float32, INT8 weights with a
    scale a row, FP8 KV with a scale a head, logits in float32; one token that sees 40."""
    c = replace(WIDE, architecture="qwen2", qk_norm=False, qkv_bias=True, num_layers=1, vocab_size=199)
    ops = NativeCpuOps(CPU, torch.bfloat16, c, "int8")
    got = found(ops, c, step([(1, 40)]), blank(c, ops, fp8=True), 4)
    token_kv = 2 * 2 * (32 + 4)
    assert {name: moved for name, (moved, _) in got.items()} == {
        "embed": 96 * 2 + 96 * 4,
        "norm": 3 * 96 * (4 + 2),
        "qkv": 256 * 96 + 256 * 4 + 256 * 4 + 96 * 2 + 256 * 2,  # codes, scales, bias, in, out
        "qkv_prepare": 256 * 2 + 128 * 2 + token_kv,
        "attention": 40 * token_kv + 2 * 128 * 2,
        "out": 96 * 128 + 96 * 4 + 128 * 2 + 2 * 96 * 4,
        "gate_up": 320 * 96 + 320 * 4 + 96 * 2 + 160 * 2,
        "down": 96 * 160 + 96 * 4 + 160 * 2 + 2 * 96 * 4,
        "head": 199 * 96 + 199 * 4 + 96 * 2 + 199 * 4,
    }
    assert got["gate_up"][1] == 2 * 96 * 320


# ------------------------------------------------------------------------------------------ when, how


def reference() -> Decoder:
    return Decoder(LLAMA, random_weights(LLAMA), ReferenceOps(CPU, torch.float32), 400)


def test_a_step_of_each_kind_is_due_every_so_often() -> None:
    now, watch = 100.0, Steps()
    profiler = Profiler(reference(), 10.0, watch=watch, roof=ROOF, clock=lambda: now)
    prefill, decode = step([(1, 3), (5, 9)]), step(DECODES)
    assert [profiler.begin(b) for b in (prefill, decode, prefill, decode)] == [True, True, False, False]
    now += 9.9
    assert not profiler.begin(prefill) and not profiler.begin(decode)
    now += 0.1
    assert profiler.begin(decode) and not profiler.begin(decode)
    now += 100
    assert profiler.begin(prefill) and profiler.begin(decode)
    assert not profiler.begin(prefill)  # what was missed meanwhile is not made up for
    assert len(watch.held) == 5


def test_the_roofline_is_measured_once_and_what_cannot_be_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roofline.cache_clear()
    found = roofline(CPU, torch.float32, torch.get_num_threads())
    assert found.bandwidth is not None and 1e8 < found.bandwidth < 1e13
    assert found.peak is not None and 1e8 < found.peak < 1e15

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "ones", full)
    assert Profiler(reference())._roof is found
    assert roofline(CPU, torch.bfloat16, 1) == Roofline(None, None)
    roofline.cache_clear()


def test_on_a_gpu_events_are_recorded_and_only_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins: no GPU has run this."""
    done: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.at = Event.made

        def record(self) -> None:
            done.append(f"record {self.at}")

        def query(self) -> bool:
            return self.at < 3

        def elapsed_time(self, other: Event) -> float:
            return 7.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"sleep {cycles > 10**6}"))
    watch = stopwatch(torch.device("cuda"))
    watch.hold()
    stamps = [watch.stamp() for _ in range(3)]
    assert done == ["sleep True", "record 1", "record 2", "record 3"]
    assert [watch.passed(s) for s in stamps] == [True, True, False]
    assert watch.seconds(stamps[0], stamps[1]) == pytest.approx(0.007)


def test_the_c_kernels_count_in_the_order_that_python_reads() -> None:
    header = (Path(native.__file__).parent / "kernels_c" / "kernels.h").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum \{ (EMBED, .*), TIMED \}", header)
    assert names.lower().split(", ") == list(native.KERNELS)


def test_a_profile_is_an_event_that_survives_json() -> None:
    from engine.events import StepBatch, decode_batch, encode_batch

    event = KernelsProfiled(8, 8, ["qkv"], [30], [0.001], [1], [2], 0.002)
    assert decode_batch(encode_batch(StepBatch(0, 0.0, 0, 0, [event]))).events == [event]
