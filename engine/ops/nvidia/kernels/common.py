"""What several kernels use: dot products, rounding, and the bits of e4m3.

Invariant: a kernel computes the same when it is compiled and when it is interpreted. Triton's interpreter multiplies
the raw bits of bfloat16, truncates where a GPU rounds, and converts wrongly to e4m3. The helpers here avoid that. They
have extra code for the interpreter, under `INTERP` only.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether this process interprets its kernels."""
INTERP = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b):
    """a @ b in float32. float32 operands are never shortened to TF32."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 -> dtype, rounded to the nearest, ties to even."""
    if INTERP and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """float32 -> bits of e4m3 (uint8), rounded to the nearest, ties to even, at most 448.

    Works with integers only. So it runs on every GPU, also without FP8, and gives the same bits as torch.
    """
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the values are multiples of 2^-9. Adding 1.5 x 2^23 rounds to the nearest multiple.
    magic = 12582912.0
    steps = tl.abs(x) * 512.0 + magic
    small = steps.to(tl.uint32, bitcast=True) & 0xFF
    return (sign | tl.where(tl.abs(x) < 0.015625, small, normal)).to(tl.uint8)


@triton.jit
def from_e4m3(x, dtype: tl.constexpr):
    """e4m3 -> dtype, exactly. x: float8e4nv, or its bits as uint8 on GPUs without FP8."""
    if x.dtype == tl.uint8:
        # The same bits in the fields of a float16 are the value divided by 2^8, also for subnormals.
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return cast((half * 256.0).to(tl.float32), dtype)
    else:
        return cast(x.to(tl.float32), dtype)
