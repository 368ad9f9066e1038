"""CpuOps: oneDNN linears with packed weights, paged attention in torch. For any CPU and any dtype except float64.

torch packs the weight of a linear again at every call. Packing it once makes the linears of a decode 2.3 to 3.8 times
as fast. The packing operations are private to torch (Inductor's freezing uses them), so if one fails, `F.linear` is
used instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.base import AttentionWeights, Packed, RopeTable, StepInput, StepPlan
from engine.ops.cpu.threads import TorchThreads
from engine.ops.fp8 import Kv, fetch
from engine.ops.reference import ReferenceOps
from engine.ops.weights import Quantization


@dataclass(slots=True)
class _Plan(StepPlan):
    """decodes int64 [D]: sequences with one query, attended to together."""

    decodes: Tensor
    gathered: tuple[Tensor, Tensor, Tensor] | None = None

    def gather(self, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """For `decodes`: blocks [D, most blocks], slots after the end bool [D, most slots], query rows [D]."""
        if self.gathered is None:
            b = self.batch
            lens = b.kv_lens[self.decodes]
            most = -(-int(lens.max()) // block_size)
            blocks = b.tables[b.rows[self.decodes].long(), :most]
            beyond = torch.arange(most * block_size) >= lens[:, None]
            self.gathered = blocks, beyond, b.q_starts[self.decodes].long()
        return self.gathered


class CpuOps(ReferenceOps):
    """For bfloat16 and float32."""

    name = "cpu"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
    ) -> None:
        super().__init__(device, dtype, quantization)
        self._threads = TorchThreads()

    def pack_plain(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed(weight.shape[1], weight.shape[0], _reorder(weight), bias)

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        if isinstance(w.data, Tensor) and w.data.is_mkldnn:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w.data, w.bias, "none", [], "")
            return out
        return super().linear(x, w)

    def plan(self, batch: StepInput, rope: RopeTable) -> _Plan:
        self._threads.follow()
        single = [i for i, n in enumerate(batch.q_lens) if n == 1]
        mean = sum(batch.kv_lens_host[i] for i in single) / max(1, len(single))
        # All are padded to the longest one. A sequence that is much longer than the others is computed alone.
        decodes = torch.tensor([i for i in single if batch.kv_lens_host[i] <= 2 * mean], dtype=torch.int64)
        return _Plan(batch, rope, decodes)

    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        assert isinstance(plan, _Plan)
        b = plan.batch
        out = torch.empty_like(q)
        self._decode(q, kv, w, plan, out)
        together = set(plan.decodes.tolist())
        groups = w.heads // w.kv_heads
        first = 0
        for i, (row, n, length) in enumerate(zip(b.rows.tolist(), b.q_lens, b.kv_lens_host, strict=True)):
            if i not in together:
                blocks = b.tables[row, : -(-length // kv.shape[3])]
                k, v = (half.transpose(0, 1).flatten(1, 2)[:, :length] for half in fetch(kv, blocks, q.dtype))
                rows = q[first : first + n].view(n, w.kv_heads, groups, w.head_dim).permute(1, 2, 0, 3)
                mask = None
                if n > 1:
                    mask = torch.arange(length) <= torch.arange(length - n, length)[:, None]
                    mask = mask.repeat(groups, 1)
                y = _sdpa(rows.flatten(1, 2)[None], k[None], v[None], attn_mask=mask)
                y = y.view(w.kv_heads, groups, n, w.head_dim).permute(2, 0, 1, 3)
                out[first : first + n] = y.flatten(1, 2)
            first += n
        return out

    def _decode(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: _Plan, out: Tensor) -> None:
        """Sequences with one query, all together over gathered and padded keys."""
        count = len(plan.decodes)
        if not count:
            return
        blocks, beyond, queries = plan.gather(kv.shape[3])
        # Slots after the end of a sequence may hold NaN, which a mask does not remove. They become zero.
        k, v = (
            half.transpose(1, 2).flatten(2, 3).masked_fill_(beyond[:, None, :, None], 0)
            for half in fetch(kv, blocks, q.dtype)
        )
        # The query heads of one KV head become rows. torch's own enable_gqa is 30 times slower.
        rows = q[queries].view(count, w.kv_heads, -1, w.head_dim)
        out[queries] = _sdpa(rows, k, v, attn_mask=~beyond[:, None, None]).flatten(1, 2)


_sdpa = torch.nn.functional.scaled_dot_product_attention


def _reorder(weight: Tensor) -> Tensor:
    """oneDNN's packed form of a weight [out, in], or the weight itself if packing is not possible."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise.default(probe, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return weight
    return packed
