"""GGUF metadata -> ModelConfig, and the names of its tensors in Hugging Face's spelling.

A GGUF does not say everything in its metadata: biases and tied embeddings show in which tensors it has, and
Llama-3's RoPE in the factors that converters write into `rope_freqs.weight`. Whatever would change the results
and is not implemented is refused by name. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import SetupError
from engine.files.hf_config import LEAST_TOP_P, SUPPORTED, Architecture, Keys, most_likely
from engine.files.model_config import ModelConfig, RopeConfig

# Mistral and SmolLM2 are "llama" in GGUF; only there q and k are stored permuted
ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that a decoder of ours does not have."""
    if match := _LAYER.fullmatch(name):
        index, part, kind = match.groups()
        return f"model.layers.{int(index)}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None
    return _GLOBAL_NAMES.get(name)


def from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_factors: np.ndarray | None = None,
    name: str = "",
) -> ModelConfig:
    """From a GGUF's metadata and its tensors' shapes (outermost first, by GGUF name).

    rope_factors: the values of rope_freqs.weight, where there is one. Raises SetupError that names the key.
    """
    keys = Keys(metadata, "GGUF metadata")
    gguf_architecture = keys.get("general.architecture", str)
    architecture = ARCHITECTURES.get(gguf_architecture)
    if architecture is None:
        raise SetupError(
            f"GGUF architecture {gguf_architecture:.40} is not supported; kvtop runs {SUPPORTED}"
        )
    prefix = gguf_architecture + "."
    if keys.get("split.count", int, 1) not in (0, 1):
        raise SetupError("this GGUF is one part of a split; merge the parts with llama-gguf-split --merge")
    if keys.get(prefix + "expert_count", int, 0):
        raise SetupError(f"a mixture of experts is not supported; kvtop runs dense {SUPPORTED}")
    heads = keys.count(prefix + "attention.head_count")
    kv_heads = keys.count(prefix + "attention.head_count_kv", heads)
    hidden = keys.count(prefix + "embedding_length")
    if heads % kv_heads:
        raise SetupError(f"GGUF metadata: head_count {heads} is no multiple of head_count_kv {kv_heads}")
    head_dim = keys.count(prefix + "attention.key_length", hidden // heads or 1)
    rotated = keys.count(prefix + "rope.dimension_count", head_dim)
    if rotated != head_dim or keys.count(prefix + "attention.value_length", head_dim) != head_dim:
        raise SetupError(f"GGUF metadata: rotating {rotated} of {head_dim} dimensions is not implemented")
    positions = keys.count(prefix + "context_length", limit=1 << 30)
    window = keys.get(prefix + "attention.sliding_window", int, 0)
    if 0 < window < positions:
        raise SetupError(
            f"GGUF metadata: sliding_window {window} under a context of {positions} is not implemented"
        )
    if "token_embd.weight" not in shapes:
        raise SetupError("this GGUF has no token_embd.weight: not a language model, or only a part of one")
    return ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=keys.count(prefix + "feed_forward_length"),
        num_layers=keys.count(prefix + "block_count", limit=4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=keys.positive(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, prefix, positions, head_dim, rope_factors),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        eos_token_ids=eos_token_ids(metadata),
        bos_token_id=keys.get("tokenizer.ggml.bos_token_id", int, None),
        name=name or keys.get("general.name", str, ""),
        generation=_generation(keys),
        notice=_not_followed(keys),
    )


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of text and, where the file has one, end of turn."""
    keys = Keys(metadata, "GGUF metadata")
    ids = [keys.get(f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot")]
    return tuple(dict.fromkeys(i for i in ids if i is not None and i >= 0))  # -1 is none


def _rope(keys: Keys, prefix: str, positions: int, head_dim: int, factors: np.ndarray | None) -> RopeConfig:
    theta = keys.positive(prefix + "rope.freq_base", 10_000.0)
    scaling = prefix + "rope.scaling."
    kind = keys.get(scaling + "type", str, "none")
    factor = keys.positive(scaling + "factor", keys.positive(prefix + "rope.scale_linear", 1.0))
    original = keys.count(scaling + "original_context_length", positions, limit=1 << 30)
    for name, plain in (
        ("attn_factor", 1),
        ("yarn_attn_factor", 1),
        ("yarn_ext_factor", 1),
        ("yarn_log_multiplier", 0),
    ):
        value = keys.get(scaling + name, float, float(plain))
        if value not in (plain, -1.0):  # -1 is the default of llama.cpp
            raise SetupError(
                f"GGUF metadata: {scaling}{name} {value} is not implemented; use the safetensors"
            )
    if factors is not None:
        return _llama3(theta, head_dim, factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, original_max_position=original)
    if kind == "yarn":
        beta_fast = keys.positive(scaling + "yarn_beta_fast", 32.0)
        beta_slow = keys.positive(scaling + "yarn_beta_slow", 1.0)
        return RopeConfig(
            theta, "yarn", factor, original_max_position=original, beta_fast=beta_fast, beta_slow=beta_slow
        )
    raise SetupError(
        f"GGUF metadata: RoPE scaling {kind:.40} is not implemented; kvtop has linear, llama3, yarn"
    )


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """Divisor of each of the head_dim / 2 frequencies under Llama-3's scaling (low 1, high 4), float64:
    1 for short wavelengths, `factor` for those over original / 1, smooth between."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> RopeConfig:
    """The scaling whose factors these are: converters write the factors and drop the parameters."""
    if factors.shape == (head_dim // 2,) and np.isfinite(factors).all():
        if np.allclose(factors, 1.0, rtol=1e-4):
            return RopeConfig(theta=theta)
        factor = float(factors[-1])
        for original in (8192, 4096, 16384, 32768):
            if np.allclose(factors, llama3_factors(theta, head_dim, factor, original), rtol=1e-3):
                return RopeConfig(theta, "llama3", factor, 1.0, 4.0, original)
    raise SetupError(
        f"GGUF: the factors in {ROPE_FACTORS} are not Llama-3's; other RoPE scaling is not implemented"
    )


def _generation(keys: Keys) -> dict[str, Any]:
    """Sampling defaults, where the converter kept them; without any of them kvtop is greedy."""
    sampling = "general.sampling."
    found = {
        "temperature": keys.between(sampling + "temp", 0, 100),
        "top_k": most_likely(keys, sampling + "top_k"),
        "top_p": keys.between(sampling + "top_p", 0, 1),
        "min_p": keys.between(sampling + "min_p", 0, 0.999999),
        "repetition_penalty": keys.between(sampling + "penalty_repeat", 1e-6, 10),
    }
    if found["top_p"] is not None:
        found["top_p"] = max(found["top_p"], LEAST_TOP_P)
    given = {key: value for key, value in found.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def _not_followed(keys: Keys) -> str:
    """What the file asks for beyond `_generation`, as a notice; "" for nothing."""
    others = (("xtc_probability", float), ("mirostat", int), ("sequence", str), ("penalty_last_n", int))
    names = [name for name, kind in others if keys.get(f"general.sampling.{name}", kind, None)]
    return f"the GGUF asks for {', '.join(names)} in sampling, which kvtop does not follow" if names else ""
