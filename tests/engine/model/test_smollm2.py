"""The built-in model against transformers: the same tokens in float32, close to it in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.files import tokenizer
from engine.files.model_config import ModelConfig
from engine.files.model_files import ModelFiles
from engine.model import load_weights
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepInput
from tests.engine.tiny import Driver, hf_model

NEW = 64
QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers.",
    "Why is the sky blue?",
    "Count from one to ten.",
    "Write a haiku about memory.",
    "What is 12 times 12?",
    "Explain gravity to a child.",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "How do plants make food?",
)
"""Their answers leave a margin between the two best logits; others would do as well if they do."""


@dataclass
class Smol:
    config: ModelConfig
    weights: dict[str, Tensor]
    hf: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def smol(builtin_model: ModelFiles) -> Smol:
    """Our loader's weights in both models: it is tested on its own, and transformers' takes 20 s."""
    loaded = load_weights.load(builtin_model)
    words = tokenizer.load(builtin_model)
    prompts = [
        words.encode(words.render([{"role": "user", "content": q}], True), special=True) for q in QUESTIONS
    ]
    return Smol(
        loaded.config, loaded.weights, hf_model(loaded.config, loaded.weights, torch.float32), prompts
    )


def runner(smol: Smol, dtype: Any) -> TorchRunner:
    config = EngineConfig(device="cpu", dtype=dtype, num_blocks=256)
    return TorchRunner.from_weights(smol.config, dict(smol.weights), config)


def test_float32_gives_the_tokens_of_generate(smol: Smol) -> None:
    longest = max(map(len, smol.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in smol.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in smol.prompts])
    with torch.inference_mode():
        out = smol.hf.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack(out.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3, "choose other questions"
    assert (
        Driver(runner(smol, "float32")).generate(smol.prompts, NEW, chunk=29)
        == out.sequences[:, longest:].tolist()
    )


def test_bfloat16_follows_float32_under_teacher_forcing(smol: Smol) -> None:
    """95 % of the served tokens are transformers' choice after the same text, and their log
    probability is within 0.2."""
    ours = runner(smol, "bfloat16")
    seen: list[Tensor] = []
    forward = ours.model.forward

    def record(batch: StepInput, cache: Tensor) -> Tensor:
        seen.append(forward(batch, cache))
        return seen[-1]

    ours.model.forward = record  # type: ignore[method-assign]
    tokens = Driver(ours).generate(smol.prompts, NEW)
    served = torch.stack(seen, 1).float().log_softmax(-1)
    matches, worst = 0, 0.0
    for i, (prompt, answer) in enumerate(zip(smol.prompts, tokens, strict=True)):
        with torch.inference_mode():
            logits = smol.hf(torch.tensor([prompt + answer[:-1]]), logits_to_keep=NEW).logits[0]
        at = torch.tensor(answer)[:, None]
        matches += int((logits.argmax(-1) == at.squeeze(1)).sum())
        difference = logits.log_softmax(-1).gather(1, at) - served[i].gather(1, at)
        worst = max(worst, difference.abs().max().item())
    assert matches >= 0.95 * NEW * len(tokens)
    assert worst <= 0.2
