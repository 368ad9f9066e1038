"""Merges the splits of attention: one output row is the sum of the splits, weighted by their shares of the softmax.

parts float32 [P, HK, BLOCK_M, D] and lse float32 [P, HK, BLOCK_M] (base 2) of `attention`, out [T, HQ, D].
Not launched if nothing was split. Bytes: splits x D x 4 a row. FLOPs: 2 x splits x D a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast


@triton.jit
def combine_splits(
    part_ptr, lse_ptr, starts_ptr, merge_ptr, out_ptr, so_token, so_head,
    HK: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (merges, query tokens of a tile x HQ). A merge is (sequence or -1, first query, part, splits)."""
    item = merge_ptr + tl.program_id(0) * 4
    s = tl.load(item)
    if s < 0:
        return
    first, part, splits = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    token = tl.program_id(1) // (HK * G)
    head = tl.program_id(1) % (HK * G)
    t0 = tl.load(starts_ptr + s)
    if first + token >= tl.load(starts_ptr + s + 1) - t0:
        return
    i = tl.arange(0, S)
    d = tl.arange(0, BLOCK_D)
    there = i < splits
    at = ((part + i).to(tl.int64) * HK + head // G) * BLOCK_M + token * G + head % G
    lse = tl.load(lse_ptr + at, mask=there, other=-1.0e30)
    weight = tl.where(there, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    part_o = tl.load(
        part_ptr + at[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
    )
    row = tl.sum(part_o * weight[:, None], 0) / tl.sum(weight, 0)
    to = out_ptr + (t0 + first + token) * so_token + head * so_head + d
    tl.store(to, cast(row, out_ptr.dtype.element_ty), mask=d < D)


def combine(
    parts: tuple[Tensor, Tensor], starts: Tensor, merges: Tensor, out: Tensor, rows: int, most: int
) -> None:
    """merges int32 [M, 4]. rows: those of the tile. most: the largest number of splits in the list."""
    part, lse = parts
    heads, dim = out.shape[1], out.shape[2]
    kv_heads = part.shape[1]
    groups = heads // kv_heads
    combine_splits[len(merges), rows // groups * heads](
        part, lse, starts, merges, out, out.stride(0), out.stride(1),
        HK=kv_heads, G=groups, BLOCK_M=rows, S=triton.next_power_of_2(most), D=dim,
        BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
