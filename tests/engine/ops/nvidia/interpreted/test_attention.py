"""Paged attention, split and not, against the reference in float64: error at most twice that of torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.model.layers import attention_weights
from engine.ops.base import Ops, StepPlan
from engine.ops.fp8 import Fp8Kv, quantise
from engine.ops.nvidia.triton import TritonOps
from engine.ops.reference import ReferenceOps, attend
from tests.engine.ops.test_ops import CPU, Setting, model

BF16, F32 = torch.bfloat16, torch.float32
EDGES = [(1, 1), (1, 16), (1, 17), (1, 150), (2, 2), (3, 33), (11, 64), (4, 130)]
"""(tokens computed, tokens attended to): ends of blocks and tiles, whole prompts, chunks behind a prefix."""
FEW = [(1, 1), (1, 17), (1, 100), (5, 37)]


def attention(s: Setting) -> object:
    def run(ops: Ops, plan: StepPlan, kv: Tensor) -> Tensor:
        return ops.attention(
            s.q.to(ops.dtype), kv, attention_weights(ops, s.config, dict(s.weights), 0), plan
        )

    return run


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(4, 2, 64), (9, 3, 64), (8, 1, 128)], ids=str)
def test_edges(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    s = Setting(model(*shape), 16, dtype, EDGES)
    s.check(TritonOps(CPU, dtype, s.config), attention(s))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 2, 80), (3, 1, 96), (2, 1, 256), (20, 1, 16), (2, 2, 32)], ids=str)
def test_head_sizes(shape: tuple[int, int, int]) -> None:
    s = Setting(model(*shape), 16, F32, FEW)
    s.check(TritonOps(CPU, F32, s.config), attention(s))  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 4, 64, 128])
def test_block_sizes(block_size: int) -> None:
    lengths = [*FEW, (1, block_size), (1, block_size + 1), (block_size % 7 + 1, block_size + 7)]
    s = Setting(model(4, 2, 32), block_size, F32, lengths)
    s.check(TritonOps(CPU, F32, s.config), attention(s))  # type: ignore[arg-type]


def test_a_step_may_be_empty() -> None:
    s = Setting(model(4, 2, 32), 16, F32, FEW)
    ops = TritonOps(CPU, F32, s.config)
    batch = replace(s.batch, q_lens=[], kv_lens_host=[])
    assert ops.plan(batch, s.rope).groups == []


def test_few_sequences_are_split_and_a_chunk_behind_a_prefix_too() -> None:
    s = Setting(model(4, 2, 32), 16, F32, [(1, 300), (20, 310)])
    ops = TritonOps(CPU, F32, s.config)
    few, many = ops.plan(s.batch, s.rope).groups
    assert (few.tile.rows, many.tile.rows) == (16, 32)
    assert few.most > 2 and many.most > 2
    s.check(ops, attention(s))  # type: ignore[arg-type]


def test_padded_work_is_skipped() -> None:
    s = Setting(model(4, 2, 32), 16, F32, [(1, 200), (1, 31)])
    ops = TritonOps(CPU, F32, s.config)
    plan = ops.plan(s.batch, s.rope)
    (group,) = plan.groups
    want = ops.attend(s.q.float(), s.kv.float(), plan, 0.2)
    group.work = torch.cat((group.work, torch.full((3, 5), -1, dtype=torch.int32)))
    group.merges = torch.cat((group.merges, torch.full((2, 4), -1, dtype=torch.int32)))
    assert torch.equal(ops.attend(s.q.float(), s.kv.float(), plan, 0.2), want)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (64, 3.0), (None, 0.7), (1000, 30.0)])
def test_windows_and_soft_caps(window: int | None, softcap: float | None) -> None:
    s = Setting(model(4, 2, 32), 16, F32, [(1, 1), (1, 120), (7, 70), (40, 40), (30, 130)])
    kv = s.kv.float()
    if window is not None:  # blocks that no query sees may be given back
        for row, (n, length) in enumerate(s.lengths):
            gone = max(0, length - n - window + 1) // 16
            kv[:, s.batch.tables[row, :gone].long()] = float("nan")
    ops = TritonOps(CPU, F32, s.config)
    exact = attend(s.q, kv.double(), s.batch, torch.float64, 0.3, window, softcap)
    ours = ops.attend(s.q.float(), kv, ops.plan(s.batch, s.rope, window), 0.3, window, softcap)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def fp8(kv: Tensor) -> Fp8Kv:
    """A cache of these values; what was never written is poison."""
    bits, scale = quantise(kv.nan_to_num())
    poison = kv.isnan()
    return Fp8Kv(bits.masked_fill(poison, 0x7F), scale.masked_fill(poison.any(-1), float("nan")))


@pytest.mark.parametrize("native", [True, False], ids=["e4m3", "bits"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_fp8(native: bool, dtype: torch.dtype) -> None:
    s = Setting(model(6, 2, 64), 16, dtype, [(1, 1), (1, 17), (1, 150), (7, 60)])
    kv = fp8(s.kv.float())
    ops = TritonOps(CPU, dtype, s.config, fp8_kv=True)
    ops._native_fp8 = native
    w = attention_weights(ops, s.config, dict(s.weights), 0)
    exact = attend(s.q, kv, s.batch, torch.float64, 0.125)
    plain = ReferenceOps(CPU, dtype).attention(s.q.to(dtype), kv, w, StepPlan(s.batch, s.rope)).double()
    ours = ops.attention(s.q.to(dtype), kv, w, ops.plan(s.batch, s.rope)).double()
    size = exact.square().mean().sqrt()
    # Of bf16 the weights of V are rounded too, which the reference does not: they are its operands.
    bound = 2 * (plain - exact).square().mean().sqrt() + (1e-6 if dtype == F32 else 2e-3) * size
    assert (ours - exact).square().mean().sqrt() <= bound


def test_a_bad_scale_is_seen() -> None:
    s = Setting(model(2, 1, 32), 16, F32, [(1, 40), (1, 40)])
    kv = fp8(s.kv.float())
    kv.scale[1, s.batch.tables[0, 1]] = float("nan")
    ops = TritonOps(CPU, F32, s.config, fp8_kv=True)
    out = ops.attend(s.q.float(), kv, ops.plan(s.batch, s.rope), 0.2)
    assert not out[0].isfinite().any() and out[1].isfinite().all()
