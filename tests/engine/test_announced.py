"""EngineStarted.knobs: every setting of the engine is announced, typed, and read from old and new recordings."""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec
import pytest

from engine import EngineConfig
from engine.events import EngineStarted, Knobs

OWN = {"model", "dtype", "device", "block_size", "num_blocks", "max_model_len", "hash_seed"}
"""Fields of EngineStarted itself."""


def test_every_field_of_the_config_is_announced_with_its_default() -> None:
    names = {f.name for f in fields(EngineConfig)}
    assert names - set(Knobs.__struct_fields__) == OWN
    assert set(EngineStarted.__struct_fields__) >= OWN
    settings = {name: value for name, value in asdict(EngineConfig()).items() if name not in OWN}
    assert Knobs(**settings) == Knobs()


def test_unknown_keys_are_ignored_and_wrong_types_are_not() -> None:
    decoder = msgspec.json.Decoder(Knobs)
    assert decoder.decode(b'{"seed": 3, "teleport": true}') == Knobs(seed=3)
    assert decoder.decode(b"{}") == Knobs()
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$.max_num_seqs`"):
        decoder.decode(b'{"max_num_seqs": "64"}')
