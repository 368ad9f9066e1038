"""A bounded reader of GGUF files: header, metadata, and the raw bytes of each tensor from a memory map.

Invariant: every count, length and offset in the file is compared with the file's size before it is used. A truncated
or hostile file gives an error of one line; it never hangs or takes much memory. (The reader of the gguf package loops
over an array of 2^62 elements.) Imports no torch.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.errors import SetupError
from engine.files.gguf_quants import LAYOUTS, layout_name
from engine.files.model_files import shorten

_NUMBERS = {  # metadata value type -> numpy dtype
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 16 << 20
_MOST_STRINGS = 1 << 22
"""In all arrays together: sixteen times a large vocabulary with its merges, and a second of reading."""
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place. `shape` is outermost first, as in torch (the file has it innermost first)."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    """First byte, from the start of the file."""
    size: int
    """Bytes."""


@dataclass(slots=True)
class GgufFile:
    """A checked header over a map of the file. Arrays of numbers in `metadata` are numpy arrays."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    """The whole file, uint8; views of it keep the map open."""

    def rows(self, name: str) -> np.ndarray:
        """Raw bytes of a tensor, uint8 [product of the outer dimensions, bytes of a row], not copied."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return self.data[tensor.start : tensor.start + tensor.size].reshape(rows, tensor.size // rows)


def read(path: Path) -> GgufFile:
    """Read and check the header. Raises SetupError: no GGUF, truncated, or counts that cannot be true."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise SetupError(f"{shorten(str(path))} is empty; fetch it again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SetupError(f"cannot read {shorten(str(path))}: {error.strerror or error}") from error
    return _Header(path, mapped).read()


class _Header:
    """Reads the header from front to back. The position never passes the end of the file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path, self.mapped, self.position, self.end = path, mapped, 0, len(mapped)
        self.strings = 0
        self.data = np.frombuffer(mapped, np.uint8)

    def fail(self, what: str) -> NoReturn:
        raise SetupError(f"{shorten(str(self.path))} is no valid GGUF: {what}; fetch it again")

    def take(self, size: int, what: str) -> int:
        """Position of the next `size` bytes. Moves past them."""
        if size > self.end - self.position:
            self.fail(f"{what} ends beyond the file, which is truncated or damaged")
        start = self.position
        self.position += size
        return start

    def number(self, code: str, what: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self.mapped, self.take(form.size, what))[0]

    def string(self, what: str, limit: int = _LONGEST_STRING) -> str:
        length = self.number("Q", what)
        if length > limit:
            self.fail(f"{what} claims {length} bytes")
        start = self.take(length, what)
        return self.mapped[start : start + length].decode("utf-8", "replace")

    def read(self) -> GgufFile:
        if self.mapped[:4] != b"GGUF":
            self.fail(f"it begins with {self.mapped[:4]!r}, not with b'GGUF'")
        self.take(4, "the header")
        version = self.number("I", "the header")
        if version not in (2, 3):
            big_endian = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
            self.fail(f"version {version}{big_endian} is not 2 or 3")
        num_tensors, num_keys = self.number("Q", "the header"), self.number("Q", "the header")
        left = self.end - self.position
        if num_keys > min(_MOST_KEYS, left // _SMALLEST_KEY):
            self.fail(f"it claims {num_keys} metadata keys")
        if num_tensors > min(_MOST_TENSORS, left // _SMALLEST_TENSOR):
            self.fail(f"it claims {num_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a metadata key", 65_535)
            if key in metadata:
                self.fail(f"key {key:.40} is there twice")
            metadata[key] = self.value(key)
        infos = [self.info() for _ in range(num_tensors)]
        return GgufFile(self.path, metadata, self.place(infos, metadata), self.data)

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _NUMBERS:
            self.fail(f"key {key:.40} has unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.mapped, dtype, 1, self.take(dtype.itemsize, key))[0].item()

    def array(self, key: str) -> Any:
        kind, length = self.number("I", key), self.number("Q", key)
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            # a copy: metadata must not keep the map of a deleted file alive
            return np.frombuffer(self.mapped, dtype, length, self.take(length * dtype.itemsize, key)).copy()
        if kind != _STRING:
            self.fail(f"key {key:.40} is an array of unknown or nested type {kind}")
        self.strings += length
        if self.strings > _MOST_STRINGS or length * 8 > self.end - self.position:
            self.fail(f"key {key:.40} claims {length} strings")
        return self.string_array(key, length)

    def string_array(self, key: str, length: int) -> list[str]:
        """One loop without calls, for speed: a vocabulary and its merges are 100,000 strings."""
        mapped, position, end = self.mapped, self.position, self.end
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            if position + 8 > end:
                self.fail(f"key {key:.40} ends beyond the file, which is truncated or damaged")
            start = position + 8
            position = start + unpack(mapped, position)[0]
            if position > end:
                self.fail(f"key {key:.40} ends beyond the file, which is truncated or damaged")
            strings.append(mapped[start:position].decode("utf-8", "replace"))
        self.position = position
        return strings

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (outermost first), type and offset of the next tensor."""
        name = self.string("a tensor's name", 1024)
        dimensions = self.number("I", name)
        if not 1 <= dimensions <= 4:
            self.fail(f"tensor {name:.40} has {dimensions} dimensions")
        shape = tuple(self.number("Q", name) for _ in range(dimensions))[::-1]
        return name, shape, self.number("I", name), self.number("Q", name)

    def place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Tensors by name. Each lies inside the file, and no two overlap."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.fail(f"general.alignment {alignment!r:.30} is no power of two")
        base = -(-self.position // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in infos:
            if kind not in LAYOUTS:
                raise SetupError(
                    f"{shorten(str(self.path))}: {name:.40} is quantised as {layout_name(kind)}, which kvtop "
                    "cannot read; take a Q4_0, Q4_K_M, Q6_K or Q8_0 file"
                )
            layout = LAYOUTS[kind]
            values = math.prod(shape)
            if not 0 < values <= 1 << 48 or shape[-1] % layout.values:
                self.fail(f"tensor {name:.40} has the impossible shape {list(shape)!s:.60}")
            tensor = Tensor(name, shape, kind, base + offset, values // layout.values * layout.size)
            if offset % alignment or tensor.start + tensor.size > self.end:
                self.fail(f"tensor {name:.40} lies outside the file, which is truncated or damaged")
            if name in tensors:
                self.fail(f"tensor {name:.40} is there twice")
            tensors[name] = tensor
        by_place = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for before, after in pairwise(by_place):
            if before.start + before.size > after.start:
                self.fail(f"tensors {before.name:.40} and {after.name:.40} overlap")
        return tensors
