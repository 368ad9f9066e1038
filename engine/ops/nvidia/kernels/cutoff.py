"""The smallest logit that top-k, top-p and min-p keep, exactly and without a sort.

Floats can be mapped to integers of the same order. So the k-th largest logit, and the logit at which the sum reaches
probability p, are searched by their 32 bits, two bits in each pass over the row. That is 16 passes for top-k, 16 for
top-p, and none for a filter that a row does not use. Equal logits are kept or dropped together, as in
engine.ops.sampler. The results differ from that only by the rounding of the sums (float32 here, float64 there).
logits [R, V] -> cut float32 [R], of logits / temperature. Bytes: up to 33 x R x V x size, from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _sortable(x):
    """float32 -> uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@triton.jit
def _float(key):
    """The inverse of _sortable."""
    return tl.where(key >= 0x80000000, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def _largest_with(row_ptr, vocab, temperature, best, floor, need, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The largest key such that at least `need` tokens have a key of that size or larger. Only tokens with a key of
    at least `floor` count. With MASS each token counts as exp(x - best) instead of 1."""
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        one = found | bit
        two = found | (bit << 1)
        three = one | two
        n1 = tl.zeros([BLOCK], tl.float32)
        n2 = tl.zeros([BLOCK], tl.float32)
        n3 = tl.zeros([BLOCK], tl.float32)
        for at in range(0, vocab, BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + i, mask=i < vocab, other=0.0).to(tl.float32)
            x = tl.div_rn(x, tl.full([BLOCK], 0.0, tl.float32) + temperature)
            key = _sortable(x)
            kept = (i < vocab) & (key >= floor)
            if MASS:
                weight = tl.where(kept, tl.exp(x - best), 0.0)
            else:
                weight = tl.where(kept, 1.0, 0.0)
            n1 += tl.where(key >= one, weight, 0.0)
            n2 += tl.where(key >= two, weight, 0.0)
            n3 += tl.where(key >= three, weight, 0.0)
        if tl.sum(n3, 0) >= need:
            found = three
        elif tl.sum(n2, 0) >= need:
            found = two
        elif tl.sum(n1, 0) >= need:
            found = one
        bit = bit >> 2
    return found


@triton.jit(do_not_specialize=["rows"])
def find_cutoff(logits_ptr, params_ptr, cut_ptr, rows, vocab, s_row, BLOCK: tl.constexpr):
    """Grid (R)."""
    r = tl.program_id(0)
    temperature = tl.load(params_ptr + r).to(tl.float32, bitcast=True)
    top_p = tl.load(params_ptr + rows + r).to(tl.float32, bitcast=True)
    log_min_p = tl.load(params_ptr + 2 * rows + r).to(tl.float32, bitcast=True)
    top_k = tl.load(params_ptr + 3 * rows + r)
    filters = (top_p < 1.0) | ((top_k > 0) & (top_k < vocab)) | (log_min_p > float("-inf"))
    if (temperature > 0) & filters:
        row_ptr = logits_ptr + r.to(tl.int64) * s_row
        m = tl.full([BLOCK], float("-inf"), tl.float32)
        for at in range(0, vocab, BLOCK):
            i = at + tl.arange(0, BLOCK)
            m = tl.maximum(m, tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32))
        best = tl.div_rn(tl.max(m, 0), temperature)
        floor = tl.full([], 0, tl.uint32)
        if (top_k > 0) & (top_k < vocab):
            floor = _largest_with(
                row_ptr, vocab, temperature, best, floor, top_k.to(tl.float32), BLOCK, False
            )
        if top_p < 1.0:
            mass = tl.zeros([BLOCK], tl.float32)
            for at in range(0, vocab, BLOCK):
                i = at + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + i, mask=i < vocab, other=0.0).to(tl.float32)
                x = tl.div_rn(x, tl.full([BLOCK], 0.0, tl.float32) + temperature)
                mass += tl.where((i < vocab) & (_sortable(x) >= floor), tl.exp(x - best), 0.0)
            need = top_p * tl.sum(mass, 0)
            inside = _largest_with(row_ptr, vocab, temperature, best, floor, need, BLOCK, True)
            floor = tl.maximum(floor, inside)
        ranked = tl.full([], float("-inf"), tl.float32)
        if floor > 0:
            ranked = _float(floor)
        tl.store(cut_ptr + r, tl.maximum(ranked, best + log_min_p))
    else:
        tl.store(cut_ptr + r, float("-inf"))


def cutoffs(logits: Tensor, params: Tensor) -> Tensor:
    """float32 [R], -inf if a row keeps all its tokens. params: see engine.ops.nvidia.kernels.draw."""
    rows, vocab = logits.shape
    cut = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    find_cutoff[(rows,)](logits, params, cut, rows, vocab, logits.stride(0), BLOCK=block, num_warps=16)
    return cut
