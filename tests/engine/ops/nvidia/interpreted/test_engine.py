"""The whole engine through the Triton ops: token for token what the reference ops give."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.files.model_config import ModelConfig
from engine.model.graphs import DecodeGraphs
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepInput
from engine.params import SamplingParams
from engine.step.core import EngineCore
from tests.engine.ops.nvidia.interpreted.test_graphs import fake_capture
from tests.engine.tiny import LLAMA3, QWEN3, Driver, random_weights

CONFIG = EngineConfig(
    device="cpu", dtype="float32", ops="reference", num_blocks=33, block_size=8, max_model_len=40, threads=1
)  # fmt: skip
PROMPTS = [[(31 * i + 7 * j) % 199 for j in range(n)] for i, n in enumerate((1, 8, 9, 26))]
NEW = 4


@pytest.mark.parametrize(
    ("model", "chunk", "fp8", "temperature"),
    [(LLAMA3, 7, True, 0.0), (QWEN3, 7, False, 0.0), (QWEN3, 1000, False, 0.9)],
    ids=["llama-fp8-kv", "qwen3", "qwen3-sampled"],
)
def test_tokens_are_the_references(model: ModelConfig, chunk: int, fp8: bool, temperature: float) -> None:
    config = replace(CONFIG, kv_cache_dtype="fp8" if fp8 else "auto")
    weights = random_weights(model)
    said = []
    for ops in ("reference", "triton"):
        runner = TorchRunner.from_weights(model, dict(weights), replace(config, ops=ops))  # type: ignore[arg-type]
        assert runner.ops_name == ops
        if isinstance(runner.cache, torch.Tensor):
            with torch.inference_mode():
                runner.cache.fill_(float("nan"))
        driver = Driver(runner, seed=chunk)
        top_p, top_k = (0.9, 50) if temperature else (1.0, 0)
        params = [SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=i) for i in range(4)]
        seqs = [driver.add(p, q, branch=i) for i, (p, q) in enumerate(zip(PROMPTS, params, strict=True))]
        while todo := [s for s in seqs if len(s) < s.request.prompt_tokens + NEW]:
            driver.step(chunk if ops == "triton" else 1000, todo)
        said.append([list(s.tokens) for s in seqs])
    assert said[0] == said[1]


def test_it_really_interprets() -> None:
    from engine.ops.nvidia.kernels.common import INTERPRETED

    assert INTERPRETED and os.environ["TRITON_INTERPRET"] == "1"


def noted(upload: Callable[[Any], Any], said: list[str], what: str) -> Callable[[Any], Any]:
    """`upload`, which says `what` each time."""

    def watched(arrays: Any) -> Any:
        said.append(what)
        return upload(arrays)

    return watched


@pytest.mark.conformance(85)
def test_launched_ahead_and_through_graphs_it_still_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay on the device from step to step, tables and work lists change while a step is in flight."""
    model, weights = replace(LLAMA3, num_layers=1), random_weights(replace(LLAMA3, num_layers=1))
    said: list[list[list[int]]] = []
    for ops, ahead in (("reference", False), ("triton", True)):
        config = replace(CONFIG, ops=ops, async_scheduling=ahead, max_num_batched_tokens=16, max_num_seqs=3)  # type: ignore[arg-type]
        runner = TorchRunner.from_weights(model, dict(weights), config)
        replayed: list[int] = []
        sent: list[str] = []
        if ahead:
            monkeypatch.setattr(runner._rows, "_upload", noted(runner._rows._upload, sent, "a step"))
            monkeypatch.setattr(runner.model.ops, "_upload", noted(runner.model.ops._upload, sent, "more"))  # type: ignore[attr-defined]
            runner._graphs = DecodeGraphs(runner.model, runner.cache, 3, fake_capture)  # type: ignore[arg-type]
            forward = runner._graphs.forward

            def counted(batch: StepInput, forward=forward, replayed=replayed) -> torch.Tensor | None:  # type: ignore[no-untyped-def]
                logits = forward(batch)
                replayed += [len(batch.q_lens)] * (logits is not None)
                return logits  # type: ignore[no-any-return]

            runner._graphs.forward = counted  # type: ignore[method-assign]
        core = EngineCore(
            config, runner, EventLog(iter(range(10**6)).__next__, lambda batch: None), hash_seed=1
        )
        requests = [
            core.add_request(i, p, SamplingParams(max_tokens=4 + i, temperature=0.8 * (i % 2), seed=i))
            for i, p in enumerate(PROMPTS)
        ]
        while core.has_work:
            core.step()
        said.append([list(r.branches[0].output_ids) for r in requests])
        assert not ahead or (set(replayed) >= {1, 2} and core.ahead == 1)
        # Tokens, tables, the work list and the sampler's words: one copy a step.
        assert not ahead or (sent == ["a step"] * len(sent) and len(sent) >= core.log.step)
    assert said[0] == said[1]
