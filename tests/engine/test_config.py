"""ModelConfig from config.json and GGUF metadata: what runs, what is refused, and in which words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from engine.errors import SetupError
from engine.files.gguf_config import from_gguf, llama3_factors
from engine.files.hf_config import from_hf
from engine.files.model_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {
    **{key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "head_dim": None}
MISTRAL = {**QWEN2, "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False}


def test_llama_with_its_own_rope() -> None:
    config = from_hf(LLAMA, name="x")
    assert config.architecture == "llama"
    assert config.head_dim == 128
    assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_both_spellings_of_rope_are_the_same() -> None:
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf(new) == from_hf(LLAMA)
    oldest = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert from_hf(oldest).rope == RopeConfig(500000.0, "linear", 4.0, original_max_position=131072)


def test_yarn() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = from_hf({**QWEN3, "rope_scaling": scaling}).rope
    assert rope == RopeConfig(1e6, "yarn", 4.0, original_max_position=32768)
    more = {**scaling, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}
    rope = from_hf({**QWEN3, "rope_scaling": more}).rope
    assert (rope.mscale, rope.mscale_all_dim, rope.beta_fast, rope.truncate) == (1.0, 0.5, 16.0, False)
    del scaling["factor"]
    assert from_hf({**QWEN3, "rope_scaling": scaling}).rope.factor == 40960 / 32768


def test_what_makes_the_families_different() -> None:
    qwen3, qwen2, mistral = (from_hf(config) for config in (QWEN3, QWEN2, MISTRAL))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.tie_word_embeddings) == (True, False, True)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (mistral.qk_norm, mistral.qkv_bias) == (False, False)
    biased = from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert from_hf(without | {"hidden_size": 1024}).head_dim == 128  # not 1024 / 32
    bare = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert from_hf(bare).architecture == "llama"


def test_generation_config_decides_sampling_and_eos() -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [7, 8, 7],
    }
    config = from_hf(QWEN3, generation)
    assert config.generation == {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert config.eos_token_ids == (7, 8)
    assert from_hf(QWEN3, {"do_sample": False}).eos_token_ids == (151645,)
    assert from_hf(QWEN3).generation == {}


def test_windows_that_change_nothing_pass() -> None:
    from_hf({**MISTRAL, "sliding_window": 40960})
    from_hf({**QWEN2, "sliding_window": 4096, "use_sliding_window": False})
    from_hf({**QWEN2, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32})
    from_hf({**QWEN2, "sliding_window": 4096, "layer_types": ["full_attention"] * 32})


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (
            LLAMA,
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; kvtop runs Llama",
        ),
        (LLAMA, {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is not supported"),
        (LLAMA, {"architectures": None, "model_type": None}, "None is not supported"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window 4096"),
        (
            QWEN2,
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0},
            "sliding_window",
        ),
        (QWEN3, {"sliding_window": 128, "layer_types": ["sliding_attention"] * 32}, "sliding_window 128"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope is not implemented"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic is not implemented"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act gelu"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
        (LLAMA, {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers must be int, not '32'"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers must be int"),
        (LLAMA, {"hidden_size": 2**62}, "hidden_size must be between"),
        (LLAMA, {"vocab_size": -1}, "vocab_size must be between"),
        (LLAMA, {"num_key_value_heads": 5}, "no multiple of num_key_value_heads 5"),
        (LLAMA, {"hidden_size": 4097}, "no multiple of num_attention_heads"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps must be over 0"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id must be an int or a list"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be bool"),
        (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling must be dict"),
    ],
)
def test_refused_in_one_line(base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=re.escape(words)) as error:
        from_hf({**base, **change})
    assert len(str(error.value)) <= 200
    assert "\n" not in str(error.value)


def test_a_message_is_always_one_short_line() -> None:
    assert str(SetupError("a\n b " + "x" * 500)).startswith("a b xxx")
    assert len(str(SetupError("x" * 500))) == 200


# ------------------------------------------------------------------ GGUF

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 131072,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 8192,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (128256, 2048)}


def test_gguf_says_much_by_its_tensors() -> None:
    tied = from_gguf(GGUF, SHAPES, name="x")
    assert (tied.tie_word_embeddings, tied.qkv_bias, tied.vocab_size) == (True, False, 128256)
    assert (tied.head_dim, tied.eos_token_ids, tied.generation) == (64, (2, 3), {})
    shapes = {**SHAPES, "output.weight": (128256, 2048), "blk.0.attn_q.bias": (2048,)}
    untied = from_gguf(GGUF, shapes)
    assert (untied.tie_word_embeddings, untied.qkv_bias) == (False, True)
    asked = from_gguf({**GGUF, "general.sampling.temp": 0.6, "general.sampling.top_k": 20}, SHAPES)
    assert asked.generation == {"do_sample": True, "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_rope_is_recognised_by_its_factors(factor: float, original: int) -> None:
    """The factors are transformers' frequencies: plain over scaled."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 5e5 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(llama3_factors(5e5, 64, factor, original), plain / scaled.numpy(), rtol=1e-5)
    factors = llama3_factors(5e5, 64, factor, original).astype(np.float32)
    found = from_gguf(GGUF, SHAPES, rope_factors=factors).rope
    assert (found.kind, found.original_max_position) == ("llama3", original)
    assert found.factor == pytest.approx(factor)


def test_gguf_yarn_and_linear() -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling["llama.rope.scaling.original_context_length"] = 32768
    assert from_gguf({**GGUF, **scaling}, SHAPES).rope == RopeConfig(
        5e5, "yarn", 4.0, original_max_position=32768
    )
    scaling["llama.rope.scaling.type"] = "linear"
    assert from_gguf({**GGUF, **scaling}, SHAPES).rope.kind == "linear"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma2"}, "gemma2 is not supported"),
        ({"general.architecture": None}, "lacks general.architecture"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.embedding_length": 2.5}, "llama.embedding_length must be int"),
        ({"llama.block_count": 2**40}, "llama.block_count must be between 1 and 4096"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window 4096"),
        ({"llama.rope.dimension_count": 32}, "32 of 64"),
        ({"split.count": 3}, "gguf-split --merge"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope is not implemented"),
    ],
)
def test_gguf_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=re.escape(words)) as error:
        from_gguf({**GGUF, **change}, SHAPES)
    assert len(str(error.value)) <= 200


def test_gguf_without_embeddings_or_with_strange_factors() -> None:
    with pytest.raises(SetupError, match=r"no token_embd\.weight"):
        from_gguf(GGUF, {})
    with pytest.raises(SetupError, match="not Llama-3's"):
        from_gguf(GGUF, SHAPES, rope_factors=np.linspace(1, 3, 32))
    assert from_gguf(GGUF, SHAPES, rope_factors=np.ones(32)).rope == RopeConfig(5e5)
