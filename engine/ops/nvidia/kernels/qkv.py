"""QK-norm, RoPE and the write of K and V into their blocks, in one launch instead of about fourteen.

qkv [T, (HQ + 2 HK) x D] -> q [T, HQ, D]. K and V of each token go to its slot in one layer's cache
[block, HK, slot, D], by strides. They are stored in the cache's dtype, or as e4m3 bits with a float32 scale per (token,
head), bit for bit what engine.ops.fp8 stores. A negative slot is not written (padding of a graph).
Bytes: 2 x (HQ + 2 HK) x D x size a token. FLOPs: about 10 a value.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast, to_e4m3


@triton.jit
def prepare_qkv(
    qkv_ptr, q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, slot_ptr, pos_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, eps,
    s_token, sq_token, s_block, s_head, s_slot, ss_block, ss_head,
    HQ: tl.constexpr, HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid (T, (HQ + 2 HK) / HEADS): HEADS heads of one kind, each as two halves that are rotated together."""
    t = tl.program_id(0)
    h0 = tl.program_id(1) * HEADS
    half: tl.constexpr = D // 2
    i = tl.arange(0, BLOCK_H)
    inside = (i < half)[None, :]
    head = h0 + tl.arange(0, HEADS)
    src = qkv_ptr + t * s_token + head[:, None] * D + i[None, :]
    a = tl.load(src, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(src + half, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    if h0 < HQ + HK:
        if NORM:
            mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D
            inverse = 1.0 / tl.sqrt_rn(mean + eps)
            w_ptr = qw_ptr
            if h0 >= HQ:
                w_ptr = kw_ptr
            wa = tl.load(w_ptr + i, mask=i < half, other=0.0).to(tl.float32)
            wb = tl.load(w_ptr + half + i, mask=i < half, other=0.0).to(tl.float32)
            a = a * inverse[:, None] * wa[None, :]
            b = b * inverse[:, None] * wb[None, :]
        angle = tl.load(pos_ptr + t).to(tl.int64) * half + i
        cos = tl.load(cos_ptr + angle, mask=i < half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=i < half, other=0.0)[None, :]
        x = a * cos - b * sin
        y = b * cos + a * sin
    else:
        x = a
        y = b
    if h0 < HQ:
        to = q_ptr + t * sq_token + head[:, None] * D + i[None, :]
        tl.store(to, cast(x, kind), mask=inside)
        tl.store(to + half, cast(y, kind), mask=inside)
    else:
        slot = tl.load(slot_ptr + t)
        if slot >= 0:
            cache = k_ptr
            scales = ks_ptr
            hk = head - HQ
            if h0 >= HQ + HK:
                cache = v_ptr
                scales = vs_ptr
                hk = hk - HK
            block = (slot // PAGE).to(tl.int64)
            within = slot % PAGE
            to = cache + block * s_block + hk[:, None] * s_head + within * s_slot + i[None, :]
            if FP8:
                # Rounded to `kind` first, as if the value had been written and read again.
                x = cast(x, kind).to(tl.float32)
                y = cast(y, kind).to(tl.float32)
                most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
                scale = tl.maximum(
                    tl.div_rn(most, tl.full([HEADS], 448.0, tl.float32)), 1.1754943508222875e-38
                )
                # A maximum ignores NaN. This sum makes the scale NaN if one value is not finite.
                scale = scale + (tl.sum(x * 0.0, 1) + tl.sum(y * 0.0, 1))
                wide = tl.broadcast_to(scale[:, None], [HEADS, BLOCK_H])
                tl.store(scales + block * ss_block + hk * ss_head + within, scale)
                tl.store(to, to_e4m3(tl.div_rn(x, wide)), mask=inside)
                tl.store(to + half, to_e4m3(tl.div_rn(y, wide)), mask=inside)
            else:
                tl.store(to, cast(x, cache.dtype.element_ty), mask=inside)
                tl.store(to + half, cast(y, cache.dtype.element_ty), mask=inside)


def prepare(
    qkv: Tensor,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """cos, sin: float32 [positions, D / 2]; norms: weights of q and k [D], or None for no norm."""
    k, v = kv
    ks, vs = scales or (cos, cos)
    qw, kw = norms or (qkv, qkv)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    together = math.gcd(heads, kv_heads)
    # Few tokens: one program a head, so that the whole GPU works. Many: fewer, longer programs.
    size = min(8, together & -together) if tokens >= 64 else 1
    prepare_qkv[tokens, (heads + 2 * kv_heads) // size](
        qkv, q, k, v, ks, vs, slots, positions, cos, sin, qw, kw, eps,
        qkv.stride(0), q.stride(0), k.stride(0), k.stride(1), k.stride(2),
        ks.stride(0) if scales else 0, ks.stride(1) if scales else 0,
        HQ=heads, HK=kv_heads, HEADS=size, D=dim, BLOCK_H=triton.next_power_of_2(dim // 2),
        PAGE=k.shape[2], NORM=norms is not None, FP8=scales is not None,
        num_warps=4 if size == 8 else 1,
    )  # fmt: skip
