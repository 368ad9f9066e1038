"""config.json and generation_config.json -> ModelConfig, the way transformers reads them.

Decides which architectures run, and under which conditions. Whatever would change the results and is not implemented
(a window, another scaling of RoPE, another activation, quantised weights) is refused by name, never ignored. Reads both
spellings of RoPE: `rope_parameters` of transformers 5, and the older `rope_scaling` with `rope_theta`. Imports no
torch, which AutoConfig would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from engine.errors import SetupError
from engine.files.model_config import ModelConfig, RopeConfig

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED = "Llama, Mistral, SmolLM2, Qwen2, Qwen3"


class Foreign(SetupError):
    """A model that our own decoder does not compute; transformers may."""


_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MISSING: Any = object()


class Keys:
    """Typed access to a JSON object or a GGUF's metadata: what is missing or wrong is named in one line."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of `key`; null counts as absent. An int passes for a float, a bool never for an int."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise SetupError(f"{self.where} lacks {key}; this is not a complete model, fetch it again")
            return default
        if kind is float and type(value) is int and abs(value) < 1 << 1000:  # more is no float
            value = float(value)
        if type(value) is not kind:
            raise SetupError(f"{self.where}: {key:.60} must be {kind.__name__}, not {_shown(value)}")
        return value

    def count(self, key: str, default: Any = _MISSING, limit: int = 1 << 24) -> Any:
        """A positive int; `limit` keeps a hostile file from asking for absurd shapes."""
        value = self.get(key, int, default)
        if value is not None and not 0 < value <= limit:
            raise SetupError(f"{self.where}: {key:.60} must be between 1 and {limit}, not {_shown(value)}")
        return value

    def between(self, key: str, least: float, most: float) -> Any:
        """A float from `least` to `most`, or None where it is absent."""
        value = self.get(key, float, None)
        if value is not None and not least <= value <= most:
            raise SetupError(f"{self.where}: {key:.60} must be from {least:g} to {most:g}, not {value}")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> Any:
        """A float above 0."""
        value = self.get(key, float, default)
        if value is not None and not 0 < value < float("inf"):
            raise SetupError(f"{self.where}: {key:.60} must be over 0, not {value}")
        return value


def _shown(value: Any) -> str:
    """The beginning of a value in an error. Numbers of thousands of digits have no decimal form in Python."""
    if isinstance(value, int) and abs(value) >= 1 << 200:
        return "a number of more than 60 digits"
    return (
        f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"{type(value).__name__}: {value!r:.40}"
    )


def from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, name: str = ""
) -> ModelConfig:
    """From the contents of config.json and generation_config.json.

    Raises SetupError that names the key: unsupported architecture or feature, missing, wrong type.
    """
    keys = Keys(config, "config.json")
    architecture = _architecture(config)
    refuse_quantised(config)
    activation = keys.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise Foreign(f"config.json: hidden_act {activation} is not implemented; kvtop runs SiLU models")
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    kv_heads = keys.count("num_key_value_heads", 8 if architecture == "mistral" else heads)
    if heads % kv_heads:
        raise SetupError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = keys.count("head_dim", 128 if architecture == "qwen3" and "head_dim" not in config else None)
    if head_dim is None:
        if hidden % heads:
            raise SetupError(
                f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
            )
        head_dim = hidden // heads
    layers = keys.count("num_hidden_layers", limit=4096)
    positions = keys.count("max_position_embeddings", limit=1 << 30)
    _refuse_window(keys, architecture, layers, positions)
    bias = architecture in ("llama", "qwen3") and keys.get("attention_bias", bool, False)
    eos = eos_token_ids(config, generation)
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        rope=_rope(keys, positions),
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        qkv_bias=bias or architecture == "qwen2",
        o_bias=bias,
        mlp_bias=architecture == "llama" and keys.get("mlp_bias", bool, False),
        qk_norm=architecture == "qwen3",
        eos_token_ids=eos,
        bos_token_id=keys.get("bos_token_id", int, None),
        name=name,
        generation=generation_defaults(generation),
        notice=not_followed(generation),
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    """By `architectures`; by model_type only if a config was saved without a model."""
    named = config.get("architectures")
    if isinstance(named, list) and named:
        found = ARCHITECTURES.get(str(named[0]))
        shown = str(named[0])
    else:
        shown = str(config.get("model_type"))
        found = next((short for short in ARCHITECTURES.values() if short == shown), None)
    if found is None:
        raise Foreign(f"architecture {shown:.60} is not supported; kvtop runs {SUPPORTED}")
    return found


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Raises SetupError for a config whose weights are in a format of their own."""
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise SetupError(
            f"the weights are quantised ({method!s:.30}); use the unquantised model or a GGUF of it"
        )


def _refuse_window(keys: Keys, architecture: Architecture, layers: int, positions: int) -> None:
    """A sliding window as long as the context changes nothing; a shorter one would."""
    if architecture == "llama":
        return
    if architecture == "mistral":
        # transformers' default where the key is absent; null means none
        window = 4096 if "sliding_window" not in keys.values else keys.get("sliding_window", int, None)
        used = window is not None
    else:
        window = keys.get("sliding_window", int, 4096)
        kinds = keys.get("layer_types", list, None)
        if kinds is not None:
            used = any(kind != "full_attention" for kind in kinds)
        else:
            used = (
                keys.get("use_sliding_window", bool, False)
                and keys.get("max_window_layers", int, 28) < layers
            )
    if used and window < positions:
        raise Foreign(
            f"sliding_window {window} under a context of {positions} is not implemented; "
            "kvtop runs models with full attention (sliding_window null)"
        )


def _rope(keys: Keys, positions: int) -> RopeConfig:
    """Both spellings. If a file has both, transformers takes `rope_scaling`."""
    raw = keys.get("rope_scaling", dict, None) or keys.get("rope_parameters", dict, None) or {}
    rope = Keys(raw, "config.json, RoPE")
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind not in _ROPE_KINDS:
        raise Foreign(
            f"config.json: RoPE type {kind:.40} is not implemented; kvtop has {', '.join(_ROPE_KINDS)}"
        )
    for source in (rope, keys):
        part = source.positive("partial_rotary_factor", 1.0)
        if part != 1.0:
            raise Foreign(
                f"config.json: partial_rotary_factor {part} is not implemented; kvtop rotates whole heads"
            )
    theta = rope.positive("rope_theta", None) or keys.positive("rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    # transformers prefers the key next to rope_parameters, where a few models have it
    original = keys.count("original_max_position_embeddings", None, limit=1 << 30)
    original = original or rope.count("original_max_position_embeddings", positions, limit=1 << 30)
    factor = rope.positive("factor", positions / original if kind == "yarn" else _MISSING)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=rope.positive("low_freq_factor", _MISSING if kind == "llama3" else 1.0),
        high_freq_factor=rope.positive("high_freq_factor", _MISSING if kind == "llama3" else 4.0),
        original_max_position=original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=rope.positive("attention_factor", None),
        mscale=rope.get("mscale", float, None),
        mscale_all_dim=rope.get("mscale_all_dim", float, None),
        truncate=rope.get("truncate", bool, True),
    )


def eos_token_ids(config: Mapping[str, Any] | None, generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end an answer; generation_config wins, as in transformers' generate."""
    return _eos_ids(generation, "generation_config.json") or _eos_ids(config, "config.json")


