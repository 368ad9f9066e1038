"""Linears whose weights stay in 8 or 4 bits. They are multiplied as they are read, or expanded for a GEMM.

x [M, K] @ W.T [N, K] -> [M, N], in the formats of engine.ops.weights. With few rows the bytes of the weights are the
limit: N x K for INT8 and FP8, N x K x 0.625 for INT4 (a float16 scale and minimum for 32 values). So a tile is
expanded in registers and never stored. With many rows the FLOPs are the limit, 2 x M x N x K. Then `values` expands W
to the compute dtype once, for cuBLAS. For FP8, `rows_to_e4m3` converts x instead, for torch's scaled matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast, dot, from_e4m3, to_e4m3
from engine.ops.weights import Fp8, Int4, Quantised

MOST_ROWS = 64
"""With more rows it is faster to expand W first."""


@triton.jit
def _int4(
    codes_ptr,
    scale_ptr,
    min_ptr,
    n,
    alive,
    byte,
    group,
    s_codes,
    s_scale,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Two float32 [SPAN, n]: the values i and i + 16 of each group, from the bytes `byte` [SPAN]. `group` [SPAN / 16]
    are the groups of these bytes."""
    there = (byte < BYTES)[:, None] & alive[None, :]
    codes = tl.load(codes_ptr + n[None, :] * s_codes + byte[:, None], mask=there, other=0)
    some = (group < BYTES // 16)[:, None] & alive[None, :]
    at = n[None, :] * s_scale + group[:, None]
    scale = tl.load(scale_ptr + at, mask=some, other=0.0).to(tl.float32)
    least = tl.load(min_ptr + at, mask=some, other=0.0).to(tl.float32)
    # One scale is used for 16 bytes: it is loaded once and repeated in registers.
    scale = tl.reshape(tl.broadcast_to(scale[:, None, :], [SPAN // 16, 16, n.shape[0]]), [SPAN, n.shape[0]])
    least = tl.reshape(tl.broadcast_to(least[:, None, :], [SPAN // 16, 16, n.shape[0]]), [SPAN, n.shape[0]])
    return (codes & 15).to(tl.float32) * scale + least, (codes >> 4).to(tl.float32) * scale + least


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x_ptr, codes_ptr, scale_ptr, min_ptr, bias_ptr, y_ptr, rows, columns, s_x, s_codes, s_scale, s_y,
    K: tl.constexpr, BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FOUR: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_N, M / BLOCK_M). BYTES: length of a row of codes."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = n < columns
    x_row = x_ptr + m[:, None] * s_x
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FOUR:
        half: tl.constexpr = BLOCK_K // 2
        for k in range(0, BYTES, half):
            byte = k + tl.arange(0, half)
            group = k // 16 + tl.arange(0, half // 16)
            low, high = _int4(
                codes_ptr, scale_ptr, min_ptr, n, alive, byte, group, s_codes, s_scale, BYTES, half
            )
            at = byte // 16 * 32 + byte % 16
            here = (m < rows)[:, None]
            a = tl.load(x_row + at[None, :], mask=here & (at < K)[None, :], other=0.0)
            b = tl.load(x_row + at[None, :] + 16, mask=here & (at + 16 < K)[None, :], other=0.0)
            acc += dot(a, cast(low, a.dtype)) + dot(b, cast(high, b.dtype))
    else:
        for k in range(0, K, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            there = (at < K)[:, None] & alive[None, :]
            a = tl.load(x_row + at[None, :], mask=(m < rows)[:, None] & (at < K)[None, :], other=0.0)
            # Exact in both formats: no code has more than 8 bits.
            if FP8:
                codes = tl.load(codes_ptr + n[None, :] * s_codes + at[:, None], mask=there, other=0.0)
                acc += dot(a, from_e4m3(codes, a.dtype))
            else:
                codes = tl.load(codes_ptr + n[None, :] * s_codes + at[:, None], mask=there, other=0)
                acc += dot(a, cast(codes.to(tl.float32), a.dtype))
        acc = acc * tl.load(scale_ptr + n, mask=alive, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=alive, other=0.0).to(tl.float32)[None, :]
    to = y_ptr + m[:, None] * s_y + n[None, :]
    tl.store(to, cast(acc, y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & alive[None, :])


@triton.jit
def write_values(
    codes_ptr, scale_ptr, min_ptr, w_ptr, columns, s_codes, s_scale,
    K: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FOUR: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_N, K / BLOCK_K): W [N, K]."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    alive = n < columns
    w_row = w_ptr + n[None, :] * K
    kind: tl.constexpr = w_ptr.dtype.element_ty
    if FOUR:
        half: tl.constexpr = BLOCK_K // 2
        byte = tl.program_id(1) * half + tl.arange(0, half)
        group = tl.program_id(1) * (half // 16) + tl.arange(0, half // 16)
        low, high = _int4(codes_ptr, scale_ptr, min_ptr, n, alive, byte, group, s_codes, s_scale, BYTES, half)
        at = byte // 16 * 32 + byte % 16
        tl.store(w_row + at[:, None], cast(low, kind), mask=(at < K)[:, None] & alive[None, :])
        tl.store(w_row + at[:, None] + 16, cast(high, kind), mask=(at + 16 < K)[:, None] & alive[None, :])
    else:
        at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        there = (at < K)[:, None] & alive[None, :]
        if FP8:
            stored = tl.load(codes_ptr + n[None, :] * s_codes + at[:, None], mask=there, other=0.0)
            codes = from_e4m3(stored, tl.float32)
        else:
            stored = tl.load(codes_ptr + n[None, :] * s_codes + at[:, None], mask=there, other=0)
            codes = stored.to(tl.float32)
        scale = tl.load(scale_ptr + n, mask=alive, other=0.0)[None, :]
        tl.store(w_row + at[:, None], cast(codes * scale, kind), mask=there)


@triton.jit
def quantise_rows(x_ptr, bits_ptr, scale_ptr, s_x, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (M): one row a program, bit for bit what engine.ops.fp8.quantise gives."""
    m = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * s_x + i, mask=i < N, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    scale = tl.maximum(tl.div_rn(most, tl.full([], 448.0, tl.float32)), 1.1754943508222875e-38)
    # A maximum ignores NaN. This sum makes the scale NaN if one value is not finite.
    scale = scale + tl.sum(x * 0.0, 0)
    tl.store(scale_ptr + m, scale)
    wide = tl.broadcast_to(scale, [BLOCK])
    tl.store(bits_ptr + m * N + i, to_e4m3(tl.div_rn(x, wide)), mask=i < N)


def linear(x: Tensor, w: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K], M at most MOST_ROWS -> [M, N] in dtype."""
    rows, columns = len(x), w.shape[0]
    y = torch.empty((rows, columns), dtype=dtype, device=x.device)
    four = isinstance(w, Int4)
    block_m = max(16, triton.next_power_of_2(rows))
    block_n = 32 if block_m <= 32 else 64
    multiply[triton.cdiv(columns, block_n), triton.cdiv(rows, block_m)](
        x, w.codes, w.scale, w.minimum if isinstance(w, Int4) else w.scale, x if bias is None else bias, y,
        rows, columns, x.stride(0), w.codes.stride(0), w.scale.stride(0), y.stride(0),
        K=w.shape[1], BYTES=w.codes.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128, FOUR=four,
        FP8=isinstance(w, Fp8), BIAS=bias is not None, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y


def values(w: Quantised, dtype: torch.dtype) -> Tensor:
    """W [N, K] in dtype, the same as Quantised.values."""
    columns, inputs = w.shape
    out = torch.empty((columns, inputs), dtype=dtype, device=w.codes.device)
    write_values[triton.cdiv(columns, 32), triton.cdiv(inputs, 128)](
        w.codes, w.scale, w.minimum if isinstance(w, Int4) else w.scale, out, columns,
        w.codes.stride(0), w.scale.stride(0), K=inputs, BYTES=w.codes.shape[1], BLOCK_N=32, BLOCK_K=128,
        FOUR=isinstance(w, Int4), FP8=isinstance(w, Fp8), num_warps=4,
    )  # fmt: skip
    return out


def rows_to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (float8_e4m3fn [M, K], float32 scale [M]). The bits of a token depend only on that token.
    Bytes: 3 x M x K for a bfloat16 x."""
    rows, n = x.shape
    bits = torch.empty((rows, n), dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n)
    quantise_rows[(rows,)](
        x, bits, scale, x.stride(0), N=n, BLOCK=block, num_warps=min(16, max(4, block // 1024))
    )
    return bits.view(torch.float8_e4m3fn), scale
