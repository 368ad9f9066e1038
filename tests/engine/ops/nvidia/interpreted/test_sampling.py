"""Sampling without a sort: the cut-offs, the noise and the draws are engine.sampler's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.ops.nvidia.kernels.cutoff import cutoffs
from engine.ops.nvidia.triton import TritonOps, packed_params
from engine.ops.sampler import PARAMS, SampleRows
from engine.ops.sampler import cutoffs as torch_cutoffs
from engine.ops.sampler import sample as torch_sample
from tests.engine.ops.test_ops import CPU, model

OPS = TritonOps(CPU, torch.float32, model(2, 1, 32))


def rows(n: int, **params: object) -> SampleRows:
    table = np.zeros(n, PARAMS)
    table["top_p"] = 1
    table["temperature"] = 1
    for name, value in params.items():
        table[name] = value
    return SampleRows(table, np.arange(n, dtype=np.int64) * 977 + 3)


def logits(n: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [5, 1000, 5003])
def test_draws_are_the_samplers(vocab: int) -> None:
    r = rows(12, seed=[0, 1, 2**31, 2**32 + 5, 2**62 + 77, 9] * 2, branch=[0, 3] * 6,
             temperature=[0.1, 0.7, 1, 1.7, 5, 0] * 2)  # fmt: skip
    x = logits(12, vocab)
    assert OPS.sample(x, r) == torch_sample(x, r)


@pytest.mark.parametrize("vocab", [7, 3000])
def test_cutoffs_are_the_samplers(vocab: int) -> None:
    grid = [(k, p, m) for k in (0, 3, 40, 5000) for p in (1.0, 0.9, 1e-6) for m in (0.0, 0.05)]
    k, p, m = (list(c) for c in zip(*grid, strict=True))
    r = rows(len(grid), top_k=k, top_p=p, min_p=m, temperature=0.8)
    x = logits(len(grid), vocab, 1)
    x[:, ::3] = x[:, ::3].round()  # equal logits: kept or dropped together
    want = torch_cutoffs(
        x / 0.8, *(torch.from_numpy(r.params[n].copy()) for n in ("top_k", "top_p", "min_p"))
    )
    cut = cutoffs(x, torch.from_numpy(packed_params(r)))
    assert torch.equal(x / 0.8 >= cut[:, None], x / 0.8 >= want[:, None])
    assert OPS.sample(x, r) == torch_sample(x, r)


def test_greedy_takes_the_lowest_of_equals_and_top_k_1_is_greedy() -> None:
    x = torch.zeros(2, 4100)
    x[:, [17, 4000]] = 1.0
    assert OPS.sample(x, rows(2, temperature=[0, 0.5], top_k=[0, 1])) == ([17, 17], [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_rows_are_told(bad: float) -> None:
    x = logits(3, 2500)
    x[1, 2222] = bad
    r = rows(3, temperature=[0, 1, 1], top_p=0.9)
    tokens, bads = OPS.sample(x, r)
    assert bads == [1]
    want, _ = torch_sample(x, r)
    assert [tokens[0], tokens[2]] == [want[0], want[2]]


def test_banned_logits_are_never_drawn() -> None:
    x = torch.full((4, 300), -1e30)
    x[:, 123] = -4.0
    assert OPS.sample(x, rows(4, temperature=3.0, top_p=[1, 1, 0.5, 0.5], top_k=[0, 4, 0, 4]))[0] == [123] * 4
