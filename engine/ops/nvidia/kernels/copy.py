"""Copies blocks of all layers, K and V, in one launch (copy-on-write, defragmenting).

cache [layer, 2, block, ...] contiguous; src, dst int64 [P]. The programs run in no particular order, so no id may
occur twice in one launch. Bytes: 2 x P x bytes of a block in all layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def copy_pairs(cache_ptr, src_ptr, dst_ptr, blocks, words, BLOCK: tl.constexpr):
    """Grid (P, layers x 2, words of a block / BLOCK). blocks: number of blocks in the cache."""
    plane = tl.program_id(1).to(tl.int64) * blocks
    src = (plane + tl.load(src_ptr + tl.program_id(0))) * words
    dst = (plane + tl.load(dst_ptr + tl.program_id(0))) * words
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(cache_ptr + dst + i, tl.load(cache_ptr + src + i, mask=i < words), mask=i < words)


def copy_blocks(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """cache: values or scales of any dtype. Only bytes are moved."""
    layers, _, blocks = cache.shape[:3]
    flat = cache.view(layers * 2 * blocks, -1)
    # Eight bytes at a time, if the size of a block is a multiple of eight.
    for kind in (torch.int64, torch.int32, torch.int16):
        if flat.shape[1] * flat.itemsize % kind.itemsize == 0 and kind.itemsize >= flat.itemsize:
            flat = flat.view(kind)
            break
    words = flat.shape[1]
    copy_pairs[len(src), layers * 2, triton.cdiv(words, _BLOCK)](
        flat, src, dst, blocks, words, BLOCK=_BLOCK, num_warps=4
    )
