"""Formats of weights and KV on the command line and on the screen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine import EngineConfig, SetupError
from engine.events import EngineStarted
from kvtop.cli.command import Given
from kvtop.cli.commands.run import COMMAND, engine_config
from tests.kvtop.app.test_app import story
from tests.kvtop.screen import show


def config(**values: Any) -> EngineConfig:
    return engine_config(Given(COMMAND, values))


@pytest.mark.parametrize(
    ("values", "quantization"),
    [
        ({"quantization": "int4"}, "int4"),
        ({"weights": "int8"}, "int8"),
        ({"weights": "fp8"}, "fp8"),
        ({"weights": "int4", "simulate": "qwen3-8b"}, None),
        ({}, None),
    ],
)
def test_weights_is_another_word_for_quantization_of_a_live_model(
    values: dict[str, str], quantization: str | None
) -> None:
    assert config(**values).quantization == quantization


def test_a_live_cache_is_auto_or_fp8_and_a_simulated_one_has_more() -> None:
    assert config(kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert config(kv_cache_dtype="float32", simulate="x").kv_cache_dtype == "auto"
    with pytest.raises(SetupError, match="--kv-cache-dtype must be auto or fp8"):
        config(kv_cache_dtype="float32")


async def test_the_header_tells_an_fp8_cache() -> None:
    batches = story().batches
    for batch in batches:
        for i, e in enumerate(batch.events):
            if isinstance(e, EngineStarted):
                knobs = msgspec.structs.replace(e.knobs, kv_cache_dtype="fp8")
                batch.events[i] = msgspec.structs.replace(e, knobs=knobs)
    async with show((120, 40), batches) as shown:
        await shown.settle()
        assert "bf16·kv fp8" in shown.rows[0]
