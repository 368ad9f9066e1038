"""Ops: the operations of a decoder. Only their implementations know the device.

Owns the names of the operations, the shapes that pass between them, and the default bodies of
`attention_block`, `mlp_block` and `decoder`, which are composed of the smaller operations. A back end overrides
the operations where its own code is faster. Two invariants: a layer stores the KV of the whole batch before its
attention reads, and no slot outside a sequence's length is ever read (it may hold NaN).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops.fp8 import Kv, parts
from engine.ops.sampler import SampleRows, sample
from engine.ops.weights import Quantised, Quantization, Weight, quantise

if TYPE_CHECKING:
    from engine.ops.profiling.step_profile import Timer


@dataclass(slots=True)
class Packed:
    """A linear layer in the back end's own form. `data` is private to the Ops that packed it."""

    in_features: int
    out_features: int
    data: Any
    bias: Tensor | None


@dataclass(slots=True)
class AttentionWeights:
    """One attention block. norm [hidden], q_norm and k_norm [head_dim] or None, qkv merged in the order
    q, k, v: hidden -> (heads + 2 kv_heads) * head_dim."""

    norm: Tensor
    qkv: Packed
    out: Packed
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    native: Any = None
    """What the back end stores with it."""


@dataclass(slots=True)
class MlpWeights:
    """One gated MLP. norm [hidden], gate_up merged: hidden -> 2 * intermediate (gate first)."""

    norm: Tensor
    gate_up: Packed
    down: Packed
    eps: float
    native: Any = None


@dataclass(slots=True)
class DecoderWeights:
    """A whole model: embed [vocab, hidden], a pair of blocks for each layer, the last norm [hidden], the head."""

    embed: Tensor
    layers: list[tuple[AttentionWeights, MlpWeights]]
    norm: Tensor
    head: Packed
    eps: float
    native: Any = None


@dataclass(slots=True)
class RopeTable:
    """cos and sin, float32 [positions, head_dim / 2], attention scaling included."""

    cos: Tensor
    sin: Tensor


