"""Weights from safetensors or GGUF as tensors under Hugging Face's names.

Invariant: what load() returns is complete and has the shapes that the ModelConfig says, and no tensor of a layer is
left out silently. Memory is taken only after the file's claims were compared with its size. The q and k of a GGUF
are stored in another order of rows; they come back in Hugging Face's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import SetupError
from engine.files import gguf_config, gguf_file
from engine.files.gguf_config import from_gguf
from engine.files.gguf_quants import INT4_TYPES, dequantise, int4_groups
from engine.files.hf_config import from_hf
from engine.files.model_config import ModelConfig
from engine.files.model_files import ModelFiles, Progress, shorten
from engine.files.safetensors_file import open_shards
from engine.machine import cores, free_memory
from engine.model.kv_cache import size
from engine.ops.weights import Int4, Weight

_CHUNK_VALUES = 1 << 18
"""Values decoded at a time: the float32 scratch (1 MiB) stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's shape and its tensors."""

    config: ModelConfig
    weights: dict[str, Weight]
    """Under Hugging Face's names; `lm_head.weight` is absent where embeddings are tied."""


def load(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    keep_codes: bool = False,
) -> LoadedModel:
    """Read all weights, as `dtype` (None: as stored, a GGUF as float32). Progress is in bytes of the files.

    keep_codes: linears that a GGUF has in 4 bits come as Int4, with the file's own codes.

    Raises SetupError: damaged files, missing tensors, wrong shapes, unsupported architecture.
    """
    report = progress or (lambda done, total, what: None)
    if files.kind == "gguf":
        return _load_gguf(files, dtype or torch.float32, report, keep_codes)
    return _load_safetensors(files, dtype, report)


def loaded_bytes(files: ModelFiles, dtype: torch.dtype, *, keep_codes: bool = False) -> int:
    """Bytes that `load` will take, from the files' headers alone."""
    if files.kind == "gguf":
        tensors = gguf_file.read(files.weights[0]).tensors.values()
        return sum(_bytes(t, gguf_config.hf_name(t.name) or "", dtype, keep_codes) for t in tensors)
    shapes = open_shards(files.weights, files.weight_map).shapes
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def _bytes(tensor: gguf_file.Tensor, name: str, dtype: torch.dtype, keep_codes: bool) -> int:
    values = math.prod(tensor.shape)
    return values * 20 // 32 if keep_codes and _has_codes(tensor, name) else values * dtype.itemsize


def _has_codes(tensor: gguf_file.Tensor, name: str) -> bool:
    """Whether it is a linear whose GGUF blocks are INT4 groups as they stand."""
    return name.endswith("_proj.weight") and tensor.type in INT4_TYPES


def _check_memory(name: str, need: int) -> None:
    """A system that hands out more memory than it has kills the process later, without a word."""
    free = free_memory()
    if free is not None and need > free:
        raise SetupError(
            f"too little memory: the weights of {shorten(name)} take {size(need)}, {size(free)} are free; "
            "take a smaller model or --dtype bfloat16"
        )


class _Meter:
    """Reports progress in steps of a hundredth, in the caller's thread."""

    def __init__(self, total: int, what: str, report: Progress) -> None:
        self.total, self.what, self.report = total, what, report
        self.done = self.reported = 0
        report(0, total, what)

    def add(self, size: int) -> None:
        self.done += size
        if self.done == self.total or self.done - self.reported >= self.total / 100:
            self.reported = self.done
            self.report(self.done, self.total, self.what)


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a decoder with this config has."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        linears = (
            ("self_attn.q_proj", q, c.hidden_size, c.qkv_bias),
            ("self_attn.k_proj", kv, c.hidden_size, c.qkv_bias),
            ("self_attn.v_proj", kv, c.hidden_size, c.qkv_bias),
            ("self_attn.o_proj", c.hidden_size, q, c.o_bias),
            ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        )
        for name, outputs, inputs, bias in linears:
            yield f"{layer}{name}.weight", (outputs, inputs)
            if bias:
                yield f"{layer}{name}.bias", (outputs,)
        if c.qk_norm:
            yield f"{layer}self_attn.q_norm.weight", (c.head_dim,)
            yield f"{layer}self_attn.k_norm.weight", (c.head_dim,)
        yield f"{layer}input_layernorm.weight", (c.hidden_size,)
        yield f"{layer}post_attention_layernorm.weight", (c.hidden_size,)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)


_UNUSED = ("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")
"""Ends of names in a layer that old files have: computed anew, never read."""


def _check_shapes(config: ModelConfig, shapes: dict[str, tuple[int, ...]], name: str) -> list[str]:
    """Names to load, all present with the right shape. Raises SetupError also for a tensor in a layer that the
    config does not have, or that no such layer has: leaving it out would change the results."""
    names = []
    for tensor, shape in expected_shapes(config):
        found = shapes.get(tensor)
        if found is None:
            raise SetupError(
                f"{shorten(name)}: tensor {tensor} is missing; the model is incomplete, fetch it again"
            )
        if found != shape:
            raise SetupError(
                f"{shorten(name)}: {tensor} is {list(found)!s:.40}, config says {list(shape)}; fetch it again"
            )
        names.append(tensor)
    known = set(names)
    for tensor in shapes:
        if tensor.startswith("model.layers.") and tensor not in known and not tensor.endswith(_UNUSED):
            raise SetupError(
                f"{shorten(name)}: tensor {tensor:.60} has no place in the {config.num_layers} layers of this "
                "config; the files do not belong together, fetch them again"
            )
    return names