def _eos_ids(config: Mapping[str, Any] | None, where: str) -> tuple[int, ...]:
    """eos_token_id is an int or a list of them."""
    value = (config or {}).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise SetupError(f"{where}: eos_token_id must be an int or a list of ints, not {_shown(value)}")
    return tuple(dict.fromkeys(ids))


# ---------------------------------------------------------------------------- how a model wants to be sampled

LEAST_TOP_P = 1e-9
"""In place of a top_p of 0, which keeps the likeliest token alone."""
_IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1, 1.0)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), (0, 0.0)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)
    ),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "force_words_ids", "constraints"), ([],)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "dola_layers"), ()),
    **dict.fromkeys(("stop_strings",), ([], "")),
    **dict.fromkeys(("renormalize_logits", "token_healing"), (False,)),
}
"""Keys that change which tokens transformers draws, greedy or not, and the values that change nothing."""
_IGNORED_FILTERS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0),
    "top_h": (),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
}
"""The same for filters, which transformers applies under do_sample alone."""


def generation_defaults(generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """The sampling defaults that kvtop follows, checked as strictly as a request's own."""
    keys = Keys(generation or {}, "generation_config.json")
    found = {
        "do_sample": keys.get("do_sample", bool, None),
        "temperature": keys.between("temperature", 0, 100),
        "top_k": most_likely(keys, "top_k"),
        "top_p": keys.between("top_p", 0, 1),
        "min_p": keys.between("min_p", 0, 0.999999),
        "repetition_penalty": keys.between("repetition_penalty", 1e-6, 10),
    }
    if found["top_p"] is not None:
        found["top_p"] = max(found["top_p"], LEAST_TOP_P)
    return {key: value for key, value in found.items() if value is not None}


def most_likely(keys: Keys, key: str) -> int | None:
    """A top_k: 0 keeps all, and so does any number over a vocabulary."""
    value: int | None = keys.get(key, int, None)
    if value is not None and value < 0:
        raise SetupError(f"{keys.where}: {key:.60} must be 0 (all) or more, not {_shown(value)}")
    return None if value is None else min(value, 1 << 30)


def not_followed(generation: Mapping[str, Any] | None) -> str:
    """What generation_config.json asks for beyond `generation_defaults`, as a notice; "" for nothing."""
    given = generation or {}
    neutral = _IGNORED | (_IGNORED_FILTERS if given.get("do_sample") is True else {})
    names = [
        key for key, values in neutral.items() if given.get(key) is not None and given[key] not in values
    ]
    return f"generation_config.json asks for {', '.join(names)}, which kvtop does not follow" if names else ""
