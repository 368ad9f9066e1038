"""Parameters of the decoder's parts: merged QKV and gate-up, norms, rotary tables.

Turns weights under Hugging Face's names into the merged weights of the ops. The rotary frequencies follow
`modeling_rope_utils` of transformers 5 operation by operation in float32, so that logits are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import SetupError
from engine.files.model_config import ModelConfig, RopeConfig
from engine.ops.base import AttentionWeights, MlpWeights, Ops, Packed, RopeTable
from engine.ops.weights import Weight, concat

Weights = dict[str, Weight]
"""Tensors under Hugging Face's names. A layer takes its tensors out, so that none is in memory twice."""


def take(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """Removes and returns one tensor. Raises SetupError if it is missing or has another shape."""
    weight = take_linear(weights, name, shape)
    return weight if isinstance(weight, Tensor) else weight.values(torch.float32)


def take_linear(weights: Weights, name: str, shape: tuple[int, ...]) -> Weight:
    """`take` for a linear's weight, which may be quantised."""
    tensor = weights.pop(name, None)
    if tensor is None:
        raise SetupError(f"the model's files lack {name}: they do not belong to this config.json")
    if tuple(tensor.shape) != shape:
        raise SetupError(f"{name} has shape {tuple(tensor.shape)}, but the config says {shape}")
    return tensor


def merged(
    ops: Ops,
    weights: Weights,
    prefix: str,
    names: tuple[str, ...],
    outs: tuple[int, ...],
    fan_in: int,
    bias: bool,
) -> Packed:
    """Linears with the same input as one linear. Rows are in the order of `names`."""
    w = [take_linear(weights, f"{prefix}{n}.weight", (o, fan_in)) for n, o in zip(names, outs, strict=True)]
    b = [take(weights, f"{prefix}{n}.bias", (o,)) for n, o in zip(names, outs, strict=True)] if bias else []
    return ops.pack(concat(w), torch.cat(b) if b else None)


def attention_weights(ops: Ops, c: ModelConfig, weights: Weights, layer: int) -> AttentionWeights:
    """Layer `layer`'s attention block."""
    p = f"model.layers.{layer}."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norm = take(weights, f"{p}input_layernorm.weight", (c.hidden_size,))
    q_norm = take(weights, f"{p}self_attn.q_norm.weight", (c.head_dim,)) if c.qk_norm else None
    k_norm = take(weights, f"{p}self_attn.k_norm.weight", (c.head_dim,)) if c.qk_norm else None
    p += "self_attn."
    return AttentionWeights(
        norm=ops.vector(norm),
        qkv=merged(ops, weights, p, ("q_proj", "k_proj", "v_proj"), (q, kv, kv), c.hidden_size, c.qkv_bias),
        out=merged(ops, weights, p, ("o_proj",), (c.hidden_size,), q, c.o_bias),
        q_norm=None if q_norm is None else ops.vector(q_norm),
        k_norm=None if k_norm is None else ops.vector(k_norm),
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        eps=c.rms_norm_eps,
    )


def mlp_weights(ops: Ops, c: ModelConfig, weights: Weights, layer: int) -> MlpWeights:
    """Layer `layer`'s MLP."""
    p, i = f"model.layers.{layer}.", c.intermediate_size
    norm = take(weights, f"{p}post_attention_layernorm.weight", (c.hidden_size,))
    p += "mlp."
    return MlpWeights(
        norm=ops.vector(norm),
        gate_up=merged(ops, weights, p, ("gate_proj", "up_proj"), (i, i), c.hidden_size, c.mlp_bias),
        down=merged(ops, weights, p, ("down_proj",), (c.hidden_size,), i, c.mlp_bias),
        eps=c.rms_norm_eps,
    )


# -------------------------------------------------------------------------------------------- rope


_ROPE_ROWS = 1 << 15
"""Positions computed at a time, so that temporary memory stays small compared with the table."""


def rope_table(c: ModelConfig, positions: int, device: torch.device) -> RopeTable:
    """cos and sin for positions [0, positions)."""
    inv_freq, scaling = rope_frequencies(c.rope, c.head_dim)
    cos, sin = (torch.empty(positions, len(inv_freq), device=device) for _ in range(2))
    for start in range(0, positions, _ROPE_ROWS):
        end = min(start + _ROPE_ROWS, positions)
        angles = torch.arange(start, end).float()[:, None] * inv_freq
        cos[start:end] = angles.cos() * scaling
        sin[start:end] = angles.sin() * scaling
    return RopeTable(cos, sin)


def rope_bytes(c: ModelConfig, positions: int) -> int:
    """Bytes of that table: two float32 values for each pair of dimensions."""
    return positions * (-(-c.head_dim // 2)) * 2 * 4


def rope_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [dim / 2], and the factor on cos and sin."""
    freqs = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    inv_freq = 1.0 / freqs
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, freqs), _yarn_scaling(rope)
    return inv_freq, 1.0


def _llama3(r: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones are kept, those between are interpolated (Llama 3.1)."""
    low, high = r.original_max_position / r.low_freq_factor, r.original_max_position / r.high_freq_factor
    wave = 2 * math.pi / inv_freq
    scaled = torch.where(wave > low, inv_freq / r.factor, inv_freq)
    smooth = (r.original_max_position / wave - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
    between = (1 - smooth) * scaled / r.factor + smooth * scaled
    return torch.where((wave >= high) & (wave <= low), between, scaled)


def _yarn(r: RopeConfig, dim: int, freqs: Tensor) -> Tensor:
    """NTK by parts (arXiv 2309.00071): slow dimensions are interpolated, fast ones kept, with a ramp between."""

    def dimension(rotations: float) -> float:
        return dim * math.log(r.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(r.theta))

    low, high = dimension(r.beta_fast), dimension(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (r.factor * freqs) * (1 - keep) + 1.0 / freqs * keep


def _yarn_scaling(r: RopeConfig) -> float:
    def mscale(m: float) -> float:
        return 1.0 if r.factor <= 1 else 0.1 * m * math.log(r.factor) + 1.0

    if r.attention_factor is not None:
        return r.attention_factor
    if r.mscale and r.mscale_all_dim:
        return mscale(r.mscale) / mscale(r.mscale_all_dim)
    return mscale(1.0)
