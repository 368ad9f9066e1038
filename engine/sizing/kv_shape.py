"""KvShape: what each layer of a model stores per token, read from any config.json.

Owns the rules for how many values a layer stores (grouped heads, or one latent for all heads) and for how many tokens
(all, a sliding window, or none). Invariant: a config with a cache that these rules do not describe is refused by
name, never guessed. The weights do not matter here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import SetupError
from engine.files.hf_config import Keys
from engine.files.model_config import ModelConfig

Attention = Literal["multi-head", "grouped-query", "multi-query", "latent"]

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
"""The names of each figure in different families, the usual name first."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "gpt_oss": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
}
"""What transformers' classes assume for a key that is missing. Published config.json files leave some out."""

_EVERY_NTH_FULL = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
_ALL_WINDOWED = ("mistral", "mixtral", "ministral", "ministral3", "phi3", "starcoder2", "qwen3_moe")
_FROM_A_LAYER_ON = ("qwen2", "qwen3", "qwen2_moe", "smollm3")
_NO_WINDOW = ("llama", "gemma", "olmo2", "granite", "gpt2", "deepseek_v2", "deepseek_v3", "minimax_m2")
_HOLDS_NOTHING = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "short_conv")
_UNKNOWN_CACHES = {
    "is_encoder_decoder": "an encoder-decoder keeps a second cache",
    "index_head_dim": "its sparse attention keeps a second cache for the index",
    "sparse_attention_config": "its sparse attention keeps a second cache for the index",
    "block_configs": "its layers differ one by one",
    "attn_layer_period": "it mixes attention with state-space layers",
    "attn_layer_indices": "it mixes attention with state-space layers",
    "attn_type_list": "it mixes attention with linear attention",
    "hybrid_override_pattern": "it mixes attention with state-space layers",
    "layers_block_type": "it mixes attention with state-space layers",
    "linear_attn_config": "it mixes attention with linear attention",
    "ssm_cfg": "it has no attention",
    "state_size": "it has no attention",
}
"""Keys of configs whose cache is of another kind than those described here."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` layers that store the same: `values` per token (K and V of all kv heads, or one latent) for the last
    `window` tokens, or for all tokens if it is None. `full_values`: if each query head had its own K and V."""

    layers: int
    values: int
    full_values: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KvShape:
    """Everything about a model's KV cache except the size of a value."""

    model_type: str
    attention: Attention
    groups: tuple[LayerGroup, ...]
    layers: int
    """All layers, also those that store nothing per token."""
    heads: int
    kv_heads: int
    """1 if one latent is used by all heads."""
    head_dim: int
    """Size of K. For a latent: its rank + the size of the rotary part."""
    max_position: int | None
    """Longest context that the config claims."""

    @property
    def values(self) -> int:
        """Values per token over all layers, while the token is inside every window."""
        return sum(g.layers * g.values for g in self.groups)

    @property
    def full_values(self) -> int:
        """The same if each query head had its own K and V."""
        return sum(g.layers * g.full_values for g in self.groups)

    @property
    def lasting_values(self) -> int:
        """Values that one more token adds once all windows are full."""
        return sum(g.layers * g.values for g in self.groups if g.window is None)

    @property
    def window(self) -> int | None:
        """Tokens of the shortest window. None if there is no window."""
        return min((g.window for g in self.groups if g.window is not None), default=None)

    @property
    def holding_layers(self) -> int:
        """Layers that store something per token."""
        return sum(g.layers for g in self.groups)

    def held(self, tokens: int) -> int:
        """Values that a request of this many tokens stores."""
        return sum(g.layers * g.values * _capped(tokens, g.window) for g in self.groups)

    def slots(self, tokens: int, block_size: int) -> int:
        """Values in its blocks: whole blocks of `block_size` tokens in every layer.

        A window of w tokens covers at most ceil((w - 1) / block_size) + 1 blocks. Earlier blocks are given back.
        """
        total = 0
        for g in self.groups:
            blocks = -(-tokens // block_size)
            if g.window is not None:
                blocks = min(blocks, -(-(g.window - 1) // block_size) + 1)
            total += g.layers * g.values * blocks * block_size
        return total

    @classmethod
    def of(cls, model: ModelConfig) -> KvShape:
        """The shape for a decoder that kvtop runs."""
        values, full = (2 * n * model.head_dim for n in (model.num_kv_heads, model.num_heads))
        return cls(
            model.architecture,
            _kind(model.num_heads, model.num_kv_heads),
            (LayerGroup(model.num_layers, values, full),),
            model.num_layers,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.max_position_embeddings,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KvShape:
        """From the contents of a config.json. Of a multimodal model only the text part counts.

        Raises SetupError that names the key: missing, wrong, or a cache of another kind.
        """
        return _read(text_part(config))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the decoder. Missing keys get the value that the family assumes."""
    nested = next((config[k] for k in ("text_config", "llm_config") if isinstance(config.get(k), dict)), None)
    part = config if nested is None else {**config, **nested}
    kind = str(part.get("model_type", ""))
    return {**DEFAULTS.get(kind, {}), **part}


def alias(keys: Keys, name: str, default: Any = ...) -> Any:
    """A count under any of its names."""
    found = next((k for k in _NAMES[name] if keys.values.get(k) is not None), None)
    if found is None and default is not ...:
        return default
    return keys.count(found or _NAMES[name][0], limit=1 << 30)


def _read(config: Mapping[str, Any]) -> KvShape:
    keys = Keys(config, "config.json")
    kind = str(config.get("model_type", ""))[:40]
    for key, why in _UNKNOWN_CACHES.items():
        if config.get(key):
            raise SetupError(f"config.json has {key}: {why}, whose size is not implemented")
    layers, heads = alias(keys, "layers"), alias(keys, "heads")
    if layers > 4096 or heads > 1 << 16:
        raise SetupError(f"config.json: {layers} layers of {heads} heads are no model")
    context = alias(keys, "context", None)
    # a window as long as the context has no effect
    windows = [None if w and context and w >= context else w for w in _windows(keys, kind, layers) if w != 0]
    if config.get("kv_lora_rank") is not None:
        rank, rotary = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
        own = keys.count("qk_nope_head_dim") + rotary + keys.count("v_head_dim")
        groups = _grouped(windows, rank + rotary, heads * own)
        return KvShape(kind, "latent", groups, layers, heads, 1, rank + rotary, context)
    kv_heads = alias(keys, "kv_heads", None)
    if kv_heads is None or (kind == "falcon" and not config.get("new_decoder_architecture")):
        kv_heads = 1 if config.get("multi_query") else heads
    if heads % kv_heads:
        raise SetupError(f"config.json: {heads} attention heads are no multiple of {kv_heads} kv heads")
    head_dim = alias(keys, "head_dim", None)
    if head_dim is None:
        hidden = alias(keys, "hidden")
        if hidden % heads:
            raise SetupError(f"config.json: hidden size {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    width = head_dim + keys.count("v_head_dim", head_dim)
    groups = _grouped(windows, kv_heads * width, heads * width)
    return KvShape(kind, _kind(heads, kv_heads), groups, layers, heads, kv_heads, head_dim, context)


def _windows(keys: Keys, kind: str, layers: int) -> list[int | None]:
    """For each layer: tokens of its window, None for all tokens, 0 if it stores nothing per token."""
    named = keys.get("layer_types", list, None)
    if named is not None:
        if len(named) != layers:
            raise SetupError(f"config.json: {len(named)} layer_types for {layers} layers")
        windows = [_window_of(keys, str(n)) for n in named]
    else:
        windows = _family_windows(keys, kind, layers)
    shared = keys.get("num_kv_shared_layers", int, 0)
    if not 0 <= shared < layers:
        raise SetupError(f"config.json: num_kv_shared_layers {shared} of {layers} layers cannot be")
    return windows[: layers - shared] + [0] * shared


def _window_of(keys: Keys, name: str) -> int | None:
    if name in ("full_attention", "attention", "global_attention"):
        return None
    if name == "sliding_attention":
        return int(keys.count("sliding_window", limit=1 << 30))
    if name == "chunked_attention":
        return int(keys.count("attention_chunk_size", limit=1 << 30))
    if name in _HOLDS_NOTHING:
        return 0
    raise SetupError(f"config.json: what a {name:.40} layer keeps is not implemented")


def _family_windows(keys: Keys, kind: str, layers: int) -> list[int | None]:
    """The family's rule, for a config that does not list its layers."""
    if kind == "llama4_text":
        window = keys.count("attention_chunk_size", None, limit=1 << 30)
        rotary = keys.get("no_rope_layers", list, None)  # 1: with RoPE, and these are the chunked ones
        every = keys.count("no_rope_layer_interval")
        rotary = rotary or [int((i + 1) % every != 0) for i in range(layers)]
        return [window if r else None for r in rotary[:layers]]
    window = keys.get("sliding_window", int, None)
    used = keys.get("use_sliding_window", bool, kind not in (*_FROM_A_LAYER_ON, "qwen3_moe"))
    # null means no window. DEFAULTS apply only to a missing key
    if window is None or not used or kind in _NO_WINDOW:
        return [None] * layers
    window = keys.count("sliding_window", limit=1 << 30)
    if kind in _EVERY_NTH_FULL:
        every = keys.count(
            "sliding_window_pattern", keys.count("_sliding_window_pattern", _EVERY_NTH_FULL[kind])
        )
        return [window if (i + 1) % every else None for i in range(layers)]
    if kind in _FROM_A_LAYER_ON:
        first = keys.get("max_window_layers", int, layers)
        return [window if i >= first else None for i in range(layers)]
    if kind in _ALL_WINDOWED:
        return [window] * layers
    raise SetupError(
        f"config.json has sliding_window {window} but not which layers of a {kind} have it; add layer_types"
    )


def _grouped(windows: list[int | None], values: int, full: int) -> tuple[LayerGroup, ...]:
    """Groups equal layers, those with all tokens first."""
    order = sorted(set(windows), key=lambda w: -1 if w is None else w)
    return tuple(LayerGroup(windows.count(w), values, full, w) for w in order)


def _capped(tokens: int, window: int | None) -> int:
    return tokens if window is None else min(tokens, window)


def _kind(heads: int, kv_heads: int) -> Attention:
    return "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
