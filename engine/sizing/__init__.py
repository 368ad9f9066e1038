"""KV sizes of any model, from its config.json: bytes a token and a block, and how many requests fit.

This is the public face of the folder: kvtop may use `from engine import sizing`. Imports no torch.
"""

from engine.sizing.kv_shape import KvShape
from engine.sizing.kv_size import (
    BITS,
    CONTEXTS,
    GIB,
    KV_DTYPES,
    KnownModel,
    Plan,
    Sizing,
    dollars_per_million,
    find,
    known_models,
    load,
    published_format,
    waste,
)
from engine.sizing.weight_count import Parameters, count_parameters

__all__ = [
    "BITS",
    "CONTEXTS",
    "GIB",
    "KV_DTYPES",
    "KnownModel",
    "KvShape",
    "Parameters",
    "Plan",
    "Sizing",
    "count_parameters",
    "dollars_per_million",
    "find",
    "known_models",
    "load",
    "published_format",
    "waste",
]
