"""GGUF files byte by byte, right or wrong on purpose."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Info = tuple[str, tuple[int, ...], int, int]
"""Name, shape outermost first, GGML type, offset."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    """Type and value of a metadata entry; bytes are taken as they are."""
    match item:
        case bytes():
            return item
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<Iq", 11, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + text(item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    raise TypeError(item)


def header(
    keys: Mapping[str, Any] = {},
    infos: Sequence[Info] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    counts = (len(infos) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    parts = [magic, struct.pack("<IQQ", version, *counts)]
    parts += [text(key) + value(item) for key, item in keys.items()]
    for name, shape, kind, offset in infos:
        parts.append(text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]))
        parts.append(struct.pack("<IQ", kind, offset))
    return b"".join(parts)


def padded(data: bytes, alignment: int = 32) -> bytes:
    return data + bytes(-len(data) % alignment)


def whole(keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, np.ndarray, tuple[int, ...]]]) -> bytes:
    """A valid file; tensors are (GGML type, raw bytes, shape outermost first)."""
    infos: list[Info] = []
    body = b""
    for name, (kind, raw, shape) in tensors.items():
        infos.append((name, shape, kind, len(body)))
        body = padded(body + raw.tobytes())
    return padded(header(keys, infos)) + body
