"""CpuOps: oneDNN linears with packed weights, paged attention on torch.

torch re-packs a linear's weight on every call; packing once makes decode linears 2.3 to 3.8 times as
fast. The packing ops are private to torch (Inductor's freezing uses them), so what fails falls back to
`F.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.base import AttentionWeights, Packed, StepPlan
from engine.ops.reference import ReferenceOps


class CpuOps(ReferenceOps):
    """bfloat16 and float32 on a CPU."""

    name = "cpu"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        packed = super().pack(weight, bias)
        packed.data = _reorder(packed.data)
        return packed

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        if w.data.is_mkldnn:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w.data, w.bias, "none", [], "")
            return out
        return torch.nn.functional.linear(x, w.data, w.bias)

    def attention(self, q: Tensor, kv: Tensor, w: AttentionWeights, plan: StepPlan) -> Tensor:
        b = plan.batch
        out = torch.empty_like(q)
        block_size = kv.shape[3]
        groups = w.heads // w.kv_heads
        first = 0
        for row, n, length in zip(b.rows.tolist(), b.q_lens, b.kv_lens_host, strict=True):
            blocks = b.tables[row, : -(-length // block_size)]
            k, v = (
                half.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :length]
                for half in kv.unbind(0)
            )
            # The query heads of one KV head stand as rows: torch's own enable_gqa is 30 times slower.
            rows = (
                q[first : first + n].view(n, w.kv_heads, groups, w.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
            )
            mask = None
            if n > 1:
                key = torch.arange(length, device=q.device)
                mask = (key <= torch.arange(length - n, length)[:, None]).repeat(groups, 1)
            y = torch.nn.functional.scaled_dot_product_attention(
                rows[None], k[None], v[None], attn_mask=mask
            )[0]
            out[first : first + n] = (
                y.view(w.kv_heads, groups, n, w.head_dim).permute(2, 0, 1, 3).flatten(1, 2)
            )
            first += n
        return out


def _reorder(weight: Tensor) -> Tensor:
    """oneDNN's blocked form of a weight [out, in]; the weight itself where that cannot be had."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise.default(probe, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return weight
    return packed
