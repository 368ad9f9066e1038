"""What a model thinks of a text: every token's log probabilities by teacher forcing through a TorchRunner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model.load_weights import LoadedModel
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepInput
from tests.engine.tiny import Driver

PAGE = Path(__file__).parents[2] / "demos" / "page.txt"
"""A text that is part of the repository."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """logp [T - 1, vocab]: log probabilities of what follows each token but the last."""

    logp: Tensor

    def of(self, ids: list[int]) -> Tensor:
        """Of the tokens that did follow, [T - 1]."""
        return self.logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)

    def perplexity(self, ids: list[int]) -> float:
        """exp of the mean negative log probability."""
        return self.of(ids).mean().neg().exp().item()

    def divergence(self, other: Thoughts) -> float:
        """Mean Kullback-Leibler divergence of the other from this, in nats."""
        return (self.logp.exp() * (self.logp - other.logp)).sum(-1).mean().item()


def logprobs(model: LoadedModel, ids: list[int], config: EngineConfig, chunk: int = 128) -> Thoughts:
    """Teacher forcing of `ids` in chunks. `model` stays usable."""
    runner = TorchRunner.from_weights(model.config, dict(model.weights), config)
    forward = runner.model.forward
    seen: list[Tensor] = []

    def record(batch: StepInput, cache: object) -> Tensor:
        wanted = len(batch.logit_rows)
        batch.logit_rows = torch.arange(len(batch.token_ids))
        logits = forward(batch, cache)  # type: ignore[arg-type]
        seen.append(logits.float().log_softmax(-1))
        return logits[len(logits) - wanted :]

    runner.model.forward = record  # type: ignore[method-assign]
    driver = Driver(runner)
    seq = driver.add(ids)
    while seq.num_computed < len(ids):
        driver.step(chunk)
    return Thoughts(torch.cat(seen)[: len(ids) - 1])
