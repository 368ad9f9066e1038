"""Tile sizes of the attention kernel by GPU, dtype and head size, and how many programs fill a GPU.

Owns the table. `make compile-all` checks each entry's registers, spills and shared memory. The entries were chosen
from compiled code and published results. They were not tuned on cards yet: see tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.ops.nvidia.kernels.attention import Tile
from engine.ops.nvidia.kernels.common import INTERPRETED


@dataclass(frozen=True, slots=True)
class Tiles:
    """few: for sequences whose query rows fit into 16. many: for chunks of a prompt. programs_*: how many of
    each fill the GPU. least_*: with fewer keys a split costs more than it saves."""

    few: Tile
    many: Tile
    programs_few: int
    programs_many: int
    least_few: int = 128
    least_many: int = 512


def tiles_for(
    capability: tuple[int, int], processors: int, dtype: torch.dtype, fp8_kv: bool, dim: int, groups: int
) -> Tiles:
    """For a GPU of this compute capability. processors: its multiprocessors. groups: query heads per KV head."""
    rows = max(16, triton.next_power_of_2(groups))
    if INTERPRETED:  # small, so that small test shapes have several tiles and several splits
        return Tiles(Tile(rows, 32, 4, 1), Tile(max(32, rows), 32, 4, 1), 24, 24, 32, 64)
    big = capability[0] in (9, 10)  # 227 KB of shared memory; elsewhere 99 KB
    wide = dim > 128
    if dtype == torch.float32:  # exactness, not speed: no tensor cores
        few, many = Tile(rows, 32, 8, 1), Tile(max(32, rows), 32, 8, 1)
    elif wide:
        few = Tile(rows, 32, 4, 2)
        many = Tile(max(64, rows), 32, 8, 2) if fp8_kv or not big else Tile(max(64, rows), 64, 8, 2)
    else:
        few = Tile(rows, 32 if fp8_kv else 64, 4, 2)
        many = Tile(128, 32 if fp8_kv else 64, 8, 3 if big and not fp8_kv else 2)
    return Tiles(few, many, 4 * processors, 2 * processors)
