"""The door of EngineConfig, and what a knob says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig, SamplingParams, SetupError
from engine.knobs import settings_of


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_num_seqs": True}, "--max-num-seqs must be a whole number, not True"),
        ({"max_num_seqs": "4"}, "--max-num-seqs must be a whole number, not '4'"),
        ({"max_num_seqs": None}, "--max-num-seqs must be a whole number, not None"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be between 1 and 65,536, not 0"),
        ({"max_num_seqs": 10**9}, "--max-num-seqs must be between 1 and 65,536, not 1000000000"),
        ({"num_blocks": 1.5}, "--num-blocks must be a whole number, not 1.5"),
        ({"num_blocks": 1}, "--num-blocks must be at least 2 (block 0 is the null block), not 1"),
        ({"block_size": 7}, "--block-size must be a power of two from 1 to 256, not 7"),
        ({"block_size": 512}, "--block-size must be a power of two from 1 to 256, not 512"),
        ({"watermark": float("nan")}, "--watermark must be at least 0 and under 1, not nan"),
        ({"watermark": 1}, "--watermark must be at least 0 and under 1, not 1"),
        ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization must be over 0 and at most 1, not 0"),
        ({"dtype": "int3"}, "--dtype must be auto, bfloat16, float32 or float64, not 'int3'"),
        ({"quantization": "int3"}, "--quantization must be int8, int4 or fp8, not 'int3'"),
        ({"hash_seed": 2**64}, "--hash-seed must be between 0 and 2**64 - 1, not 18446744073709551616"),
        ({"seed": -1}, "--seed must be between 0 and 2**63 - 1, not -1"),
        ({"model": 5}, "--model must be a text, not 5"),
        ({"enable_prefix_caching": 1}, "--enable-prefix-caching must be true or false, not 1"),
        ({"max_num_batched_tokens": 10}, "--max-num-batched-tokens (10) must exceed --max-num-seqs (64)"),
        (
            {"max_num_batched_tokens": 100, "speculate": 4},
            "must exceed --max-num-seqs x (1 + --speculate) = 320",
        ),
    ],
)
def test_a_wrong_setting_of_the_engine_is_named_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=r"^[^\n]{1,200}$") as error:
        EngineConfig(**wrong)
    assert words in str(error.value)


def test_the_edges_are_allowed() -> None:
    EngineConfig(hash_seed=2**64 - 1, seed=2**63 - 1, block_size=256, num_blocks=2, speculate=64, watermark=0)
    assert str(EngineConfig(watermark=-0.0).watermark) == "0.0"


@pytest.mark.parametrize("owner", [EngineConfig, SamplingParams])
def test_every_field_has_a_knob_whose_default_it_takes(owner: type) -> None:
    settings = settings_of(owner)
    assert [s.name for s in settings] == list(owner.__slots__)  # type: ignore[attr-defined]
    for s in settings:
        assert s.check(s.default) == s.default
        assert s.knob.help.endswith(".") and s.values
