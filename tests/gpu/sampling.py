"""Sampling alone: our kernels, including the copy of their parameters to the card, and a sampler that sorts."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from engine.ops.nvidia.triton import TritonOps
from engine.ops.sampler import PARAMS, SampleRows
from engine.ops.sampler import sample as torch_sample
from tests.gpu.machine import Machine, Table
from tests.gpu.problems import QWEN3_8B

WAYS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top-k, top-p, min-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def rows(n: int, **params: float) -> SampleRows:
    """n rows with these parameters and a seed each."""
    table = np.zeros(n, PARAMS)
    table["top_p"] = 1
    for name, value in params.items():
        table[name] = value
    table["seed"] = np.arange(n) * 2**33 + 7
    return SampleRows(table, np.arange(n, dtype=np.int64))


def run(m: Machine) -> list[Table]:
    """Microseconds per batch. Those of the reference include the wait for its tokens, which it needs."""
    vocab = 151_936 if m.real else 300
    table = Table(f"Sampling, a vocabulary of {vocab:,}", ("what", "at once", "us", "by sorting, us"))
    ops = TritonOps(m.device, torch.bfloat16, QWEN3_8B)
    for batch in (1, 8, 64) if m.real else (2,):
        logits = torch.randn(batch, vocab, device=m.device) * 3
        for what, params in WAYS.items():
            r = rows(batch, **params)
            ours = m.seconds(partial(ops.draw, logits, r))
            theirs = m.wall(partial(torch_sample, logits, r), 3 if m.real else 1)
            table.rows.append((what, str(batch), f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f}"))
    return [table]
