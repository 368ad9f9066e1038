"""GGUF's number formats: how many bytes a block takes, and what its values are.

Computes the plain formats and the blocks of 32 values, with the formulas of ggml-quants.c in float32, so results are
equal to the gguf package's bit by bit. That package decodes the K-quants. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Blocks = np.ndarray
"""Structured array [n] of one block type."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A block: `values` numbers in `size` bytes. `decode` writes float32 [n, values] into its second
    argument; None goes through the gguf package."""

    name: str
    values: int
    size: int
    dtype: np.dtype | None = None
    decode: Callable[[Blocks, np.ndarray], None] | None = None


def _plain(blocks: Blocks, out: np.ndarray) -> None:
    out[:, 0] = blocks


def _bf16(blocks: Blocks, out: np.ndarray) -> None:
    """bfloat16 is the upper half of a float32."""
    np.left_shift(blocks, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


def _scale(blocks: Blocks, name: str) -> np.ndarray:
    return blocks[name].astype(np.float32)[:, None]


def _nibbles(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Low halves are values 0-15, high halves values 16-31; uint8 [n, 16] each."""
    qs = blocks["qs"]
    return qs & np.uint8(15), qs >> np.uint8(4)


def _fifth_bits(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Nibbles with their fifth bit out of `qh` (bit i belongs to value i)."""
    low, high = _nibbles(blocks)
    bits = np.unpackbits(blocks["qh"], axis=1, bitorder="little") << np.uint8(4)
    return low | bits[:, :16], high | bits[:, 16:]


def _q4_0(blocks: Blocks, out: np.ndarray) -> None:
    d = _scale(blocks, "d")
    for half, q in enumerate(_nibbles(blocks)):
        np.multiply(d, q.view(np.int8) - np.int8(8), out=out[:, half * 16 : half * 16 + 16])


def _q4_1(blocks: Blocks, out: np.ndarray) -> None:
    d, m = _scale(blocks, "d"), _scale(blocks, "m")
    for half, q in enumerate(_nibbles(blocks)):
        np.multiply(d, q, out=out[:, half * 16 : half * 16 + 16])
    out += m


def _q5_0(blocks: Blocks, out: np.ndarray) -> None:
    d = _scale(blocks, "d")
    for half, q in enumerate(_fifth_bits(blocks)):
        np.multiply(d, q.view(np.int8) - np.int8(16), out=out[:, half * 16 : half * 16 + 16])


def _q5_1(blocks: Blocks, out: np.ndarray) -> None:
    d, m = _scale(blocks, "d"), _scale(blocks, "m")
    for half, q in enumerate(_fifth_bits(blocks)):
        np.multiply(d, q, out=out[:, half * 16 : half * 16 + 16])
    out += m


def _q8_0(blocks: Blocks, out: np.ndarray) -> None:
    np.multiply(_scale(blocks, "d"), blocks["qs"], out=out)


def _of(name: str, values: int, decode: Callable[[Blocks, np.ndarray], None], *fields: tuple) -> Layout:
    dtype = (
        np.dtype(list(fields))
        if isinstance(fields[0][0], str) and len(fields[0]) > 1
        else np.dtype(fields[0][0])
    )
    return Layout(name, values, dtype.itemsize, dtype, decode)


_D, _M, _QH = ("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4)
_QS = ("qs", "u1", 16)

LAYOUTS: dict[int, Layout] = {
    0: _of("F32", 1, _plain, ("<f4",)),
    1: _of("F16", 1, _plain, ("<f2",)),
    30: _of("BF16", 1, _bf16, ("<u2",)),
    2: _of("Q4_0", 32, _q4_0, _D, _QS),
    3: _of("Q4_1", 32, _q4_1, _D, _M, _QS),
    6: _of("Q5_0", 32, _q5_0, _D, _QH, _QS),
    7: _of("Q5_1", 32, _q5_1, _D, _M, _QH, _QS),
    8: _of("Q8_0", 32, _q8_0, _D, ("qs", "i1", 32)),
    10: Layout("Q2_K", 256, 84),
    11: Layout("Q3_K", 256, 110),
    12: Layout("Q4_K", 256, 144),
    13: Layout("Q5_K", 256, 176),
    14: Layout("Q6_K", 256, 210),
}
"""By GGML type number."""

_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
}
_OTHERS |= {22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


def layout_name(kind: int) -> str:
    """The format's name for messages; a number nobody knows says so."""
    return LAYOUTS[kind].name if kind in LAYOUTS else _OTHERS.get(kind, f"unknown type {kind}")


INT4_TYPES = (2, 3)
"""Q4_0 and Q4_1: 32 codes of 4 bits, a float16 scale and, given or implied, a minimum."""


def int4_groups(raw: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 [rows, bytes] of such a type -> codes uint8 [rows, groups x 16], as they are in the file, and
    scale and minimum float16 [rows, groups]. Q4_0's zero is code 8: its minimum is -8 scales, exactly."""
    layout = LAYOUTS[kind]
    assert layout.dtype is not None
    blocks = np.ascontiguousarray(raw).view(layout.dtype)
    scale = np.ascontiguousarray(blocks["d"])
    minimum = np.ascontiguousarray(blocks["m"]) if kind == 3 else scale * np.float16(-8)
    return blocks["qs"].reshape(len(raw), -1), scale, minimum


def dequantise(raw: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Decode uint8 [rows, bytes] of GGML type `kind` into contiguous float32 [rows, columns]."""
    layout = LAYOUTS[kind]
    if layout.decode is None or layout.dtype is None:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        out[:] = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(kind)).reshape(out.shape)
        return
    blocks = np.ascontiguousarray(raw).reshape(-1).view(layout.dtype)
    layout.decode(blocks, out.reshape(-1, layout.values))
