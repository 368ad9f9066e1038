"""Paged attention: decode, chunked prefill and both in one batch, over blocks in any order.

One program computes BLOCK_Q query tokens of one sequence, for the G query heads that share a KV head, as rows of one
tile. It goes over all keys, or over one split of them; `combine` merges the splits. A work list says which ones. The
host builds it once a step for all layers (engine.ops.nvidia.split). So the grid does not depend on lengths and can be
padded for a CUDA graph. Invariant: keys after the end of a sequence are never read.

q [T, HQ, D]; one layer's K and V [block, HK, slot, D] by strides, in q's dtype or e4m3 with scales
[block, HK, slot]; tables int32 [rows, blocks]; out like q.
Bytes: 2 x kv_len x HK x D x size a sequence (they limit decode). FLOPs: 4 x q_len x kv_len x HQ x D, of which half
is below the causal diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.nvidia.kernels.common import cast, dot, from_e4m3

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: query rows of a program (tokens x heads of a group). keys: keys that it processes at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _step(
    q, m, total, acc, j, start, end, seen, d, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr,
    scale, softcap, s_block, s_slot, ss_block,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [j, j + BLOCK_N), of which only [start, end) are read. `seen` [rows]: the
    last key that a row may see. m, total [rows]: running maximum (base 2) and sum. acc: [rows, D]."""
    pos = j + tl.arange(0, BLOCK_N)
    there = pos < end
    if WINDOW > 0:
        there = there & (pos >= start)  # earlier blocks may have been given back and may hold anything
    in_head = d < D
    if MASKED:
        page = tl.load(table_ptr + pos // PAGE, mask=there, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + pos // PAGE).to(tl.int64)
    at = page * s_block + (pos % PAGE) * s_slot
    if MASKED or d.shape[0] != D:
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=there[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at[None, :] + d[:, None])
        v = tl.load(v_ptr + at[:, None] + d[None, :])
    if SCALED:
        scale_at = page * ss_block + pos % PAGE
        ks = tl.load(ks_ptr + scale_at, mask=there, other=0.0)
        vs = tl.load(vs_ptr + scale_at, mask=there, other=0.0)
        scores = dot(q, from_e4m3(k, q.dtype)) * (ks * scale)[None, :]
    else:
        scores = dot(q, k) * scale
    if SOFTCAP:
        # scale already holds log2(e); tanh(x) = 1 - 2 / (e^2x + 1).
        cap = softcap * 1.4426950408889634
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
    if MASKED:
        keep = there[None, :] & (pos[None, :] <= seen[:, None])
        if WINDOW > 0:
            keep = keep & (pos[None, :] > seen[:, None] - WINDOW)
        scores = tl.where(keep, scores, -1.0e30)
    top = tl.maximum(m, tl.max(scores, 1))
    fade = tl.exp2(m - top)
    p = tl.exp2(scores - top[:, None])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    total = total * fade + tl.sum(p, 1)
    if SCALED:
        # The scale of a value is multiplied into its weight, which is cheaper than scaling the tile.
        p = p * vs[None, :]
        acc = acc * fade[:, None] + dot(cast(p, q.dtype), from_e4m3(v, q.dtype))
    else:
        acc = acc * fade[:, None] + dot(cast(p, q.dtype), v)
    return top, total, acc


@triton.jit
def paged_attention(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, tables_ptr, rows_ptr, starts_ptr, lens_ptr, work_ptr,
    part_ptr, lse_ptr, out_ptr, scale, softcap,
    sq_token, sq_head, so_token, so_head, s_table, s_block, s_head, s_slot, ss_block, ss_head,
    G: tl.constexpr, HK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid (work items, HK). A work item is (sequence or -1, first query, split, splits, part)."""
    item = work_ptr + tl.program_id(0) * 5
    hk = tl.program_id(1)
    s = tl.load(item)
    if s < 0:
        return
    first, split, splits, part = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    t0 = tl.load(starts_ptr + s)
    q_len = tl.load(starts_ptr + s + 1) - t0
    kv_len = tl.load(lens_ptr + s)
    past = kv_len - q_len
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    qi = first + row // G
    head = hk * G + row % G
    alive = (row < BLOCK_Q * G) & (qi < q_len)
    q = tl.load(
        q_ptr + (t0 + qi)[:, None] * sq_token + head[:, None] * sq_head + d[None, :],
        mask=alive[:, None] & (d < D)[None, :],
        other=0.0,
    )
    # Keys [begin, end) are those that any row sees. They are cut into equal splits of whole tiles.
    end = tl.minimum(kv_len, past + first + BLOCK_Q)
    start = 0
    begin = 0
    if WINDOW > 0:
        start = tl.maximum(past + first - WINDOW + 1, 0)
        begin = start // BLOCK_N * BLOCK_N
    each = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
    lo = begin + split * each
    hi = tl.minimum(lo + each, end)
    # Up to here every row sees every key, and no mask is needed.
    full = tl.minimum(hi, past + first + 1)
    full = lo + tl.maximum(full - lo, 0) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        full = lo

    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_head = k_ptr + hk * s_head
    v_head = v_ptr + hk * s_head
    ks_head = ks_ptr + hk * ss_head
    vs_head = vs_ptr + hk * ss_head
    table = tables_ptr + tl.load(rows_ptr + s).to(tl.int64) * s_table
    seen = past + qi
    for j in range(lo, full, BLOCK_N):
        m, total, acc = _step(
            q, m, total, acc, j, start, hi, seen, d, k_head, v_head, ks_head, vs_head, table,
            scale, softcap, s_block, s_slot, ss_block,
            BLOCK_N, PAGE, D, SCALED, False, WINDOW, SOFTCAP,
        )  # fmt: skip
    for j in range(full, hi, BLOCK_N):
        m, total, acc = _step(
            q, m, total, acc, j, start, hi, seen, d, k_head, v_head, ks_head, vs_head, table,
            scale, softcap, s_block, s_slot, ss_block,
            BLOCK_N, PAGE, D, SCALED, True, WINDOW, SOFTCAP,
        )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    if splits == 1:
        tl.store(
            out_ptr + (t0 + qi)[:, None] * so_token + head[:, None] * so_head + d[None, :],
            cast(acc, out_ptr.dtype.element_ty),
            mask=alive[:, None] & (d < D)[None, :],
        )
    else:
        at = (part.to(tl.int64) * HK + hk) * BLOCK_M + row
        tl.store(part_ptr + at[:, None] * D + d[None, :], acc, mask=alive[:, None] & (d < D)[None, :])
        tl.store(lse_ptr + at, tl.where(empty, -1.0e30, m + tl.log2(total)), mask=alive)


def attend(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    lens: Tensor,
    work: Tensor,
    parts: tuple[Tensor, Tensor] | None,
    out: Tensor,
    scale: float,
    tile: Tile,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Runs a work list int32 [W, 5]. parts: (float32 [P, HK, tile.rows, D], float32 [P, HK, tile.rows]) for
    items with more than one split, or None if there is no such item."""
    k, v = kv
    ks, vs = scales or (q, q)
    part, lse = parts or (q, q)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    groups = heads // kv_heads
    paged_attention[len(work), kv_heads](
        q, k, v, ks, vs, tables, rows, starts, lens, work, part, lse, out, scale * LOG2E, softcap or 0.0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        k.stride(0), k.stride(1), k.stride(2),
        ks.stride(0) if scales else 0, ks.stride(1) if scales else 0,
        G=groups, HK=kv_heads, BLOCK_Q=tile.rows // groups, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        PAGE=k.shape[2], D=dim, BLOCK_D=triton.next_power_of_2(dim), SCALED=scales is not None,
        WINDOW=window or 0, SOFTCAP=softcap is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def parts_for(count: int, kv_heads: int, tile: Tile, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for `count` splits."""
    shape = (count, kv_heads, tile.rows)
    return (
        torch.empty((*shape, dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
