"""Weights in 8 and 4 bits: the formats, how they are made and what their values are.

INT8: one float32 scale per output channel, symmetric. FP8: the same with e4m3 instead of integers. INT4: groups of 32
along the input, each with a float16 scale and minimum, as in GGUF's Q4_1, so that its bytes can be used as they are.
Invariant: the value of a code is defined here, in float32, and every back end multiplies by exactly these values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from engine.ops.fp8 import LARGEST

Quantization = Literal["int8", "int4", "fp8"]

GROUP = 32
"""Values that share a scale and a minimum in INT4."""


@dataclass(frozen=True, slots=True)
class _PerChannel:
    """value = codes x scale. codes [out, in]; scale float32 [out]."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> Self:
        return type(self)(self.codes.to(device), self.scale.to(device))

    def values(self, dtype: torch.dtype) -> Tensor:
        """[out, in]."""
        return (self.codes.float() * self.scale[:, None]).to(dtype)


class Int8(_PerChannel):
    """codes: int8, -127 to 127."""

    __slots__ = ()


class Fp8(_PerChannel):
    """codes: float8_e4m3fn, finite."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Int4:
    """value = code x scale + minimum. codes uint8 [out, groups x 16]: byte i of a group holds value i in
    its low half and value i + 16 in its high half; scale and minimum float16 [out, groups]. The last
    group is padded if `inputs` is not a multiple of 32."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.inputs

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes

    def to(self, device: torch.device) -> Int4:
        return Int4(self.codes.to(device), self.scale.to(device), self.minimum.to(device), self.inputs)

    def unpacked(self) -> Tensor:
        """Codes uint8 [out, groups, 32], 0 to 15."""
        grouped = self.codes.view(len(self.codes), -1, GROUP // 2)
        return torch.cat((grouped & 15, grouped >> 4), -1)

    def values(self, dtype: torch.dtype) -> Tensor:
        """[out, in]."""
        wide = self.unpacked().float() * self.scale.float()[..., None] + self.minimum.float()[..., None]
        return wide.flatten(1)[:, : self.inputs].to(dtype)


Quantised = Int8 | Int4 | Fp8
Weight = Tensor | Int8 | Int4 | Fp8
"""The weight [out, in] of a linear, as it is loaded."""


def quantise(weight: Weight, to: Quantization) -> Quantised:
    """Converts a weight to this format. A weight that is in it already keeps its codes. From another format it is
    converted through its values."""
    form, make = _FORMATS[to]
    if isinstance(weight, form):
        return weight
    return make(weight.float() if isinstance(weight, Tensor) else weight.values(torch.float32))


def _int8(w: Tensor) -> Int8:
    scale = w.abs().amax(1) / 127
    codes = (w / torch.where(scale > 0, scale, 1)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8(codes, scale)


def _fp8(w: Tensor) -> Fp8:
    scale = w.abs().amax(1) / LARGEST
    codes = (w / torch.where(scale > 0, scale, 1)[:, None]).clamp(-LARGEST, LARGEST)
    return Fp8(codes.to(torch.float8_e4m3fn), scale)


def _int4(w: Tensor) -> Int4:
    """Works on pieces of the rows, because the search holds several float32 copies of its input."""
    rows = max(1, _PIECE // w.shape[1])
    parts = [_int4_groups(part) for part in w.split(rows)]
    codes, scale, minimum = (torch.cat(p) for p in zip(*parts, strict=True))
    return Int4(codes, scale, minimum, w.shape[1])


_PIECE = 1 << 22
_RANGES = (1.0, 0.88)
"""Parts of a group's range to start from. A narrower range is worse at its ends and better in its middle."""
_REFITS = 2


def _int4_groups(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and minimum with the smallest squared error that is found. From each range the search alternates:
    it fits the codes to the line, then the line to the codes. Values that are on such a grid already do not change."""
    # Padded with the last value of the row, so that the padding never makes a group's range wider.
    groups = torch.cat((w, w[:, -1:].expand(-1, -w.shape[1] % GROUP)), 1).unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle = groups.mean(-1, keepdim=True)
    best: tuple[Tensor, ...] | None = None
    for part in _RANGES:
        scale = (high - low) * (part / 15)
        minimum = (high + low) / 2 - 7.5 * scale
        for _ in range(1 + _REFITS):
            # Codes are chosen for the rounded scale and minimum, because they are read with these.
            scale, minimum = scale.half(), minimum.half()
            step, start = scale.float(), minimum.float()
            codes = ((groups - start) / torch.where(step == 0, 1, step)).round().clamp(0, 15)
            error = (codes * step + start - groups).square().sum(-1, keepdim=True)
            found = (error, codes, scale, minimum)
            if best is None:
                best = found
            else:
                better = error < best[0]
                best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
            mean = codes.mean(-1, keepdim=True)
            spread = (codes - mean).square().sum(-1, keepdim=True)
            slope = ((codes - mean) * (groups - middle)).sum(-1, keepdim=True)
            scale = slope / torch.where(spread == 0, 1, spread)
            minimum = middle - scale * mean
    assert best is not None
    _, codes, scale, minimum = best
    nibbles = codes.to(torch.uint8)
    packed = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    return packed.flatten(1), scale.squeeze(-1), minimum.squeeze(-1)


_FORMATS: dict[Quantization, tuple[type[Quantised], Callable[[Tensor], Quantised]]] = {
    "int8": (Int8, _int8),
    "int4": (Int4, _int4),
    "fp8": (Fp8, _fp8),
}


def concat(weights: Sequence[Weight]) -> Weight:
    """Joins linears with the same input into one, with their rows in order. Mixed formats are joined as values."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if all(isinstance(w, Int4) for w in weights):
        same = [w for w in weights if isinstance(w, Int4)]
        codes, scale, minimum = (
            torch.cat([getattr(w, n) for w in same]) for n in ("codes", "scale", "minimum")
        )
        return Int4(codes, scale, minimum, same[0].inputs)
    return torch.cat([w if isinstance(w, Tensor) else w.values(torch.float32) for w in weights])


def linear_bytes(out: int, inputs: int, bytes_per_value: int, to: Quantization | None) -> int:
    """Bytes of one linear's weight, scales included."""
    if to in ("int8", "fp8"):
        return out * inputs + 4 * out
    if to == "int4":
        return out * -(-inputs // GROUP) * (GROUP // 2 + 4)
    return out * inputs * bytes_per_value
