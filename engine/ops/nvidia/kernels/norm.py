"""RMSNorm after adding to the residual, in one pass. torch needs seven.

delta, residual [T, N] -> residual += delta in place, y = residual / rms(residual) x weight.
Bytes: 4 x T x N x size, or 2 x without a delta. FLOPs: 5 x T x N.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast


@triton.jit
def rms_norm(
    delta_ptr, residual_ptr, weight_ptr, y_ptr, eps, s_delta, s_residual, s_y,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (T): one row a program."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    x = tl.load(residual_ptr + t * s_residual + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + t * s_delta + i, mask=inside, other=0.0).to(tl.float32)
        sum_ = cast(x, residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + t * s_residual + i, sum_, mask=inside)
        x = sum_.to(tl.float32)  # the norm is that of the rounded sum, which later layers read
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / N + eps)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * s_y + i, cast(x * inverse * weight, y_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns y [T, N]; residual is changed in place."""
    tokens, n = residual.shape
    y = torch.empty_like(residual)
    block = triton.next_power_of_2(n)
    add = residual if delta is None else delta
    rms_norm[(tokens,)](
        add, residual, weight, y, eps, add.stride(0), residual.stride(0), y.stride(0),
        N=n, BLOCK=block, ADD=delta is not None, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return y
