"""A model through transformers whose attention is our kernels: windows and soft-caps as the reference has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.model import hf_model
from engine.model.torch_runner import TorchRunner
from engine.ops.nvidia.triton import TritonOps
from tests.engine.model.test_hf_model import COMMON, OTHERS, larger
from tests.engine.ops.test_ops import CPU
from tests.engine.tiny import LLAMA, Driver

CONFIG = EngineConfig(device="cpu", dtype="float32", num_blocks=33, max_model_len=40, threads=1)
MODEL = replace(LLAMA, architecture="gemma2", name="tiny-gemma2")
PROMPTS = [[(31 * i + 7 * j) % 199 for j in range(n)] for i, n in enumerate((1, 33))]


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_gemma_2_says_what_the_reference_says(kv: str) -> None:
    """Layers with a window of 21 and without one in turns, soft-capped scores, a scale of its own."""
    _, more = OTHERS["gemma2"]
    hf_model.register()
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma2Config(**COMMON | more | {"num_hidden_layers": 2}),
        attn_implementation=hf_model.NAME,
    )
    larger(hf, 0)
    said = []
    for ops in ("reference", "triton"):
        config = replace(CONFIG, ops=ops, kv_cache_dtype=kv)  # type: ignore[arg-type]
        model = hf_model.HfModel(MODEL, hf, CPU, torch.float32, config)
        runner = TorchRunner.over(model, config)
        assert runner.ops_name == "transformers" and isinstance(model.ops, TritonOps) == (ops == "triton")
        said.append(Driver(runner).generate(PROMPTS, 2, 30))
    assert said[0] == said[1]


def test_what_no_kernel_has_goes_to_the_reference_unless_it_was_asked_for() -> None:
    wide = replace(MODEL, head_dim=512)
    with pytest.raises(SetupError, match="no kernel for a head_dim of 512"):
        hf_model._ops(wide, CPU, torch.bfloat16, replace(CONFIG, ops="triton"))
    cuda = torch.device("cuda")
    for model, dtype, config in (
        (wide, torch.bfloat16, CONFIG),
        (MODEL, torch.float64, CONFIG),
        (MODEL, torch.bfloat16, replace(CONFIG, ops="reference")),
    ):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            assert type(hf_model._ops(model, cuda, dtype, config)) is hf_model.HfOps


def test_flashinfer_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="tiny-gemma2 runs through transformers; take flash-attn or auto"):
        hf_model._ops(MODEL, CPU, torch.bfloat16, replace(CONFIG, attention_backend="flashinfer"))
