"""Cache write, norm, activation, copies and e4m3 against torch."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.model.layers import attention_weights
from engine.ops.base import Ops, StepPlan
from engine.ops.fp8 import Fp8Kv
from engine.ops.fp8 import quantise as to_fp8
from engine.ops.nvidia import scaled
from engine.ops.nvidia.kernels import quantised
from engine.ops.nvidia.kernels.common import from_e4m3, to_e4m3
from engine.ops.nvidia.triton import TritonOps
from engine.ops.reference import ReferenceOps
from engine.ops.weights import Fp8, Quantization, quantise
from tests.engine.ops.test_ops import CPU, Setting, model
from tests.engine.tiny import QWEN2, QWEN3

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("shape", [(4, 2, 64), (9, 3, 32), (2, 2, 96), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["plain", "qk-norm"])
def test_qkv_prepare(dtype: torch.dtype, shape: tuple[int, int, int], family: ModelConfig) -> None:
    s = Setting(model(*shape, family), 16, dtype, [(1, 1), (2, 17), (8, 30)])

    def prepare(ops: Ops, plan: StepPlan, kv: Tensor) -> Tensor:
        q = ops.qkv_prepare(
            s.qkv.to(ops.dtype), attention_weights(ops, s.config, dict(s.weights), 0), kv, plan
        )
        block, slot = s.batch.slots // 16, s.batch.slots % 16
        return torch.cat([q, kv[0][block, :, slot], kv[1][block, :, slot]], dim=1)

    s.check(TritonOps(CPU, dtype, s.config), prepare)


def test_many_tokens_take_their_heads_together() -> None:
    s = Setting(model(8, 4, 16), 16, F32, [(70, 70)])
    w = attention_weights(ReferenceOps(CPU, F32), s.config, dict(s.weights), 0)
    caches = [torch.zeros(s.kv.shape) for _ in range(2)]
    ours, plain = (
        ops.qkv_prepare(s.qkv.float(), w, kv, ops.plan(s.batch, s.rope))
        for ops, kv in zip((TritonOps(CPU, F32, s.config), ReferenceOps(CPU, F32)), caches, strict=True)
    )
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*caches, rtol=1e-5, atol=1e-5)


@DTYPES
def test_fp8_is_stored_bit_for_bit_as_torch_stores_it(dtype: torch.dtype) -> None:
    """V, which nothing is computed of: all bits. K goes through a rotation: within a step of e4m3."""
    s = Setting(model(4, 2, 64), 16, dtype, [(9, 30), (3, 3)])
    s.qkv[2, -64:] = 0
    s.qkv[3, -64:] *= 1e-30
    s.qkv[4, -20] = float("nan")
    s.qkv[5, -20] = float("inf")
    shape = s.kv.shape
    w = attention_weights(ReferenceOps(CPU, dtype), s.config, dict(s.weights), 0)
    ours, plain = (Fp8Kv(torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[:-1])) for _ in range(2))
    for ops, kv in ((TritonOps(CPU, dtype, s.config), ours), (ReferenceOps(CPU, dtype), plain)):
        ops.qkv_prepare(s.qkv.to(dtype), w, kv, ops.plan(s.batch, s.rope))
    assert torch.equal(ours.scale.isfinite(), plain.scale.isfinite())
    finite = plain.scale[1].isfinite()
    assert torch.equal(ours.scale[1][finite], plain.scale[1][finite])
    assert torch.equal(ours.data[1][finite], plain.data[1][finite])
    rtol = 1e-5 if dtype == F32 else 1e-2
    torch.testing.assert_close(ours.scale[0], plain.scale[0], rtol=rtol, atol=0)
    size = plain.scale[0][..., None]
    k = [kv.data[0].view(torch.float8_e4m3fn).float() * kv.scale[0][..., None] for kv in (ours, plain)]
    assert ((k[0] - k[1]).abs() <= 33 * size).all()


def test_a_slot_under_zero_is_not_written() -> None:
    s = Setting(model(2, 1, 32), 16, F32, [(3, 3)])
    s.batch.slots[1] = -1
    ops = TritonOps(CPU, F32, s.config)
    kv = torch.zeros(s.kv.shape)
    w = attention_weights(ops, s.config, dict(s.weights), 0)
    q = ops.qkv_prepare(s.qkv.float(), w, kv, ops.plan(s.batch, s.rope))
    assert q.isfinite().all()
    assert (kv[0].abs().sum((-1, -3)) > 0).sum() == 2


@DTYPES
@pytest.mark.parametrize("n", [1, 96, 576, 1000])
def test_norm_and_activation(dtype: torch.dtype, n: int) -> None:
    g = torch.Generator().manual_seed(n)
    ops, exact = TritonOps(CPU, dtype, model(2, 1, 32)), ReferenceOps(CPU, torch.float64)
    plain = ReferenceOps(CPU, dtype)
    delta, residual, weight = (torch.randn(3, n, generator=g).to(dtype) for _ in range(3))
    pairs = []
    for d in (None, delta):
        y, r = ops.add_rms_norm(d, residual.clone(), weight[0], 1e-6)
        want, want_r = exact.add_rms_norm(None, plain.add_rms_norm(d, residual, weight[0], 1e-6)[1].double(),
                                          weight[0].double(), 1e-6)  # fmt: skip
        assert torch.equal(r.double(), want_r)
        pairs.append((y, plain.add_rms_norm(d, residual, weight[0], 1e-6)[0], want))
    both = torch.cat((delta, residual), 1) * 4
    pairs.append((ops.silu_mul(both), plain.silu_mul(both), exact.silu_mul(both.double())))
    for ours, torchs, want in pairs:
        error = (torchs.double() - want).abs().max()
        assert (ours.double() - want).abs().max() <= 2 * error + 1e-6 * want.abs().max()


@pytest.mark.parametrize("dtype", [F32, BF16, torch.uint8])
def test_copies_run_in_order(dtype: torch.dtype) -> None:
    r = random.Random(0)
    ops, plain = TritonOps(CPU, F32, model(2, 1, 32)), ReferenceOps(CPU, F32)
    for dim in (6, 16):
        data = torch.randint(0, 200, (3, 2, 8, 2, 4, dim)).to(dtype)
        pairs = [tuple(r.sample(range(8), 2)) for _ in range(6)]
        ours, want = data.clone(), data.clone()
        if dtype == torch.uint8:
            a, b = (Fp8Kv(d, torch.rand(d.shape[:-1], generator=torch.Generator().manual_seed(0)))
                    for d in (ours, want))  # fmt: skip
            ops.copy_blocks(a, pairs), plain.copy_blocks(b, pairs)  # type: ignore[arg-type]
            assert torch.equal(a.scale, b.scale)
        else:
            ops.copy_blocks(ours, pairs), plain.copy_blocks(want, pairs)  # type: ignore[arg-type]
        assert torch.equal(ours, want)


@triton.jit
def _encode(x_ptr, bits_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(bits_ptr + i, to_e4m3(tl.load(x_ptr + i)))


@triton.jit
def _decode(bits_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, from_e4m3(tl.load(bits_ptr + i), tl.float32))


def test_e4m3_is_torchs_in_both_directions() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = torch.empty(256)
    _decode[(1,)](bits, values, N=256)
    number = (bits & 0x7F) != 0x7F  # a cache holds no other: scales tell what is not finite
    exact = bits.view(torch.float8_e4m3fn).float()
    assert torch.equal(values[number], exact[number])
    near = exact[number].unique()
    middle = (near[1:] + near[:-1]) / 2
    x = torch.cat((near, middle, middle * (1 + 1e-6), middle * (1 - 1e-6), torch.tensor([1e9, -1e9, 1e-12])))
    x = torch.cat((x, torch.randn(2048 - len(x)) * torch.logspace(-5, 3, 2048 - len(x))))
    ours = torch.empty(2048, dtype=torch.uint8)
    _encode[(1,)](x, ours, N=2048)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(ours, want)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@DTYPES
def test_quantised_linears(form: Quantization, dtype: torch.dtype) -> None:
    ops = TritonOps(CPU, dtype, model(2, 1, 32))
    g = torch.Generator().manual_seed(1)
    for rows, n, k in ((1, 33, 64), (5, 1, 32), (17, 70, 130), (33, 40, 576), (65, 40, 70)):
        q = quantise(torch.randn(n, k, generator=g), form)
        x, b = torch.randn(rows, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
        exact = x.double() @ q.values(torch.float64).T + b.double()
        plain = torch.nn.functional.linear(x, q.values(dtype), b).double()
        bound = 2 * (plain - exact).norm() + 1e-6 * exact.norm()
        assert (ops.linear(x, ops.pack(q, b)).double() - exact).norm() <= bound
        logits = ops.logits(x, ops.pack(q, b))
        assert logits.dtype == F32
        assert (logits.double() - exact).norm() <= bound
        assert torch.equal(quantised.values(q, F32), q.values(F32))


@DTYPES
def test_rows_become_e4m3_bit_for_bit_as_torch_makes_them(dtype: torch.dtype) -> None:
    x = (
        torch.randn(9, 70, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 9, 9)[:, None]
    ).to(dtype)
    x[3] = 0
    x[5, 7], x[6, 7] = float("nan"), float("-inf")
    codes, scale = quantised.rows_to_e4m3(x)
    bits, want = to_fp8(x)
    good = want.isfinite()
    assert good.sum() == 7 and torch.equal(scale.isfinite(), good)
    assert torch.equal(scale[good], want[good])
    assert torch.equal(codes.view(torch.uint8)[good], bits[good])


def test_many_rows_of_fp8_go_through_the_scaled_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands in e4m3: exactly the product of their values, rounded once; who may not goes the other way."""
    seen: list[int] = []
    through = scaled.linear
    monkeypatch.setattr(
        scaled, "linear", lambda codes, *more: seen.append(len(codes)) or through(codes, *more)
    )
    g = torch.Generator().manual_seed(1)
    for rows, n, k in ((16, 48, 64), (17, 48, 64), (17, 40, 64), (70, 48, 70)):
        ops = TritonOps(CPU, BF16, model(2, 1, 32), "fp8")
        seen.clear()
        w = quantise(torch.randn(n, k, generator=g), "fp8")
        x, b = torch.randn(rows, k, generator=g).bfloat16(), torch.randn(n, generator=g).bfloat16()
        y = ops.linear(x, ops.pack(w, b))
        assert seen == ([17] if (rows, n) == (17, 48) else [])
        values = x.double()
        if seen:
            bits, scale = to_fp8(x)
            values = Fp8(bits.view(torch.float8_e4m3fn), scale).values(torch.float64)
        exact = values @ w.values(torch.float64).T + b.double()
        plain = torch.nn.functional.linear(values.float(), w.values(F32), b.float()).bfloat16().double()
        assert (y.double() - exact).norm() <= 2 * (plain - exact).norm()
        assert y.dtype == BF16


def test_float32_and_a_torch_without_the_product_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaled.works(CPU, BF16) and not scaled.works(CPU, F32)

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("Rowwise scaling is not currently supported on your device")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert not scaled.works(CPU, BF16)
    assert not TritonOps(CPU, BF16, model(2, 1, 32), "fp8")._scaled


@pytest.mark.parametrize("rows", [3, 80])
def test_logits_of_a_quantised_head_are_float32_at_any_length(rows: int) -> None:
    ops = TritonOps(CPU, BF16, model(2, 1, 32), "fp8")
    head = ops.pack_head(torch.randn(33, 64))
    assert head.data.codes.dtype == torch.int8
    assert ops.logits(torch.randn(rows, 64).bfloat16(), head).dtype == F32
