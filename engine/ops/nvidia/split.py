"""The work list of paged attention: which program computes which queries over which keys.

The host builds it once a step for all layers, from the lengths alone. Owns the balance: the pieces are of about equal
length, and there are enough of them to fill the GPU. So one token after a long prefix, or a short chunk, is spread
over many programs. Invariant: the pieces of a query cover its keys exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_SPLITS = 64
"""Most splits of one query: the merge holds all of them at once."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """work int32 [W, 5], longest first: sequence, first query, split, splits, part. part is the place among the
    partial results, or -1 for a piece that is the only one of its query and writes the output itself.
    merges int32 [M, 4]: sequence, first query, first part, splits.
    parts: number of partial results. most: the most splits of one merge."""

    work: NDArray[np.int32]
    merges: NDArray[np.int32]
    parts: int
    most: int


def work_list(
    sequences: NDArray[np.int64],
    q_lens: NDArray[np.int64],
    kv_lens: NDArray[np.int64],
    *,
    block_q: int,
    keys: int,
    kv_heads: int,
    programs: int,
    least: int,
    window: int | None = None,
) -> WorkList:
    """The list of `sequences` (indices into the batch, at least one) with their q_lens and kv_lens.

    block_q: query tokens of a program. keys: keys of a tile. programs: how many fill the GPU. least: the fewest
    keys for which a split is worth its merge. window: keys that a query sees, itself included.
    """
    blocks = -(-q_lens // block_q)
    at = np.repeat(np.arange(len(sequences)), blocks)
    first = (np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block_q
    ends = np.minimum(kv_lens[at], kv_lens[at] - q_lens[at] + first + block_q)
    spans = ends
    if window is not None:
        spans = ends - np.maximum(kv_lens[at] - q_lens[at] + first - window + 1, 0) // keys * keys
    piece = max(least, keys, -(-int(spans.sum()) * kv_heads // programs))
    # Rounded to the nearest: a rest that is much shorter than a piece does not become a piece of its own.
    splits = np.clip((spans + piece // 2) // piece, 1, MOST_SPLITS)
    # The kernel cuts splits of equal length, in whole tiles. Only as many are kept as are not empty.
    each = (-(-spans // splits) + keys - 1) // keys * keys
    splits = -(-spans // each)

    first_part = np.cumsum(np.where(splits > 1, splits, 0))
    parts = int(first_part[-1])
    first_part -= np.where(splits > 1, splits, 0)
    item = np.repeat(np.arange(len(at)), splits)
    split = np.arange(len(item)) - np.repeat(np.cumsum(splits) - splits, splits)
    part = np.where(splits[item] > 1, first_part[item] + split, -1)
    work = np.stack((sequences[at][item], first[item], split, splits[item], part), 1).astype(np.int32)
    length = np.minimum(each[item], spans[item] - split * each[item])
    work = work[np.argsort(-length, kind="stable")]
    some = np.flatnonzero(splits > 1)
    merges = np.stack((sequences[at][some], first[some], first_part[some], splits[some]), 1).astype(np.int32)
    return WorkList(np.ascontiguousarray(work), merges, parts, int(splits.max()))
