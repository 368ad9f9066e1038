"""The gated activation of an MLP: silu(gate) x up.

gate_up [T, 2 I] (gate first) -> [T, I]. Bytes: 3 x T x I x size; FLOPs: 5 x T x I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast

_BLOCK = 1024


@triton.jit
def silu_times(gate_up_ptr, y_ptr, s_in, s_out, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    """Grid (T, I / BLOCK)."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    gate = tl.load(gate_up_ptr + t * s_in + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * s_in + I + i, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + t * s_out + i, cast(y, y_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]."""
    tokens, both = gate_up.shape
    y = torch.empty((tokens, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    silu_times[tokens, triton.cdiv(both // 2, _BLOCK)](
        gate_up, y, gate_up.stride(0), y.stride(0), I=both // 2, BLOCK=_BLOCK, num_warps=4
    )
    return y
