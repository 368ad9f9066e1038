"""The whole engine with scheduler, paging, graphs and sampling: steps one after another, and asynchronous steps.

Qwen3-8B's shape with random weights in bfloat16. This is the speed that a user sees; `model` measures the forward only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.events import StepCompleted, TokensSampled
from engine.model.decoder import Decoder
from engine.model.torch_runner import TorchRunner
from engine.ops.nvidia.triton import TritonOps
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.runner import Plan
from tests.gpu.machine import Machine, Table
from tests.gpu.model import TINY, random
from tests.gpu.problems import QWEN3_8B


def run(m: Machine) -> list[Table]:
    """Decode tokens a second, from the first step in which all sequences decode to the last. busy: GPU time of those
    steps / wall time. alike: sequences with the same tokens in both ways. A single sequence must be alike, because it
    runs the same kernels. With several, batches differ, and random weights give near-ties that may go either way."""
    c, dtype = QWEN3_8B if m.real else TINY, torch.bfloat16
    context, tokens = (2048, 128) if m.real else (20, 4)
    columns = ("at once", "tok/s in turn", "busy", "tok/s asynchronous", "busy", "gain", "alike")
    table = Table("Engine, Qwen3-8B's shape, 2,048 tokens of context", columns)
    if m.real and m.free() < 2 * 8_190_735_360 * 1.3:
        table.rows.append(("", "no memory", *[""] * 5))
        return [table]
    longest = context + tokens + 1
    with torch.inference_mode():
        ops = TritonOps(m.device, dtype, c)
        model = Decoder(replace(c, max_position_embeddings=longest), random(c, m.device, dtype), ops, longest)
    for batch in (1, 8, 64) if m.real else (1, 2):
        blocks = batch * -(-longest // 16) + 2
        if m.real and blocks * 16 * 147_456 > 0.9 * m.free():
            table.rows.append((str(batch), "no memory", *[""] * 5))
            continue
        config = EngineConfig(
            device=m.device.type, dtype="bfloat16", ops="triton", num_blocks=blocks, max_num_seqs=batch,
            max_num_batched_tokens=8192, enable_prefix_caching=False,
        )  # fmt: skip
        found = []
        try:
            for ahead in (False, True):
                runner = TorchRunner.over(model, replace(config, async_scheduling=ahead))
                found.append(_decode(runner, batch, context, tokens, c.vocab_size))
                del runner
                if m.real:
                    torch.cuda.empty_cache()
        except RuntimeError as error:
            table.rows.append((str(batch), f"{error:.80}", *[""] * 4, "WRONG"))
            continue
        (turn, turn_busy, turn_said), (beside, beside_busy, beside_said) = found
        alike = sum(a == b for a, b in zip(turn_said, beside_said, strict=True))
        table.rows.append((
            str(batch), f"{turn:,.0f}", f"{turn_busy:.0%}", f"{beside:,.0f}", f"{beside_busy:.0%}",
            f"x {beside / turn:.2f}", f"{alike} of {batch}" if alike or batch > 1 else "WRONG",
        ))  # fmt: skip
    return [table]


def _never_waits(launch: Callable[[Plan], Any]) -> Callable[[Plan], Any]:
    """`launch` that raises if a decode step waits for the GPU. The first steps may wait: they compile and capture."""
    decodes = 0

    def watched(plan: Plan) -> Any:
        nonlocal decodes
        decodes += all(row.n == 1 for row in plan.rows)
        if decodes > 8:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def _decode(
    runner: TorchRunner, batch: int, context: int, tokens: int, vocab: int
) -> tuple[float, float, list[list[int]]]:
    """(tokens a second, part of the time in which the GPU computed, the tokens of each sequence). Raises RuntimeError
    if a step fails. With steps launched ahead, a step that waits for the GPU fails."""
    if runner.ahead and runner.device == "cuda":
        runner.launch = _never_waits(runner.launch)  # type: ignore[method-assign]
    steps: list[tuple[float, int, float]] = []

    def sink(found: Any) -> None:
        sampled = sum(sum(e.counts) for e in found.events if isinstance(e, TokensSampled))
        gpu = sum(e.t_gpu or 0.0 for e in found.events if isinstance(e, StepCompleted))
        if any(isinstance(e, StepCompleted) for e in found.events):
            steps.append((time.perf_counter(), sampled, gpu))

    core = EngineCore(runner.config, runner, EventLog(time.perf_counter, sink), hash_seed=1)
    requests = [
        core.add_request(
            i,
            [(7919 * i + 31 * j) % vocab for j in range(context)],
            SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
        )
        for i in range(batch)
    ]
    while core.has_work:
        core.step()
    for request in requests:
        if request.error:
            raise RuntimeError(request.error)
    # From the first step that gives every sequence a token, all decode. By then the graphs are captured.
    first = next(i for i, (_, sampled, _) in enumerate(steps) if sampled == batch) + 1
    last = max(i for i, (_, sampled, _) in enumerate(steps) if sampled == batch)
    span = steps[last][0] - steps[first][0]
    between = steps[first + 1 : last + 1]
    said = [list(r.branches[0].output_ids) for r in requests]
    return sum(n for _, n, _ in between) / span, sum(gpu for *_, gpu in between) / span, said
