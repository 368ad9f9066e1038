"""Every key that a model's files are asked for, with a value of every wrong kind: it loads, or one line names it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import SetupError
from engine.files import gguf_file, hf_config
from engine.files.gguf_config import from_gguf
from engine.files.gguf_tokenizer import convert
from engine.files.hf_config import from_hf, generation_defaults, not_followed
from engine.files.model_files import read_json
from tests.engine.gguf_bytes import whole

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
BASE: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 32,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
}
BYTE_LEVEL = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]}
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
KINDS: dict[str, Any] = {
    "int": 3,
    "negative": -(2**62),
    "huge": 2**62,
    "float": 1.5,
    "huge float": 3e38,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "text": "quokka",
    "empty text": "",
    "true": True,
    "false": False,
    "texts": ["x", "y z w"],
    "ints": [1, 2],
    "floats": [1.5, float("nan")],
    "empty array": struct.pack("<IIQ", 9, 8, 0),
    "empty array of ints": struct.pack("<IIQ", 9, 4, 0),
}

KNOWN = ("GGUF architecture", "RoPE scaling", "mixture of experts", "one part of a split", "rotating")
"""Refusals that name what the key says instead of the key."""


class Asked(dict[str, Any]):
    """Metadata that remembers what it was asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def read(metadata: dict[str, Any]) -> None:
    """All that is made of a GGUF's metadata."""
    from_gguf(metadata, {"token_embd.weight": (len(TOKENS), 8)})
    tokenizer, config = convert(metadata)
    json.dumps([tokenizer, config])


def keys_of(base: dict[str, Any], tmp_path: Path) -> set[str]:
    path = tmp_path / "x.gguf"
    path.write_bytes(whole(base, {"token_embd.weight": (0, np.zeros((6, 8), np.float32), (6, 8))}))
    metadata = Asked(gguf_file.read(path).metadata)
    read(metadata)
    return metadata.asked


@pytest.mark.parametrize("more", [{}, BYTE_LEVEL, YARN], ids=["sentencepiece", "byte-level", "yarn"])
def test_a_gguf_key_of_any_kind(more: dict[str, Any], tmp_path: Path) -> None:
    base = BASE | more
    asked = keys_of(base, tmp_path)
    assert len(asked) > 35 and {"split.count", "general.sampling.top_k"} <= asked
    refused = 0
    for key in sorted(asked):
        for kind, value in KINDS.items():
            path = tmp_path / "x.gguf"
            path.write_bytes(whole(base | {key: value}, {}))
            try:
                read(gguf_file.read(path).metadata)
            except SetupError as error:
                refused += 1
                line = str(error)
                named = key.rpartition(".")[2]
                assert any(words in line for words in (named, *KNOWN)), (key, kind, line)
                assert len(line) <= 200 and "\n" not in line
            except Exception as error:
                raise AssertionError(f"{key} = {kind}: {error!r}") from error
    assert refused > 300


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}
JSON_KINDS: list[Any] = [
    *(3, -3, 0, 2**70, 10**400, 1.5, float("nan"), float("inf"), "quokka", "", True, False, None),
    *([], [1], ["x"], [None], {}, {"a": 1}, {"rope_type": 5}, {"rope_type": "yarn", "factor": 10**400}),
]


@pytest.mark.parametrize("value", JSON_KINDS, ids=lambda value: repr(value)[:20])
def test_a_json_key_of_any_kind(value: Any) -> None:
    asked: set[str] = set()
    for base in (
        CONFIG,
        CONFIG | {"architectures": ["LlamaForCausalLM"]},
        CONFIG | {"architectures": ["MistralForCausalLM"]},
    ):
        config, generation = Asked(base), Asked({"pad_token_id": 0})
        from_hf(config, generation)
        asked |= config.asked | generation.asked
        for key in config.asked:
            one_line_or_none(lambda key=key, base=base: from_hf(base | {key: value}, {}), key)
        for key in generation.asked | set(hf_config._IGNORED):
            given = {"do_sample": True, key: value}
            one_line_or_none(lambda given=given: (from_hf(CONFIG, given), not_followed(given)), key)
    assert {"sliding_window", "attention_bias", "top_k"} <= asked


def one_line_or_none(load: Any, key: str) -> None:
    try:
        load()
    except SetupError as error:
        assert len(str(error)) <= 200
        words = (key, "RoPE", "quantised", "architecture", "sliding_window", "num_attention_heads")
        assert any(word in str(error) for word in words), (key, str(error))
    except Exception as error:
        raise AssertionError(f"{key}: {error!r}") from error


def test_a_number_of_5000_digits_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(SetupError, match="not valid JSON"):
        read_json(tmp_path / "config.json")


def test_sampling_defaults_are_followed_or_named() -> None:
    """top_p 0 keeps the likeliest token alone, as in transformers; what is not followed is in a notice."""
    assert generation_defaults({"top_p": 0}) == {"top_p": hf_config.LEAST_TOP_P}
    given = {"do_sample": True, "repetition_penalty": 1.1, "min_p": 0.1, "top_k": 2**70}
    assert generation_defaults(given) == given | {"top_k": 1 << 30}
    assert (
        not_followed({"repetition_penalty": 1.1, "min_p": 0.1, "max_new_tokens": 9, "pad_token_id": 0}) == ""
    )
    neutral = {
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "suppress_tokens": None,
        "do_sample": True,
    }
    assert not_followed(neutral) == ""
    assert not_followed(None) == ""
    asks = {"typical_p": 0.9, "no_repeat_ngram_size": 3, "num_beams": 4, "suppress_tokens": [1]}
    assert not_followed(asks) == (
        "generation_config.json asks for num_beams, no_repeat_ngram_size, suppress_tokens, which kvtop does not follow"
    )
    assert "typical_p" in not_followed(asks | {"do_sample": True})
    for wrong, said in (
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"temperature": -1}, "temperature must be"),
    ):
        with pytest.raises(SetupError, match=said):
            generation_defaults(wrong)
