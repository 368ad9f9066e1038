"""Safetensors files, checked before they are mapped, and read tensor by tensor.

Invariant: the length of the header, every offset and every shape are compared with the file's size before they are
used. A header with wrong claims gives an error of one line and takes no memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import SetupError
from engine.files.model_files import shorten

_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format's own library
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
_BITS |= {"U16": 16, "U32": 32, "U64": 64, "F8_E4M3": 8, "F8_E5M2": 8}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(slots=True)
class Shards:
    """The tensors of one or more files. `shapes` and `sizes` (bytes) by name."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    _places: dict[str, Path] = field(default_factory=dict)
    _types: dict[str, str] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    def get(self, name: str) -> torch.Tensor:
        """The tensor in its stored type, read into memory of its own."""
        path = self._places[name]
        if self._types[name] not in _FLOATS:
            raise SetupError(
                f"{shorten(path.name)}: {name:.60} is stored as {self._types[name]:.20}; "
                "use the unquantised model or a GGUF of it"
            )
        try:
            if path not in self._open:
                self._open[path] = safe_open(str(path), framework="pt")
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SetupError(
                f"cannot read {name:.60} from {shorten(str(path))}: {error}; fetch it again"
            ) from error


def open_shards(paths: Sequence[Path], weight_map: Mapping[str, str] | None) -> Shards:
    """Check the headers of all files. With a weight_map every name must be where the index says."""
    shards = Shards()
    for path in paths:
        for name, info in read_header(path).items():
            if weight_map is not None and weight_map.get(name) != path.name:
                continue  # a file may hold more tensors than its index names
            start, stop = info["data_offsets"]
            shards.shapes[name] = tuple(info["shape"])
            shards.sizes[name] = stop - start
            shards._places[name] = path
            shards._types[name] = info["dtype"]
    for name, shard in (weight_map or {}).items():
        if name not in shards.shapes:
            raise SetupError(
                f"the index says that {name:.60} is in {shorten(shard)}, but it is not; fetch it again"
            )
    return shards


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file, every claim checked. Raises SetupError."""

    def fail(what: str) -> NoReturn:
        raise SetupError(f"{shorten(str(path))} is no valid safetensors file: {what}; fetch it again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                fail(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise SetupError(f"cannot read {shorten(str(path))}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        fail("its header is not JSON")
    if not isinstance(header, dict):
        fail("its header is no JSON object")
    header.pop("__metadata__", None)
    end = size - 8 - length
    spans = []
    for name, info in header.items():
        match info:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                fail(f"{name:.60} has no dtype, shape and data_offsets")
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            fail(f"{name:.60} has the impossible shape {shape!s:.60}")
        if not 0 <= start <= stop <= end:
            fail(f"{name:.60} lies outside the file, which is truncated or damaged")
        if dtype in _BITS and math.prod(shape) * _BITS[dtype] != (stop - start) * 8:
            fail(f"{name:.60} has {stop - start} bytes, which its shape contradicts")
        spans.append((start, stop, name))
    spans.sort()
    for (_, stop, name), (start, _, after) in pairwise(spans):
        if stop > start:
            fail(f"{name:.40} and {after:.40} overlap")
    return header
