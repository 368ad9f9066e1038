"""The reference ops on a GPU give the same tokens, samples and copies as on the CPU, for each format of weights.

Without a GPU the same tests run on the CPU with other chunks. They show that the code runs and that chunks change
nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.model.torch_runner import TorchRunner
from engine.ops.reference import ReferenceOps
from engine.params import SamplingParams
from tests.engine.tiny import CPU64, MODELS, Driver, random_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [*((name, None) for name in MODELS), *(("qwen3-untied", form) for form in ("int8", "int4", "fp8"))]


@pytest.mark.parametrize(("name", "form"), CASES, ids=[f"{n}-{f}" if f else n for n, f in CASES])
def test_tokens_and_samples_are_those_of_the_cpu(name: str, form: Any) -> None:
    if form == "fp8" and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 and refuses it")
    model = MODELS[name]
    prompts = [[(7 * i + j) % 199 for j in range(1 + 15 * i)] for i in range(6)]
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=3)
    said = []
    for device, chunk in (("cpu", 20), (DEVICE, 7)):
        config = replace(CPU64, device=device, quantization=form)  # type: ignore[arg-type]
        runner = TorchRunner.from_weights(model, random_weights(model), config)
        assert runner.device == device
        driver = Driver(runner)
        seqs = [driver.add(p, params) for p in prompts]
        while todo := [s for s in seqs if len(s) < s.request.prompt_tokens + 16]:
            driver.step(chunk // 2, todo)
        said.append((driver.generate(prompts, 16, chunk=chunk), [list(s.tokens) for s in seqs]))
    assert said[0] == said[1]


def test_copies_run_in_order() -> None:
    ops = ReferenceOps(torch.device(DEVICE), torch.float32)
    cache = torch.arange(8.0, device=DEVICE).repeat(3, 2, 1)[..., None, None, None].clone()
    ops.copy_blocks(cache, [(1, 2), (2, 3), (4, 1), (1, 2)])
    assert cache[0, 0, :, 0, 0, 0].tolist() == [0, 4, 4, 1, 4, 5, 6, 7]


@pytest.mark.gpu
def test_memory_for_kv_is_what_weights_and_activations_leave() -> None:
    model = MODELS["llama"]
    config = replace(CPU64, device="cuda", num_blocks=None, gpu_memory_utilization=0.1)
    runner = TorchRunner.from_weights(model, random_weights(model), config)
    _, total = torch.cuda.mem_get_info()
    assert 0.02 * total < runner.cache.nbytes < 0.1 * total
