"""Decoder: one transformer decoder for Llama, Mistral, SmolLM2, Qwen2 and Qwen3.

Owns the weights. The families differ only in the flags of ModelConfig; how each part is computed is decided by the
ops. Logits are computed only for the rows that sample, and RoPE only for positions that the cache can hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.files.model_files import Progress
from engine.model.layers import Weights, attention_weights, mlp_weights, rope_table, take, take_linear
from engine.ops.base import DecoderWeights, Ops, StepInput, StepPlan
from engine.ops.fp8 import Kv
from engine.ops.weights import Quantization, linear_bytes

if TYPE_CHECKING:
    from engine.ops.profiling.step_profile import Timer


class Model(Protocol):
    """What a TorchRunner computes with."""

    config: ModelConfig
    weights_bytes: int
    notice: str
    """What the user should know about how it runs, in one line; empty for nothing."""

    @property
    def ops(self) -> Ops: ...

    def reach(self, positions: int) -> None:
        """Get ready for positions [0, positions). Steps beyond them must not come."""
        ...

    def forward(self, batch: StepInput, cache: Kv) -> Tensor:
        """Logits [L, vocab] of `batch.logit_rows`; the step's KV is written into the cache."""
        ...


class Decoder:
    """Weights packed for `ops`. `weights` is emptied as it is taken over. positions: see `reach`.

    Raises SetupError where the weights do not fit the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        positions: int = 0,
        progress: Progress = lambda done, total, what: None,
    ) -> None:
        c = self.config = config
        self.ops = ops
        self.notice = c.notice
        self.timer: Timer | None = None
        """If set, times the kernels of each forward."""
        embed = take(weights, "model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        untied = not c.tie_word_embeddings and "lm_head.weight" in weights
        head = take_linear(weights, "lm_head.weight", (c.vocab_size, c.hidden_size)) if untied else embed
        weights.pop("lm_head.weight", None)
        embedding = embed.to(ops.device, ops.dtype).contiguous()
        layers = []
        for layer in range(c.num_layers):
            layers.append((attention_weights(ops, c, weights, layer), mlp_weights(ops, c, weights, layer)))
            progress(layer + 1, c.num_layers, "packing layers")
        norm = ops.vector(take(weights, "model.norm.weight", (c.hidden_size,)))
        self.weights = DecoderWeights(embedding, layers, norm, ops.pack_head(head), c.rms_norm_eps)
        self.weights_bytes = weight_bytes(c, ops.dtype.itemsize, ops.quantization)
        self.rope = rope_table(c, positions, ops.device)

    def reach(self, positions: int) -> None:
        """Make the RoPE table cover [0, positions). The context that the cache can hold decides how long it is,
        never the model's file: a file may claim any number."""
        if positions > len(self.rope.cos):
            self.rope = rope_table(self.config, positions, self.ops.device)

    def forward(self, batch: StepInput, cache: Kv) -> Tensor:
        """Computes the step's tokens, writing their KV into cache [layer, 2, block, kv_head, slot, dim].

        Returns logits [L, vocab] of `batch.logit_rows`.
        """
        return self.compute(self.ops.plan(batch, self.rope), cache)

    def compute(self, plan: StepPlan, cache: Kv) -> Tensor:
        """`forward` with a plan that is made already."""
        if self.timer is not None:
            return self.timer.decoder(self.ops, self.weights, cache, plan)
        return self.ops.decoder(self.weights, cache, plan)


def weight_bytes(c: ModelConfig, bytes_per_value: int, to: Quantization | None = None) -> int:
    """Bytes of all parameters, with scales. A tied head counts once, unless it is quantised: then it is a copy of the
    embedding in another format."""
    q, kv, h, i = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    linears = ((q + 2 * kv, h), (h, q), (2 * i, h), (h, i))
    layer = sum(linear_bytes(out, inputs, bytes_per_value, to) for out, inputs in linears)
    vectors = 2 * h + 2 * c.head_dim * c.qk_norm
    vectors += (q + 2 * kv) * c.qkv_bias + h * c.o_bias + (2 * i + h) * c.mlp_bias
    total = c.num_layers * (layer + vectors * bytes_per_value) + (c.vocab_size * h + h) * bytes_per_value
    if to is not None or not c.tie_word_embeddings:
        total += linear_bytes(c.vocab_size, h, bytes_per_value, "int8" if to else None)
    return total
