"""How many parameters a model has, from its config.json: exact for the families that it knows, otherwise None.

Owns one formula for the decoders of these families: attention (grouped or latent), a gated MLP or experts, norms,
embeddings. Tests compare it with transformers' own models and with the totals of the hub. Layers that only predict
several tokens ahead are not counted, because engines do not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.files.hf_config import Keys
from engine.sizing.kv_shape import text_part

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"),
    *("minimax_m2", "deepseek_v2", "deepseek_v3", "kimi_k2"),
)
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")


@dataclass(frozen=True, slots=True)
class Parameters:
    """total: all parameters. active: those that one token passes through (of the experts only the chosen ones)."""

    total: int
    active: int


def count_parameters(config: Mapping[str, Any]) -> Parameters | None:
    """None for a family that this module does not know. Raises SetupError for a missing or wrong key."""
    part = text_part(config)
    kind = part.get("model_type")
    if kind not in FAMILIES:
        return None
    keys = Keys(part, "config.json")
    hidden, vocab, layers = (
        keys.count("hidden_size"),
        keys.count("vocab_size"),
        keys.count("num_hidden_layers"),
    )
    tied = keys.get("tie_word_embeddings", bool, False)
    norms = 4 if kind in ("gemma2", "gemma3_text") else 2
    total = active = (1 if tied else 2) * vocab * hidden + hidden
    attention = _latent(keys, hidden) if kind in _LATENT else _attention(keys, str(kind), hidden)
    for i in range(layers):
        held, used = _mlp(keys, str(kind), hidden, i)
        total += attention + norms * hidden + held
        active += attention + norms * hidden + used
    seen = _tower(config, hidden)
    return Parameters(total + seen, active + seen)


def _attention(keys: Keys, kind: str, hidden: int) -> int:
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    dim = keys.count("head_dim", hidden // heads)
    width, kv_width = heads * dim, kv_heads * dim
    total = hidden * (2 * width + 2 * kv_width)
    bias = keys.get("attention_bias", bool, False)
    if kind == "qwen2" or bias:
        total += width + 2 * kv_width
    if bias:
        total += hidden
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        total += 2 * dim
    if kind == "minimax_m2":
        total += width + kv_width
    return int(total)


def _latent(keys: Keys, hidden: int) -> int:
    heads, rank, rotary = (
        keys.count("num_attention_heads"),
        keys.count("kv_lora_rank"),
        keys.count("qk_rope_head_dim"),
    )
    plain, v_dim = keys.count("qk_nope_head_dim"), keys.count("v_head_dim")
    q_width, q_rank = heads * (plain + rotary), keys.count("q_lora_rank", None)
    query = hidden * q_width if q_rank is None else hidden * q_rank + q_rank + q_rank * q_width
    return int(
        query + hidden * (rank + rotary) + rank + rank * heads * (plain + v_dim) + heads * v_dim * hidden
    )


def _mlp(keys: Keys, kind: str, hidden: int, layer: int) -> tuple[int, int]:
    """Parameters of one layer: (stored, used by one token)."""
    dense = 3 * hidden * keys.count("intermediate_size")
    if kind == "llama" and keys.get("mlp_bias", bool, False):
        dense += 2 * keys.count("intermediate_size") + hidden
    experts = next(
        (keys.count(k) for k in ("n_routed_experts", "num_local_experts", "num_experts") if k in keys.values),
        None,
    )
    if experts is None or kind not in ("mixtral", "qwen3_moe", "minimax_m2", *_LATENT):
        return dense, dense
    chosen = keys.count("num_experts_per_tok")
    if kind == "qwen3_moe":
        sparse = keys.get("decoder_sparse_step", int, 1)
        if layer in keys.get("mlp_only_layers", list, []) or sparse < 1 or (layer + 1) % sparse:
            return dense, dense
    if kind in _LATENT and layer < keys.get("first_k_dense_replace", int, 0):
        return dense, dense
    width = "intermediate_size" if kind in ("mixtral", "minimax_m2") else "moe_intermediate_size"
    one = 3 * hidden * keys.count(width)
    always = hidden * experts + one * keys.get("n_shared_experts", int, 0)
    if kind in ("deepseek_v3", "kimi_k2", "minimax_m2"):
        always += experts  # the bias that balances the router
    return always + experts * one, always + chosen * one


def _tower(config: Mapping[str, Any], hidden: int) -> int:
    """Gemma 3's image encoder (SigLIP) and the layers that connect it to the text. 0 for a text model."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or vision.get("model_type") != "siglip_vision_model":
        return 0
    keys = Keys(vision, "config.json, vision_config")
    width, inner = keys.count("hidden_size"), keys.count("intermediate_size")
    patch = keys.count("patch_size")
    places = (keys.count("image_size") // patch) ** 2
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    embedding = 3 * patch * patch * width + width + places * width
    return int(embedding + keys.count("num_hidden_layers") * layer + 2 * width + width * hidden + width)
