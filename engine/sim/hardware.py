"""The machines of a simulated engine: one GPU or several of a kind, with their published limits.

Owns the reading of devices.toml and of names like `h100` or `4xh100`. The figures are those of the makers, per GPU.
engine.sim.cost says which part of them an engine reaches.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.errors import SetupError

MOST_GPUS = 64
"""Most GPUs of one machine. With more, models are not split with one all-reduce a layer any more."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One entry of devices.toml. Bytes, bytes/s and operations/s (dense, accumulated in FP32)."""

    name: str
    label: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float | None
    """None if there are no FP8 tensor cores."""
    link: float
    """Bytes/s to the other GPUs, in one direction."""
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """`count` GPUs of a kind that split every layer (tensor parallelism)."""

    gpu: Gpu
    count: int = 1

    @property
    def label(self) -> str:
        """The name to show: "H100", "4x H100"."""
        return self.gpu.label if self.count == 1 else f"{self.count}x {self.gpu.label}"

    @property
    def memory(self) -> int:
        """Bytes of all GPUs."""
        return self.gpu.memory * self.count


@lru_cache(1)
def gpus() -> dict[str, Gpu]:
    """All GPUs by name, in the order of the file."""
    table = tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))
    return {
        name: Gpu(
            name,
            row["label"],
            row["memory_gib"] << 30,
            row["bandwidth_gb_s"] * 1e9,
            row["bf16_tflops"] * 1e12,
            row["fp8_tflops"] * 1e12 if "fp8_tflops" in row else None,
            row["link_gb_s"] * 1e9,
            row["source"],
        )
        for name, row in table.items()
    }


def find(name: str) -> Machine:
    """A machine from `h100`, `RTX 4070` or `4xh100`. Raises SetupError with the most similar names."""
    given = " ".join(name.lower().split())
    parts = re.fullmatch(r"(?:(\d{1,4}) ?[x×] ?)?(.{1,40})", given)
    count, kind = (int(parts[1] or 1), parts[2].replace(" ", "-").replace("_", "-")) if parts else (0, given)
    gpu = gpus().get(kind)
    if gpu is None:
        near = difflib.get_close_matches(kind, gpus(), 3, 0.5) or list(gpus())
        raise SetupError(f"no device {name[:40]!r}; there are {', '.join(near)}; `4xh100` is four of them")
    if not 1 <= count <= MOST_GPUS:
        raise SetupError(f"{name[:40]!r}: a machine has 1 to {MOST_GPUS} GPUs")
    return Machine(gpu, count)
