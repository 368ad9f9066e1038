"""KV in one byte a value: e4m3 with one float32 scale per (token, head), for K and for V.

Owns the format, and how it is written and read. Invariants: the bytes of a token depend only on that token, so a
prefix hit finds what computing it again would store. Too large values become the largest one. NaN and infinity
stay not finite, so that a bad row is still noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest value of e4m3."""
SCALE_BYTES = 4


@dataclass(slots=True)
class Fp8Kv:
    """data uint8 [..., 2, block, kv_head, slot, dim] (bits of e4m3), scale float32 [..., 2, block,
    kv_head, slot]: the value is data x scale. For all layers, or for one layer after `[layer]`."""

    data: Tensor
    scale: Tensor

    def __getitem__(self, layer: int) -> Fp8Kv:
        return Fp8Kv(self.data[layer], self.scale[layer])

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.data.nbytes + self.scale.nbytes


Kv = Tensor | Fp8Kv
"""A cache, or one layer of it: values in the compute dtype, or FP8."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] -> (bits uint8 [..., dim], scale float32 [...]). The largest value becomes 448."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    # torch's cast turns values above the largest one into NaN, so clamp first.
    bits = (wide / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return bits.view(torch.uint8), scale


def dequantise(bits: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., dim] in `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (bits.view(torch.float8_e4m3fn).to(wide) * scale[..., None]).to(dtype)


def store(kv: Kv, block: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v [T, kv_head, dim] into the slots (block, offset), int64 [T], of one layer."""
    for half, x in enumerate((k, v)):
        if isinstance(kv, Fp8Kv):
            kv.data[half][block, :, offset], kv.scale[half][block, :, offset] = quantise(x)
        else:
            kv[half][block, :, offset] = x


def fetch(kv: Kv, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V [*blocks, kv_head, slot, dim] of one layer's `blocks` (any shape) in `dtype`."""
    if isinstance(kv, Fp8Kv):
        k, v = (dequantise(d[blocks], s[blocks], dtype) for d, s in zip(kv.data, kv.scale, strict=True))
    else:
        k, v = (half[blocks].to(dtype) for half in kv.unbind(0))
    return k, v


def parts(kv: Kv) -> tuple[Tensor, ...]:
    """The tensors of a cache. All have the blocks in dimension 2."""
    return (kv.data, kv.scale) if isinstance(kv, Fp8Kv) else (kv,)
