"""The work list of paged attention: which program computes which queries over which keys.

Built once a step on the host from lengths alone, for all layers. Owns the balance: pieces are cut so that
all of them are about as long and there are enough to fill the GPU, so one token behind a long prefix,
or a short chunk, is spread over many programs like a decode. Keeps the invariant that the pieces of a
query cover its keys exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_SPLITS = 64
"""Of one query: the merge holds them all at once."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """work int32 [W, 5]: sequence, first query, split, splits, part (its place among the partial results, -1
    for a piece that is alone and writes its output itself), longest first; merges int32 [M, 4]: sequence,
    first query, first part, splits; parts: how many there are; most: most splits of one merge."""

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

    block_q: query tokens of a program; keys: keys of a tile; programs: how many fill the GPU; least: keys
    under which a split is not worth its merge; window: keys that a query sees, itself included.
    """
    blocks = -(-q_lens // block_q)
    at = np.repeat(np.arange(len(sequences)), blocks)
    first = (np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block_q
    ends = np.minimum(kv_lens[at], kv_lens[at] - q_lens[at] + first + block_q)
    spans = ends
    if window is not None:
        spans = ends - np.maximum(kv_lens[at] - q_lens[at] + first - window + 1, 0) // keys * keys
    piece = max(least, keys, -(-int(spans.sum()) * kv_heads // programs))
    # To the nearest: what is a little over a piece is not worth a second one.
    splits = np.clip((spans + piece // 2) // piece, 1, MOST_SPLITS)
    # The kernel cuts equal splits of whole tiles: as many as are not left with nothing.
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