@dataclass(slots=True)
class StepInput:
    """A step's tokens on the device, rows of one sequence contiguous and in order.

    token_ids int64 [T]; positions int32 [T]; slots int64 [T] = block * block_size + offset;
    tables int32 [rows, max_blocks] (persistent); rows int32 [S], each sequence's row in `tables`;
    q_starts int32 [S + 1]; kv_lens int32 [S], tokens to attend to including this step's;
    logit_rows int64 [L], the token rows whose logits are needed. q_lens and kv_lens_host are the
    same lengths on the host. work and note: see Extras; empty if the back end was not asked.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    rows: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    logit_rows: Tensor
    q_lens: list[int]
    kv_lens_host: list[int]
    work: list[Tensor] = field(default_factory=list)
    note: Any = None


@dataclass(slots=True)
class Extras:
    """What a back end needs on the device in addition to a step's tokens, sent in the same copy. sampling: what
    `draw` reads (it comes back as SampleRows.sent). work: what `plan` reads. note: what the host keeps of it."""

    sampling: NDArray[np.generic] | None = None
    work: list[NDArray[np.generic]] = field(default_factory=list)
    note: Any = None


@dataclass(slots=True)
class StepPlan:
    """What `plan` prepares once a step for all layers. Back ends subclass it."""

    batch: StepInput
    rope: RopeTable


State = tuple[Tensor | None, Tensor]
"""What one block gives to the next: (delta, residual), both [T, hidden]. The hidden state is their sum. A delta
of None means that it was added already. The back end chooses the dtype of the residual."""


class Ops(ABC):
    """A back end. x is [T, features] in `dtype` on `device`, unless a docstring says otherwise."""

    name: str
    fused = False
    """The linears themselves add to a float32 residual, and gate_up applies the activation. No separate pass is
    needed for either."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        """Format of the linears. Embeddings and norms stay in `dtype`."""

    # ------------------------------------------------------------------------ once at the start

    def pack(self, weight: Weight, bias: Tensor | None = None, to: Quantization | None = None) -> Packed:
        """Brings a linear's weight [out, in] (any float dtype, or quantised) and bias [out] into its own form.

        to: the format; None means `quantization`.
        """
        form = to or self.quantization
        b = None if bias is None else bias.to(self.device, self.dtype)
        if form is not None:
            return self.pack_quantised(quantise(weight, form), b)
        plain = weight if isinstance(weight, Tensor) else weight.values(self.dtype)
        return self.pack_plain(plain.to(self.device, self.dtype).contiguous(), b)

    def pack_head(self, weight: Weight) -> Packed:
        """Packs the LM head. With any quantisation it is INT8, because its errors go directly into the logits."""
        return self.pack(weight, to="int8" if self.quantization else None)

    def pack_plain(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """`pack` for a weight that is already in `dtype` on `device`."""
        return Packed(weight.shape[1], weight.shape[0], weight, bias)

    def pack_quantised(self, weight: Quantised, bias: Tensor | None) -> Packed:
        """`pack` for a quantised weight."""
        return Packed(weight.shape[1], weight.shape[0], weight.to(self.device), bias)

    def vector(self, weight: Tensor) -> Tensor:
        """Brings a norm's weight to the device, in `dtype`."""
        return weight.to(self.device, self.dtype).contiguous()

    # ------------------------------------------------------------------------------ once a step

    def extras(self, q_lens: list[int], kv_lens: list[int], rows: SampleRows) -> Extras:
        """What a step with these lengths and draws needs on the device in addition to its tokens."""
        return Extras()

    def plan(self, batch: StepInput, rope: RopeTable) -> StepPlan:
        """Prepares what all layers of this step share."""
        return StepPlan(batch, rope)

    def took(self, seconds: float) -> None:  # noqa: B027 -- a hook that most back ends leave alone
        """Reports how long the forward of the last plan took. A back end may learn from it."""

    def copy_blocks(self, cache: Kv, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies (src, dst) blocks of all layers, in order. cache [layer, 2, block, ...].

        Within one launch a copy may not see what another one wrote. So a new launch starts whenever a
        block id repeats.
        """
        for src, dst in launches(pairs):
            s = torch.tensor(src, device=self.device)
            d = torch.tensor(dst, device=self.device)
            for tensor in parts(cache):
                tensor.index_copy_(2, d, tensor.index_select(2, s))

    # ------------------------------------------------------------------------- small operations

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of table [vocab, hidden] -> residual [T, hidden]."""
        return torch.nn.functional.embedding(token_ids, table)

    @abstractmethod
    def linear(self, x: Tensor, w: Packed) -> Tensor:
        """x @ weight.T + bias: [T, in] -> [T, out]."""

    def logits(self, x: Tensor, head: Packed) -> Tensor:
        """The LM head: [L, hidden] -> [L, vocab], in float32 if the back end can."""
        return self.linear(x, head)

    @abstractmethod
    def add_rms_norm(
        self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Adds delta to the residual. Returns (residual / rms(residual) * weight, residual)."""

    @abstractmethod
    def qkv_prepare(self, qkv: Tensor, w: AttentionWeights, kv: Kv, plan: StepPlan) -> Tensor:
        """QK-norm (if w has one), RoPE, and the write of K and V into their slots.

        qkv [T, (heads + 2 kv_heads) * head_dim]; kv [2, block, kv_head, slot, dim], one layer of the
        cache (with FP8 it is quantised while it is written). Returns q [T, heads, head_dim].
        """

    @abstractmethod
    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each sequence's blocks -> the same shape."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half: [T, 2 * intermediate] -> [T, intermediate]."""

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[list[int], list[int]]:
        """A token for each row of logits [L, vocab], and the rows whose logits are not finite."""
        return sample(logits, rows)

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`sample` without waiting for the device, if the back end can. Returns [2, L] on the device: the token
        ids, and a number above 0 where the logits of a row are not finite."""
        tokens, bad = self.sample(logits, rows)
        out = torch.zeros((2, len(tokens)), dtype=torch.int64)
        out[0] = torch.tensor(tokens)
        out[1, bad] = 1
        return out.to(self.device)

    # ------------------------------------------------------------------------------ whole blocks

    def attention_block(self, state: State, w: AttentionWeights, kv: Kv, plan: StepPlan) -> State:
        """hidden + out(attention(norm(hidden)))."""
        x, residual = self.add_rms_norm(*state, w.norm, w.eps)
        q = self.qkv_prepare(self.linear(x, w.qkv), w, kv, plan)
        return self.linear(self.attention(q, kv, w, plan).flatten(1), w.out), residual

    def mlp_block(self, state: State, w: MlpWeights, plan: StepPlan) -> State:
        """hidden + down(silu(gate) * up) of norm(hidden)."""
        x, residual = self.add_rms_norm(*state, w.norm, w.eps)
        return self.linear(self.silu_mul(self.linear(x, w.gate_up)), w.down), residual

    # ------------------------------------------------------------------------------ whole models

    def decoder(self, w: DecoderWeights, cache: Kv, plan: StepPlan) -> Tensor:
        """Returns logits [L, vocab] of the step's `logit_rows`; writes its KV into cache [layer, 2, block, ...]."""
        batch = plan.batch
        state: State = (None, self.embed(w.embed, batch.token_ids))
        for layer, (attention, mlp) in enumerate(w.layers):
            state = self.attention_block(state, attention, cache[layer], plan)
            state = self.mlp_block(state, mlp, plan)
        delta, residual = state
        rows = batch.logit_rows  # even if there are as many as tokens: one token row may be drawn twice
        delta = None if delta is None else delta[rows]
        hidden, _ = self.add_rms_norm(delta, residual[rows], w.norm, w.eps)
        return self.logits(hidden, w.head)

    def timed_decoder(self, w: DecoderWeights, cache: Kv, plan: StepPlan, timer: Timer) -> Tensor:
        """`decoder` with the same result bit for bit. It reports the time of each kernel to `timer`. A back end that
        overrides `decoder` overrides this too."""
        return timer.around(self, w).decoder(w, cache, plan)


def launches(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Splits copies into groups of (sources, destinations). No block id occurs twice in a group."""
    src: list[int] = []
    dst: list[int] = []
    seen: set[int] = set()
    for s, d in pairs:
        if s in seen or d in seen:
            yield src, dst
            src, dst, seen = [], [], set()
        src.append(s)
        dst.append(d)
        seen |= {s, d}
    if src:
        yield src, dst
