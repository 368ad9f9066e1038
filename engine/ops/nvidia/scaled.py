"""Linears with FP8 weights by torch's scaled matmul: e4m3 times e4m3 on the tensor cores, with a scale per row.

Owns what torch._scaled_mm (2.8 to 2.13) needs, and the test whether it works here. Its kernels for scales per row
exist from compute capability 8.9 on, but not in every build (Windows, early sm_120). So `works` tries one small
product. K and N must be multiples of 16. The result is bfloat16, because only cuBLAS 12.9 on sm_90 gives float32.
On a CPU torch computes the same, slowly, for tests. Not yet run on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.weights import Fp8

FROM_ROWS = 17
"""From this many rows on it is faster. With fewer rows only the bytes of the weights matter, and x keeps its
precision. This is a guess until `make gpu-check` has run, which measures both ways."""


def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `linear` works on this device. Tries it."""
    if dtype != torch.bfloat16:
        return False
    ones = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(16, device=device)
    try:
        return bool(linear(ones, scale, Fp8(ones, scale), None).sum() == 16**3)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def fits(w: Fp8) -> bool:
    """Whether weights of this shape can be multiplied this way."""
    return w.shape[0] % 16 == 0 and w.shape[1] % 16 == 0


def linear(codes: Tensor, scale: Tensor, w: Fp8, bias: Tensor | None) -> Tensor:
    """codes float8_e4m3fn [M, K] with scale float32 [M], @ w.T + bias -> bfloat16 [M, N]."""
    out: Tensor = torch._scaled_mm(
        codes, w.codes.t(), scale_a=scale[:, None], scale_b=w.scale[None], bias=bias, out_dtype=torch.bfloat16
    )
    return out
