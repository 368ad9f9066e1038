"""Shaping: what a request asks to be done to its logits before a token is drawn.

Owns the order, which is that of transformers' processors: bias, repetition, then presence and frequency (as
OpenAI defines them, over the output alone), bad words, least length; temperature and the filters come after,
in the sampler. Rows are changed in place, so every sampler (torch, C, a kernel) sees the same logits. A
token that must not come gets BANNED, which is finite: a row with an infinity is a row gone bad. Also
tells the model's own log probabilities, read before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.params import SamplingParams
from engine.step.runner import Logprob, Row

BANNED = -1e30
"""Probability 0 at any temperature, and no sum over a vocabulary overflows."""


@dataclass(slots=True)
class _Marks:
    """What one sequence's shaping needs on the device: how often each token stands in its output [vocab], whether it
    stands in prompt or output [vocab] (both empty without a penalty), and its constant ids."""

    counted: int
    counts: Tensor
    seen: Tensor
    bias_ids: Tensor
    bias: Tensor
    ends: Tensor


class Shaper:
    """Marks by sequence id; `forget` those whose rows are given up."""

    def __init__(self) -> None:
        self._marks: dict[int, _Marks] = {}

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what was kept for them; a sequence that comes back is marked anew from its tokens."""
        for seq_id in seq_ids:
            self._marks.pop(seq_id, None)

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Shapes, in place, the rows of logits [L, vocab] whose requests ask for it."""
        for i, row in enumerate(rows):
            if row.seq.request.params.shapes_logits:
                self._shape(logits[i], row)

    def _shape(self, logits: Tensor, row: Row) -> None:
        request = row.seq.request
        params, known = request.params, row.start + row.n
        marks = self._marked(logits, row, known)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if len(marks.bias_ids):
            wide = wide.index_add(0, marks.bias_ids, marks.bias.to(wide.dtype))
        r = params.repetition_penalty
        if r is not None and r != 1:
            wide = torch.where(marks.seen, torch.where(wide < 0, wide * r, wide / r), wide)
        if params.frequency_penalty:
            wide = wide - params.frequency_penalty * marks.counts
        if params.presence_penalty:
            wide = wide - params.presence_penalty * (marks.counts > 0)
        banned = _banned(params, row.seq.tokens, known)
        if banned:
            wide = wide.index_fill(0, _there(banned, torch.int64, wide.device), BANNED)
        if known - request.prompt_tokens < params.min_tokens and len(marks.ends):
            wide = wide.index_fill(0, marks.ends, BANNED)
        logits.copy_(wide)

    def _marked(self, logits: Tensor, row: Row, known: int) -> _Marks:
        request, tokens = row.seq.request, row.seq.tokens
        params, device, vocab = request.params, logits.device, len(logits)
        marks = self._marks.get(row.seq.seq_id)
        if marks is None or marks.counted > known:
            size = vocab if params.counts_tokens else 0
            ends = sorted({*request.eos_token_ids, *params.stop_token_ids})
            marks = self._marks[row.seq.seq_id] = _Marks(
                0,
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.zeros(size, dtype=torch.bool, device=device),
                _there([t for t, _ in params.logit_bias], torch.int64, device),
                _there([b for _, b in params.logit_bias], torch.float64, device),
                _there([t for t in ends if t < vocab], torch.int64, device),
            )
        if params.counts_tokens and marks.counted < known:
            new = _there(tokens[marks.counted : known], torch.int64, device)
            marks.seen[new] = True
            sampled = new[max(0, request.prompt_tokens - marks.counted) :]
            marks.counts.index_add_(0, sampled, torch.ones_like(sampled, dtype=torch.int32))
        marks.counted = known
        return marks


def _banned(params: SamplingParams, tokens: Sequence[int], known: int) -> list[int]:
    """Tokens that would complete a bad word after the first `known` of `tokens`."""
    out = []
    for *before, last in params.bad_word_ids:
        n = len(before)
        if n <= known and list(tokens[known - n : known]) == before:
            out.append(last)
    return out


class Logprobs:
    """The model's own log probabilities of the rows that ask, read before the logits are shaped."""

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """logits [L, vocab] of `rows`."""
        asked = {i: row.top or row.seq.request.params.logprobs for i, row in enumerate(rows)}
        self._asked = {i: k for i, k in asked.items() if k is not None}
        if self._asked:
            wide = torch.stack([logits[i] for i in self._asked])  # a list of indices would have to get there
            self._all = (wide if wide.dtype == torch.float64 else wide.float()).log_softmax(-1)

    def __bool__(self) -> bool:
        """Some row asks."""
        return bool(self._asked)

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [L]: the token drawn in each row. Of the A rows that asked: log probabilities [A, 1 + k] of that
        token and of the k likeliest, and the ids of those [A, k]; on the device, where nobody waits for them."""
        drawn = torch.stack([ids[i] for i in self._asked]).long().clamp(min=0)
        most = max(self._asked.values())
        top, top_ids = self._all.topk(min(most, self._all.shape[1]))
        own = self._all.gather(1, drawn[:, None])
        del self._all
        return torch.cat((own, top), 1), top_ids

    def of(self, values: list[list[float]], top_ids: list[list[int]]) -> dict[int, Logprob]:
        """What look_up gave, on the host, by row."""
        return {
            i: Logprob(own, ids[:k], top[:k])
            for (i, k), (own, *top), ids in zip(self._asked.items(), values, top_ids, strict=True)
        }


def _there(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values on the device, without waiting for what is queued there."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and len(values):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
