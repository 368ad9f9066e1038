"""The size of a model's KV cache, and how many requests fit into a memory: arithmetic only, without weights.

Owns the table of known models (models.toml), the split of a memory into weights, overhead and KV, and the comparison
of contiguous reservation with blocks. Invariants: numbers of bytes are integers and exact for the config. Numbers of
requests are rounded down. A figure that cannot be known (weights of an unknown family) is missing, never estimated.
Imports no torch.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from engine.errors import SetupError
from engine.files.model_files import CONFIG, Progress, read_json, shorten
from engine.sizing.kv_shape import KvShape
from engine.sizing.weight_count import Parameters, count_parameters

__all__ = [
    "BITS",
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
    "waste",
]

KvDtype = Literal["auto", "bfloat16", "fp8", "float32"]
KV_DTYPES: dict[str, int] = {"auto": 2, "bfloat16": 2, "fp8": 1, "float32": 4}
"""Bytes of one value in the cache."""

BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bits of one weight, without anything else. Files also hold scales, and embeddings often stay at 16 bits. So a 70B in
INT4 is 35.3 GB by this count and about 39.8 GB on the hub. `weights` can also be a number of bytes."""

CONTEXTS = (4096, 32_768, 131_072)
"""Context lengths that are shown by default."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One entry of models.toml. config: the part of its config.json on which cache and weights depend."""

    name: str
    hub: tuple[str, ...]
    parameters: int
    config: dict[str, Any]


@lru_cache(1)
def known_models() -> dict[str, KnownModel]:
    """All known models by name, in the order of the file."""
    text = Path(__file__).with_name("models.toml").read_text("utf-8")
    return {
        name: KnownModel(name, tuple(row["hub"]), row["parameters"], row["config"])
        for name, row in tomllib.loads(text).items()
    }


def find(name: str) -> KnownModel | None:
    """A model by its name here or by its id on the hub. Upper and lower case do not matter."""
    wanted = name.lower()
    for model in known_models().values():
        if wanted == model.name or wanted in (i.lower() for i in model.hub):
            return model
    return None


