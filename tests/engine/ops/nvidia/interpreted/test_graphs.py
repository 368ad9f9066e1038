"""Decode graphs with a fake capture: buckets, padding, static buffers, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.events import GraphCaptured
from engine.model.decoder import Decoder
from engine.model.graphs import BUCKETS, DecodeGraphs
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepInput
from engine.ops.fp8 import Kv
from engine.ops.nvidia.triton import TritonOps
from tests.engine.tiny import LLAMA3, Driver, random_weights

MODEL = replace(LLAMA3, num_layers=1)
CONFIG = EngineConfig(
    device="cpu", dtype="float32", ops="triton", num_blocks=33, block_size=8, max_model_len=40, threads=1
)  # fmt: skip


def fake_capture(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """As a graph does: the result is one buffer, rewritten from whatever the static buffers then hold."""
    out = torch.full_like(body(), float("nan"))

    def replay() -> Tensor:
        return out.copy_(body())

    return replay


def test_decodes_by_bucket_say_the_same() -> None:
    weights = random_weights(MODEL)
    said: list[list[list[int]]] = []
    captured: list[GraphCaptured] = []
    replayed: list[int] = []
    for graphed in (False, True):
        runner = TorchRunner.from_weights(MODEL, dict(weights), CONFIG)
        model = runner.model
        assert isinstance(model, Decoder)
        if graphed:
            graphs = DecodeGraphs(model, runner.cache, 3, fake_capture, captured.append)
            eager = model.forward

            def forward(batch: StepInput, cache: Kv, graphs=graphs, eager=eager) -> Tensor:  # type: ignore[no-untyped-def]
                logits = graphs.forward(batch)
                if logits is None:
                    return eager(batch, cache)
                replayed.append(len(logits))
                return logits

            model.forward = forward  # type: ignore[method-assign]
        driver = Driver(runner, seed=3)
        seqs = [driver.add([(5 * i + j) % 199 for j in range(3 + 4 * i)]) for i in range(4)]
        driver.step(1000)
        for only in ([0, 1, 2], [1], [0, 2], [0, 1, 2, 3]):
            driver.step(1, [seqs[i] for i in only])
        said.append([list(s.tokens) for s in seqs])
    assert said[0] == said[1]
    assert replayed == [3, 1, 2]  # four are over the largest bucket, a prompt has no graph
    assert [(e.bucket, e.graphs) for e in captured] == [(3, 1), (1, 2), (2, 3)]
    assert all(e.seconds > 0 for e in captured)


def test_padding_writes_nothing() -> None:
    runner = TorchRunner.from_weights(MODEL, random_weights(MODEL), CONFIG)
    assert isinstance(runner.model, Decoder)
    graphs = DecodeGraphs(runner.model, runner.cache, 8, fake_capture)
    driver = Driver(runner)
    seqs = [driver.add([1 + i] * 3) for i in range(3)]
    driver.step(1000)
    eager = runner.model.forward
    changed = []

    def forward(batch: StepInput, cache: Kv) -> Tensor:
        assert isinstance(cache, Tensor)
        before = cache.clone()
        logits = graphs.forward(batch)
        assert logits is not None
        changed.append(int((cache != before)[0, 0].any(-1).any(1).sum()))
        torch.testing.assert_close(logits, eager(batch, cache))
        return logits

    runner.model.forward = forward  # type: ignore[method-assign]
    for only in (seqs, seqs[:1], seqs[1:]):
        driver.step(1, only)
    assert changed == [3, 1, 2]


def test_no_step_has_more_work_than_there_is_room_for() -> None:
    runner = TorchRunner.from_weights(MODEL, random_weights(MODEL), CONFIG)
    model = runner.model
    assert isinstance(model, Decoder) and isinstance(model.ops, TritonOps)
    ops = model.ops
    seen: list[Tensor] = []
    empty = torch.empty(0)
    for rows in BUCKETS[:6]:
        batch = StepInput(*(empty,) * 8, q_lens=[1] * rows, kv_lens_host=[1] * rows)
        plan = ops.static_plan(batch, model.rope)
        for lens in (
            [1] * rows,
            [40_000] * rows,
            [40_000] + [1] * (rows - 1),
            [33 * (i + 1) for i in range(rows)],
        ):
            ops.fill(plan, lens)
            seen.append(plan.groups[0].work[:, 0].unique())
            assert set(seen[-1].tolist()) - {-1} == set(range(rows))


def test_where_nothing_can_be_captured_steps_run_as_before() -> None:
    runner = TorchRunner.from_weights(MODEL, random_weights(MODEL), CONFIG)
    assert isinstance(runner.model, Decoder)

    def refuse(body: object) -> Callable[[], Tensor]:
        raise RuntimeError("no graphs here")

    reported: list[GraphCaptured] = []
    runner._graphs = DecodeGraphs(runner.model, runner.cache, 8, refuse, reported.append)
    driver = Driver(runner)
    seq = driver.add([1, 2, 3])
    for _ in range(3):
        driver.step(1000)
    assert len(seq) == 6
    assert [(e.bucket, e.graphs) for e in reported] == [(1, 0)]  # it is not tried again