# ------------------------------------------------------------------ safetensors


def _load_safetensors(files: ModelFiles, dtype: torch.dtype | None, report: Progress) -> LoadedModel:
    config = from_hf(files.config or {}, files.generation_config, name=files.name)
    shards = open_shards(files.weights, files.weight_map)
    # a base model saved without its head has no "model." in its names
    bare = "embed_tokens.weight" in shards.shapes
    shapes = {f"model.{name}" if bare else name: shape for name, shape in shards.shapes.items()}
    names = _check_shapes(config, shapes, files.name)
    stored = {name: name.removeprefix("model.") if bare else name for name in names}
    meter = _Meter(sum(shards.sizes[stored[name]] for name in names), f"loading {files.name}", report)
    width = dtype.itemsize if dtype else 0
    _check_memory(files.name, sum(math.prod(shapes[n]) * width or shards.sizes[stored[n]] for n in names))
    weights: dict[str, Weight] = {}
    for name in names:
        tensor = shards.get(stored[name])
        weights[name] = tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
        meter.add(shards.sizes[stored[name]])
    return LoadedModel(config, weights)


# ------------------------------------------------------------------ GGUF


def _load_gguf(files: ModelFiles, dtype: torch.dtype, report: Progress, keep_codes: bool) -> LoadedModel:
    gguf = gguf_file.read(files.weights[0])
    stored = {}
    for tensor in gguf.tensors.values():
        name = gguf_config.hf_name(tensor.name)
        if name is not None:
            stored[name] = tensor
        elif tensor.name != gguf_config.ROPE_FACTORS:
            raise SetupError(f"{shorten(files.name)}: tensor {tensor.name:.60} belongs to no supported model")
    config = from_gguf(
        gguf.metadata,
        {name: tensor.shape for name, tensor in gguf.tensors.items()},
        rope_factors=_rope_factors(gguf),
        name=files.name,
    )
    names = _check_shapes(config, {name: tensor.shape for name, tensor in stored.items()}, files.name)
    meter = _Meter(sum(stored[name].size for name in names), f"loading {files.name}", report)

    def decode(name: str) -> Weight:
        tensor = stored[name]
        raw = gguf.rows(tensor.name)
        heads = _permuted_heads(config, name)
        if heads:
            raw = _unpermute(raw.reshape(tensor.shape[0], -1), heads)
        if keep_codes and _has_codes(tensor, name):
            codes, scale, minimum = (torch.from_numpy(a) for a in int4_groups(raw, tensor.type))
            return Int4(codes, scale, minimum, tensor.shape[1])
        return _decode(raw, tensor, dtype)

    _check_memory(files.name, sum(_bytes(stored[name], name, dtype, keep_codes) for name in names))
    # numpy and torch leave the GIL while they decode; large tensors first, or one thread ends alone
    by_size = sorted(names, key=lambda name: -stored[name].size)
    pool = ThreadPoolExecutor(min(4, cores()))
    try:
        decoded: dict[str, Weight] = {}
        for name, weight in zip(by_size, pool.map(decode, by_size), strict=True):
            decoded[name] = weight
            meter.add(stored[name].size)
    finally:
        pool.shutdown(cancel_futures=True)
    return LoadedModel(config, {name: decoded[name] for name in names})


def _rope_factors(gguf: gguf_file.GgufFile) -> np.ndarray | None:
    tensor = gguf.tensors.get(gguf_config.ROPE_FACTORS)
    if tensor is None:
        return None
    return _decode(gguf.rows(tensor.name), tensor, torch.float32).numpy()


def _permuted_heads(config: ModelConfig, name: str) -> int:
    """Heads whose rows the GGUF stores interleaved; 0 if this tensor is in order. Only "llama" files are."""
    if config.architecture != "llama":
        return 0
    return config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved rotary pairs [heads, head_dim / 2, 2] to halves [heads, 2, head_dim / 2]; rows stay whole,
    so this works on the quantised bytes."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _decode(raw: np.ndarray, tensor: gguf_file.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = raw.shape[0], math.prod(tensor.shape) // raw.shape[0]
    result = torch.empty(rows, columns, dtype=dtype)
    step = max(1, min(rows, _CHUNK_VALUES // columns))
    scratch = np.empty((step, columns), np.float32)
    for start in range(0, rows, step):
        part = scratch[: min(step, rows - start)]
        dequantise(raw[start : start + step], tensor.type, part)
        result[start : start + step] = torch.from_numpy(part)
    return result.reshape(tensor.shape)
