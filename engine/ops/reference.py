"""ReferenceOps: plain torch on any device, float64 when asked.

Slow and obvious on purpose: one sequence at a time, with the softmax written out. Every other back end is tested
against it. Invariant: norms, rotation and softmax run in at least float32, as in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.base import AttentionWeights, Ops, Packed, StepInput, StepPlan
from engine.ops.fp8 import Kv, fetch, store
from engine.ops.weights import Quantization


class ReferenceOps(Ops):
    """The definition of each operation."""

    name = "reference"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
    ) -> None:
        super().__init__(device, dtype, quantization)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        """The precision of norms, rotation and softmax."""

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        weight = w.data if isinstance(w.data, Tensor) else w.data.values(self.dtype)
        return torch.nn.functional.linear(x, weight, w.bias)

    def add_rms_norm(
        self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual if delta is None else residual + delta
        return self._rms_norm(residual, weight, eps), residual

    def qkv_prepare(self, qkv: Tensor, w: AttentionWeights, kv: Kv, plan: StepPlan) -> Tensor:
        b = plan.batch
        q, k, v = qkv.view(len(qkv), -1, w.head_dim).split([w.heads, w.kv_heads, w.kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._rms_norm(q, w.q_norm, w.eps), self._rms_norm(k, w.k_norm, w.eps)
        positions = b.positions.long()
        cos, sin = (t[positions].to(self.wide)[:, None] for t in (plan.rope.cos, plan.rope.sin))
        block_size = kv.shape[3]
        store(kv, b.slots // block_size, b.slots % block_size, self._rotate(k, cos, sin), v)
        return self._rotate(q, cos, sin)

    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        return attend(q, kv, plan.batch, self.wide, w.head_dim**-0.5)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        # Rounded before it is multiplied by the weight, as in transformers: in bf16 the order changes the result.
        return wide.to(x.dtype) * weight

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates [T, heads, head_dim]. Dimension i forms a pair with dimension i + head_dim / 2."""
        a, b = x.to(self.wide).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(
    q: Tensor,
    kv: Kv,
    batch: StepInput,
    wide: torch.dtype,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of q [T, heads, dim] over each sequence's blocks in one layer -> the same shape.

    wide: precision of the arithmetic. window: how many tokens a token sees, itself included; earlier ones are
    not read. softcap: scores become softcap x tanh(score / softcap).
    """
    out = torch.empty_like(q)
    block_size, groups = kv.shape[3], q.shape[1] // kv.shape[2]
    first = 0
    for row, n, length in zip(batch.rows.tolist(), batch.q_lens, batch.kv_lens_host, strict=True):
        skipped = 0 if window is None else max(0, length - n - window + 1) // block_size
        blocks = batch.tables[row, skipped : -(-length // block_size)].long()
        start = skipped * block_size
        k, v = (half.transpose(0, 1).flatten(1, 2)[:, : length - start] for half in fetch(kv, blocks, wide))
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        scores = q[first : first + n].transpose(0, 1).to(wide) @ k.mT * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        key = torch.arange(start, length, device=q.device)
        query = torch.arange(length - n, length, device=q.device)[:, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        scores.masked_fill_(hidden, float("-inf"))
        out[first : first + n] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
        first += n
    return out
