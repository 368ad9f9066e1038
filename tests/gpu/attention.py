"""Attention alone: decode in GB/s compared with a copy on this card, prefill in TFLOP/s, and the same with torch's SDPA
and with the attention libraries that are installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.ops.nvidia.triton import TritonOps
from tests.gpu import peers
from tests.gpu.machine import Machine, Table
from tests.gpu.problems import QWEN3_8B, Problem

_sdpa = torch.nn.functional.scaled_dot_product_attention


OF_COPY = 0.8
"""Target for decode attention if the KV is larger than LARGE bytes, so that no cache holds it."""
LARGE = 64e6


def run(m: Machine) -> list[Table]:
    """Qwen3-8B's heads (32/8 of 128) in bfloat16, blocks of 16."""
    return [_decode(m), _prefill(m)]


def _decode(m: Machine) -> Table:
    c, dtype = QWEN3_8B, torch.bfloat16
    others = peers.backends(m, c)
    columns = (
        "decode attention", "KV MB", "us", "GB/s", "of copy", "target", "FP8 us", "FP8 GB/s", "SDPA us",
    )  # fmt: skip
    table = Table("Decode attention, one layer", (*columns, *(f"{name} us" for name, _, _ in others)))
    for batch in (1, 8, 64) if m.real else (1,):
        for context in (512, 2048, 8192, 32_768) if m.real else (20,):
            size = batch * context * 2 * c.num_kv_heads * c.head_dim * 2
            if 6 * size > m.free():
                table.rows.append(
                    (
                        f"{batch} x {context:,}",
                        f"{size / 1e6:,.0f}",
                        *["no memory"] * (len(table.columns) - 2),
                    )
                )
                continue
            p = Problem(c, [(1, context)] * batch, 16, m.device, dtype, poison=False)
            kv, q, rope = p.cache(), p.q(), p.rope()
            cells = [f"{batch} x {context:,}", f"{size / 1e6:,.0f}"]
            for fp8 in (False, True):
                ops = TritonOps(m.device, dtype, c, fp8_kv=fp8)
                cache: Any = p.fp8(kv) if fp8 else kv
                plan = ops.plan(p.batch, rope)
                t = m.seconds(partial(ops.attend, q, cache, plan, c.head_dim**-0.5))
                read = cache.nbytes * batch * context / (p.blocks * p.block_size)
                cells += [f"{t * 1e6:.1f}", f"{read / t / 1e9:,.0f}"]
                if not fp8:
                    cells.append(f"{read / t / m.copy_bandwidth:.0%}")
                    asked = read > LARGE or not m.real
                    what = f"decode attention, {batch} x {context:,}, part of the copy bandwidth"
                    cells.append(m.target(what, read / t / m.copy_bandwidth, OF_COPY) if asked else "")
                del cache
            k, v = _dense(kv, batch, context)
            grouped = q.view(batch, c.num_kv_heads, -1, c.head_dim)
            cells.append(f"{m.seconds(partial(_sdpa, grouped, k, v)) * 1e6:.1f}")
            for _, other, block_size in others:
                own, theirs = p, kv
                if block_size != p.block_size:
                    own = Problem(c, [(1, context)] * batch, block_size, m.device, dtype, poison=False)
                    theirs = own.cache()
                plan = other.plan(own.batch, rope)
                cells.append(
                    f"{m.seconds(partial(other.attend, q, theirs, plan, c.head_dim**-0.5)) * 1e6:.1f}"
                )
            table.rows.append(tuple(cells))
    return table


def _dense(kv: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Contiguous keys and values [batch, kv_head, context, dim]. A paged kernel never gets them like this."""
    c = QWEN3_8B
    shape = (2, batch, c.num_kv_heads, context, c.head_dim)
    k, v = kv.flatten()[: torch.Size(shape).numel()].view(shape)
    return k, v


def _prefill(m: Machine) -> Table:
    c, dtype = QWEN3_8B, torch.bfloat16
    others = peers.backends(m, c)
    columns = ("new + cached tokens", "ms", "TFLOP/s", "SDPA ms", "SDPA TFLOP/s")
    table = Table(
        "Prefill attention, one layer, causal", (*columns, *(f"{name} ms" for name, _, _ in others))
    )
    for new, past in (
        ((2048, 0), (8192, 0), (16_384, 0), (512, 8192), (16, 32_768), (1, 177_000))
        if m.real
        else ((5, 0), (3, 20))
    ):
        p = Problem(c, [(new, new + past)], 16, m.device, dtype, poison=False)
        ops = TritonOps(m.device, dtype, c)
        kv, q = p.cache(), p.q()
        plan = ops.plan(p.batch, p.rope())
        flops = 4 * c.num_heads * c.head_dim * (new * past + new * (new + 1) // 2)
        t = m.seconds(partial(ops.attend, q, kv, plan, c.head_dim**-0.5))
        cells = [f"{new:,} + {past:,}", f"{t * 1e3:.3f}", f"{flops / t / 1e12:,.1f}"]
        if past == 0:
            k, v = (x.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for x in _dense(kv, 1, new))
            dense = q.transpose(0, 1)[None].contiguous()
            t = m.seconds(partial(_sdpa, dense, k, v, is_causal=True))
            cells += [f"{t * 1e3:.3f}", f"{flops / t / 1e12:,.1f}"]
        cells += [""] * (5 - len(cells))
        for _, other, block_size in others:
            own, theirs = p, kv
            if block_size != p.block_size:
                own = Problem(c, [(new, new + past)], block_size, m.device, dtype, poison=False)
                theirs = own.cache()
            plan = other.plan(own.batch, own.rope())
            cells.append(f"{m.seconds(partial(other.attend, q, theirs, plan, c.head_dim**-0.5)) * 1e3:.3f}")
        table.rows.append(tuple(cells))
    return table