def load(
    model: str, *, revision: str | None = None, progress: Progress | None = None
) -> tuple[str, dict[str, Any]]:
    """(name to show, config) of a known model, a config.json or its folder, or a hub id. From the hub only config.json
    is fetched. Raises SetupError."""
    known = find(model) if revision is None else None
    if known is not None:
        return known.name, known.config
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise SetupError(f"{shorten(model)} is no usable path: {error}") from error
    if is_dir:
        return path.resolve().name, read_json(path / CONFIG)
    if is_file:
        named = path.resolve()
        return (named.parent.name if named.name == CONFIG else named.stem), read_json(path)
    if "/" in model and not model.startswith((".", "/", "~")) and not model.endswith(".json"):
        from engine.files.hub_fetch import fetch_config

        return model, read_json(fetch_config(model, revision, progress or (lambda done, total, what: None)))
    near = difflib.get_close_matches(model.lower(), known_models(), 2, 0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "`kvtop size list` shows the known names"
    raise SetupError(f"no model {shorten(model, 50)}: not known, no such file, and no hub id; {hint}")


@dataclass(frozen=True, slots=True)
class Sizing:
    """The cache of one model with one size of values and one size of blocks."""

    shape: KvShape
    value_bytes: int = 2
    block_size: int = 16

    def __post_init__(self) -> None:
        b = self.block_size
        if not 1 <= b <= 256 or b & (b - 1):
            raise SetupError(f"--block-size must be a power of two from 1 to 256, not {b}")

    @property
    def bytes_per_token(self) -> int:
        """layers x kv heads x head dim x 2 (K and V) x bytes of a value. A latent is stored once, not twice."""
        return self.shape.values * self.value_bytes

    @property
    def bytes_per_token_past_window(self) -> int:
        """Bytes that one more token adds once every window is full."""
        return self.shape.lasting_values * self.value_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of `block_size` tokens in all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes per token with K and V for every query head (full multi-head attention)."""
        return self.shape.full_values * self.value_bytes

    @property
    def last_block_waste(self) -> int:
        """The most bytes in the last block of a request that can be empty."""
        return (self.block_size - 1) * self.bytes_per_token

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the tokens of one request, without waste."""
        return self.shape.held(tokens) * self.value_bytes

    def paged_bytes(self, tokens: int) -> int:
        """Bytes of its blocks."""
        return self.shape.slots(tokens, self.block_size) * self.value_bytes

    def requests_naive(self, kv_bytes: int, context: int) -> int:
        """How many requests fit if each reserves `context` tokens in one piece."""
        return max(0, kv_bytes) // max(1, self.request_bytes(context))

    def requests_paged(self, kv_bytes: int, tokens: int) -> int:
        """How many requests of `tokens` each fit in blocks. One block is the null block."""
        return max(0, kv_bytes - self.bytes_per_block) // max(1, self.paged_bytes(tokens))


@dataclass(frozen=True, slots=True)
class Plan:
    """A memory and what is to run in it. Raises SetupError for values out of range."""

    memory: int = 80 * GIB
    """Bytes. For several GPUs their sum."""
    weights: str | int | None = None
    """A name in BITS, or a number of bytes. None means the format of the published weights."""
    overhead: int = 3 * GIB
    """Bytes for activations, CUDA graphs and libraries: the article's 3 GB."""
    avg_tokens: int = 500
    """Prompt and answer of an average request."""
    contexts: tuple[int, ...] = CONTEXTS
    """Longest sequences to plan for."""
    chunk: int = 2048
    """Tokens of a prefill chunk."""
    gpu_hour: float | None = None
    """Dollars that this memory's GPUs cost an hour."""
    itl: float = 0.05
    """Seconds a token of each running request."""

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise SetupError(text)

        need(0 < self.memory < 1 << 60, "--memory must be over 0")
        need(self.overhead >= 0, "--overhead must be 0 or more")
        for name, n in (("--avg-tokens", self.avg_tokens), ("--max-num-batched-tokens", self.chunk)):
            need(0 < n <= 1 << 30, f"{name} must be between 1 and 2^30 tokens, not {n}")
        for n in self.contexts:
            need(0 < n <= 1 << 30, f"--context must be between 1 and 2^30 tokens, not {n}")
        need(self.gpu_hour is None or 0 < self.gpu_hour < 1e9, "--gpu-hour must be over 0 dollars")
        need(0 < self.itl <= 3600, "--itl must be over 0 milliseconds and at most an hour")

    def report(self, name: str, config: Mapping[str, Any], sizing: Sizing) -> dict[str, Any]:
        """Everything as one JSON object. A figure that cannot be known is missing, and `notes` say why."""
        shape, notes = sizing.shape, list[str]()
        out: dict[str, Any] = {
            "model": name,
            "model_type": shape.model_type,
            "attention": shape.attention,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position": shape.max_position,
            "value_bytes": sizing.value_bytes,
            "bytes_per_token": sizing.bytes_per_token,
            "bytes_per_block": sizing.bytes_per_block,
            "block_size": sizing.block_size,
            "last_block_waste_bytes": sizing.last_block_waste,
            "full_attention_bytes_per_token": sizing.full_bytes_per_token,
            "chunk": {"tokens": self.chunk, "bytes": self.chunk * sizing.bytes_per_token},
        }
        if shape.window is not None:
            out |= {
                "window": shape.window,
                "window_layers": sum(g.layers for g in shape.groups if g.window is not None),
                "bytes_per_token_past_window": sizing.bytes_per_token_past_window,
            }
        if shape.holding_layers < shape.layers:
            out["holding_layers"] = shape.holding_layers
            idle = shape.layers - shape.holding_layers
            notes.append(f"{idle} layers keep nothing per token; what they keep per request is not counted")
        kv = self._split(config, out, notes)
        if kv is not None and shape.window is None:
            out["num_blocks"] = kv // sizing.bytes_per_block
        if kv is not None:
            out["avg_tokens"] = self.avg_tokens
        out["contexts"] = {str(n): self._context(n, kv, sizing) for n in self.contexts}
        if self.gpu_hour is not None:
            out["cost"] = {"gpu_hour": self.gpu_hour, "itl_s": self.itl}
        longer = [n for n in self.contexts if shape.max_position is not None and n > shape.max_position]
        if longer:
            notes.append(f"the model's own context is {shape.max_position:,} tokens")
        return {k: v for k, v in (out | {"notes": notes}).items() if v is not None}

    def _split(self, config: Mapping[str, Any], out: dict[str, Any], notes: list[str]) -> int | None:
        """Bytes left for KV. None if the weights are not known."""
        counted = count_parameters(config)
        weights = self.weights if self.weights is not None else published_format(config)
        size: int | None = None
        if isinstance(weights, int):
            size, weights = weights, None
        elif weights is not None and weights not in BITS:
            raise SetupError(f"--weights {weights:.20}: {', '.join(BITS)}, or a size like 39.8GB")
        elif weights is not None and counted is not None:
            size = -(-counted.total * BITS[weights] // 8)
        reported: dict[str, Any] = {"format": weights, "bytes": size}
        if counted is not None:
            reported |= {"parameters": counted.total, "active_parameters": counted.active}
        out["weights"] = {k: v for k, v in reported.items() if v is not None}
        out["memory"] = {"bytes": self.memory, "overhead_bytes": self.overhead}
        if size is None:
            notes.append(
                "how large the weights are is not known: give --weights SIZE to see how many requests fit"
            )
            return None
        kv = self.memory - self.overhead - size
        if kv <= 0:
            notes.append(f"weights and overhead take {-kv:,} bytes more than there are")
        out["memory"]["kv_bytes"] = max(0, kv)
        return max(0, kv)

    def _context(self, tokens: int, kv: int | None, sizing: Sizing) -> dict[str, Any]:
        row: dict[str, Any] = {"bytes": sizing.request_bytes(tokens)}
        if kv is None:
            return row
        used = min(self.avg_tokens, tokens)
        naive, paged = sizing.requests_naive(kv, tokens), sizing.requests_paged(kv, used)
        row |= {"requests_naive": naive, "requests_paged": paged}
        row["naive_used"] = round(sizing.request_bytes(used) / sizing.request_bytes(tokens), 6)
        if self.gpu_hour is not None:
            for key, n in (("dollars_naive", naive), ("dollars_paged", paged)):
                if n:
                    row[key] = round(dollars_per_million(self.gpu_hour, n, self.itl), 6)
        return row


def published_format(config: Mapping[str, Any]) -> str | None:
    """The name in BITS of the published weights. None if their format has no name there."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict):
        return "bf16"
    if quantised.get("quant_method") == "fp8":
        return "fp8"
    return {4: "int4", 8: "int8"}.get(quantised.get("bits", 0))


def dollars_per_million(gpu_hour: float, requests: int, itl: float) -> float:
    """Dollars for a million generated tokens, as in the article: the price of an hour / the tokens of an hour.

    Assumes that `requests` decode all the time, one token each every `itl` seconds. So the price falls with every
    request that fits. The article's pair, 18 dollars for 8 users and 4 dollars for 36, needs gpu_hour x itl = 0.5184,
    for example 10.368 dollars at 50 ms.
    """
    return gpu_hour / (requests * 3600 / itl) * 1e6


def waste(tokens: int, reserved: int) -> float:
    """Part of the `reserved` token slots that is empty, 0 to 1."""
    return (reserved - tokens) / reserved
