"""Draws tokens without a softmax or a sort: argmax(logits / temperature + Gumbel noise) of the tokens that are kept.

logits [R, V] (any strides between rows); params int32 [ROW_WORDS, R] (floats as their bits); cut float32 [R], from
engine.ops.nvidia.kernels.cutoff; out int32 [2, R]: the token, and how many logits are not finite. The noise is that of
engine.ops.sampler, from the same Philox words: it depends only on seed, position, branch and token. Of equal scores
the lowest token wins. Bytes: R x V x size. FLOPs: about 60 a logit (Philox).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TEMPERATURE, TOP_P, LOG_MIN_P, TOP_K, SEED_LOW, SEED_HIGH, BRANCH, POSITION = range(8)
ROW_WORDS = 8
_BLOCK = 2048


@triton.jit
def gumbel(word):
    """Standard Gumbel noise from 32 random bits: -log(E), E = -log(1 - u), u = (word + 1/2) / 2^32.

    A token that wins has a tiny u, which 1 - u would lose. There E is computed by its series.
    """
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    tail = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * tail)))
    # The bound avoids log(0) where u is 1, also in lanes that use the series.
    direct = -tl.log(tl.maximum(1.0 - u, 1e-37))
    return -tl.log(tl.where(u < 0.0625, series, direct))


@triton.jit
def noise(params_ptr, r, rows, token):
    """Philox4x32-10: key = seed, counter = (token // 4, position, branch, 0), word token % 4."""
    k0 = tl.load(params_ptr + 4 * rows + r).to(tl.uint32, bitcast=True)
    k1 = tl.load(params_ptr + 5 * rows + r).to(tl.uint32, bitcast=True)
    branch = tl.load(params_ptr + 6 * rows + r).to(tl.uint32, bitcast=True)
    position = tl.load(params_ptr + 7 * rows + r).to(tl.uint32, bitcast=True)
    zero = (token * 0).to(tl.uint32)
    c0 = (token // 4).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, zero + position, zero + branch, zero, zero + k0, zero + k1)
    lane = token % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit(do_not_specialize=["rows"])
def draw_partial(
    logits_ptr, params_ptr, cut_ptr, best_ptr, token_ptr, bad_ptr, rows, vocab, s_row, pieces,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, pieces): the best of BLOCK tokens, float32, int32 and int32 [R, pieces]."""
    r = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits_ptr + r.to(tl.int64) * s_row + token, mask=inside, other=0.0).to(tl.float32)
    bad = tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), 0)  # NaN compares false
    temperature = tl.load(params_ptr + r).to(tl.float32, bitcast=True)
    if temperature > 0:
        x = tl.div_rn(x, tl.full([BLOCK], 0.0, tl.float32) + temperature)
        kept = x >= tl.load(cut_ptr + r)
        x = tl.where(kept, x + gumbel(noise(params_ptr, r, rows, token)), float("-inf"))
    x = tl.where(inside, x, float("-inf"))
    best, at = tl.max(x, 0, return_indices=True)
    tl.store(best_ptr + r * pieces + piece, best)
    tl.store(token_ptr + r * pieces + piece, piece * BLOCK + at)
    tl.store(bad_ptr + r * pieces + piece, bad)


@triton.jit(do_not_specialize=["rows"])
def draw_final(best_ptr, token_ptr, bad_ptr, out_ptr, rows, pieces, BLOCK: tl.constexpr):
    """Grid (R)."""
    r = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    there = i < pieces
    best = tl.load(best_ptr + r * pieces + i, mask=there, other=float("-inf"))
    _, at = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + r, tl.load(token_ptr + r * pieces + at))
    tl.store(out_ptr + rows + r, tl.sum(tl.load(bad_ptr + r * pieces + i, mask=there, other=0), 0))


def draw(logits: Tensor, params: Tensor, cut: Tensor) -> Tensor:
    """int32 [2, R]: the tokens, and how many logits of a row are not finite. Greedy if the temperature is 0."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    token, bad = (torch.empty_like(best, dtype=torch.int32) for _ in range(2))
    out = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
    draw_partial[rows, pieces](
        logits, params, cut, best, token, bad, rows, vocab, logits.stride(0), pieces,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    draw_final[(rows,)](
        best, token, bad, out, rows, pieces, BLOCK=max(16, triton.next_power_of_2(pieces)), num_warps=1
    )
    return out
