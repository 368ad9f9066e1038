"""ModelConfig: shape and flags of a decoder, the same for every file format.

Owns only the fields. hf_config reads them from config.json, gguf_config from a GGUF header. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. kind default: plain theta; linear, llama3, yarn: scaled as in transformers'
    `rope_parameters`."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and flags of a decoder; one decoder class serves them all by these flags."""

    architecture: str
    """llama, mistral, qwen2, qwen3; of a model that runs through transformers its model_type."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    name: str = ""
    generation: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults of the model: do_sample, temperature, top_k, top_p, min_p, repetition_penalty."""
    notice: str = ""
    """What the model's files ask for and kvtop does not follow, in one line; empty for nothing."""
