"""Sampling: greedy, temperature, top-k, top-p, min-p, and the noise.

Owns the definition of a sample: argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep. The
noise of a token is Philox4x32-10 with key = seed and counter = (token // 4, position, branch, 0), word token % 4.
Invariant: a sample never depends on batch, chunk, preemption, fork or device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF

PARAMS = np.dtype(
    [(n, "f8") for n in ("temperature", "top_p", "min_p")] + [(n, "i8") for n in ("top_k", "seed", "branch")]
)


@dataclass(slots=True)
class SampleRows:
    """The rows that sample, on the host. params [L]: a record of temperature, top_p, min_p, top_k, seed
    and branch. position int64 [L]: index of the token to draw in its sequence. sent: the same on the device, in the
    back end's own form, if it was copied with the batch."""

    params: NDArray[np.void]
    position: NDArray[np.int64]
    sent: Tensor | None = None


def sample(logits: Tensor, rows: SampleRows) -> tuple[list[int], list[int]]:
    """Draws one token for each row. logits [L, vocab] -> (token ids, rows whose logits are not finite)."""
    finite = torch.isfinite(logits.sum(-1))
    ids = logits.argmax(-1)
    params = rows.params
    random = np.flatnonzero((params["temperature"] > 0) & (params["top_k"] != 1))
    if len(random):
        at = torch.from_numpy(random).to(logits.device)
        ids[at] = _draw(logits[at], SampleRows(params[random], rows.position[random]))
    bad = [] if bool(finite.all()) else (~finite).nonzero().flatten().tolist()
    return ids.tolist(), bad


def _draw(logits: Tensor, rows: SampleRows) -> Tensor:
    """Samples rows of logits [R, vocab] -> ids [R]."""
    p = {n: torch.from_numpy(rows.params[n].copy()).to(logits.device) for n in rows.params.dtype.names or ()}
    wide = logits if logits.dtype == torch.float64 else logits.float()
    # Rows with NaN are reported as bad. Here they must only not break the arithmetic.
    scaled = torch.nan_to_num(wide / p["temperature"][:, None].to(wide.dtype))
    cut = cutoffs(scaled, p["top_k"], p["top_p"], p["min_p"])
    vocab = scaled.shape[1]
    kept = int((scaled >= cut[:, None]).sum(-1).max())
    key = (p["seed"], p["branch"], torch.from_numpy(rows.position).to(logits.device))
    if kept <= vocab // 8:
        values, ids = scaled.topk(kept)
        words = noise_at(*key, ids)
    else:
        values, ids = scaled, torch.arange(vocab, device=logits.device).expand_as(scaled)
        words = noise_all(*key, vocab)
    scores = (values + gumbel(words, values.dtype)).masked_fill(values < cut[:, None], float("-inf"))
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


# ----------------------------------------------------------------------------------------- filters


def cutoffs(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit [R] that top-k, top-p and min-p keep, applied in this order.

    scaled [R, vocab]: logits / temperature. top_k [R] (0 = all), top_p [R] (1 = all), min_p [R]. Equal logits are
    kept or dropped together, so the result does not depend on the order of a sort. Apart from that the sets are
    those of transformers' TopK, TopP and MinPLogitsWarper.
    """
    best = scaled.amax(-1)
    # Drops p(token) < min_p * p(best). The denominator cancels, so the other filters do not matter.
    cut = best + min_p.to(scaled.dtype).log()
    cut = torch.where(min_p > 0, cut, torch.full_like(cut, float("-inf")))
    sorting = ((top_k > 0) | (top_p < 1)).nonzero().flatten()
    if len(sorting):
        ranked = _ranked_cutoffs(scaled[sorting], top_k[sorting], top_p[sorting])
        cut[sorting] = torch.maximum(cut[sorting], ranked)
    return cut


def _ranked_cutoffs(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, then top-p, from the most likely tokens only. Takes more of them until every row is decided."""
    vocab = scaled.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    k = torch.where(limited, top_k, vocab)
    top_p = torch.where(top_p < 1, top_p, float("inf"))  # all tokens, even if rounding makes the sum exceed 1
    total = scaled.double().logsumexp(-1)
    width = min(vocab, max(256, 2 * int(torch.where(limited, k, 0).max())))
    while True:
        values = scaled.topk(width).values
        kept = values >= values.gather(1, (k.clamp(max=width) - 1)[:, None])
        logp = torch.where(kept, values.double(), float("-inf"))
        logp -= torch.where(limited, logp.logsumexp(-1), total)[:, None]
        p = logp.exp()
        inside = kept & (p.cumsum(-1) - p < top_p[:, None])
        last = inside.sum(-1, keepdim=True) - 1
        # A row with top-k needs all its tokens for the denominator. Other rows only need to see where p ends.
        open_ended = torch.where(limited, kept[:, -1], last.squeeze(1) == width - 1)
        if width == vocab or not bool(open_ended.any()):
            return values.gather(1, last).squeeze(1)
        width = min(vocab, width * 8)


# ------------------------------------------------------------------------------------------- noise


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011). Four counter words and two key words, int64 tensors that
    hold 32-bit values and broadcast. Returns four such words. The integer products wrap around, as intended.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from 32-bit words: -log(E), E = -log(1 - u), u = (word + 1/2) / 2^32.

    A word near 2^32 may be rounded to u = 1 and give -inf. Such a token would almost certainly lose anyway. The tokens
    that win have a tiny u and keep their full relative precision.
    """
    u = (words.to(dtype) + 0.5) * 2.0**-32
    return -(-torch.log1p(-u)).log()


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return (seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]


def noise_at(seed: Tensor, branch: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Random words of the tokens ids [R, n] -> [R, n]."""
    counter = (ids >> 2, position[:, None], branch[:, None], torch.zeros_like(ids))
    words = torch.stack(philox4x32(counter, _key(seed)), -1)
    return words.gather(-1, (ids & 3)[..., None]).squeeze(-1)


def noise_all(seed: Tensor, branch: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Random words of every token -> [R, vocab]. One Philox block gives the words of four tokens."""
    quads = torch.arange(-(-vocab // 4), device=seed.device)[None].expand(len(seed), -1)
    counter = (quads, position[:, None], branch[:, None], torch.zeros_like(quads))
    return torch.stack(philox4x32(counter, _key(seed)), -1).flatten(1)[:, :vocab]
