"""Shaping: changes the logits of a request as its parameters say, before a token is drawn.

Owns the order, which is that of transformers' processors: bias, repetition, then presence and frequency (as OpenAI
defines them, over the output alone), bad words, minimum length. Temperature and filters come later, in the sampler.
Rows are changed in place, so every sampler (torch, C, a kernel) gets the same logits. A banned token gets BANNED, which
is finite, because a row with an infinity counts as bad. Also owns the tokens of the sequences that it shapes, and reads
the log probabilities of the model before anything is changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index

import torch
from torch import Tensor

from engine.errors import one_line
from engine.params import SamplingParams
from engine.step.runner import Logprob, NewSequence, Plan, Row

BANNED = -1e30
"""Gives probability 0 at any temperature. No sum over a vocabulary overflows."""

NOTHING_LEFT = (
    "bad_words, logit_bias and min_tokens ban every token of the vocabulary, so none can be drawn: ban fewer"
)


@dataclass(slots=True)
class _Marks:
    """What shaping of one sequence needs on the device.

    counted: tokens that are counted so far. counts: how often each token occurs in the output [vocab]. seen: whether it
    occurs in prompt or output [vocab]. Both are empty without a penalty. The rest are constant ids.
    """

    counted: int
    counts: Tensor
    seen: Tensor
    bias_ids: Tensor
    bias: Tensor
    ends: Tensor


@dataclass(slots=True)
class _Asked:
    """A sequence whose logits are shaped, or whose log probabilities are wanted. tokens: all scheduled tokens."""

    new: NewSequence
    logprobs: int | None
    tokens: array[int]
    ends: list[int] = field(default_factory=list)
    marks: _Marks | None = None


class Shaper:
    """Shapes the logits of all running sequences. Call `take` first in each step."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def take(self, plan: Plan) -> dict[int, str]:
        """Add new sequences and tokens, and drop retired sequences. Returns row -> what is wrong with its request."""
        wrong: dict[int, str] = {}
        for seq_id in plan.retired:
            self._asked.pop(seq_id, None)
        for i, row in enumerate(plan.rows):
            if row.new is not None:
                self._asked.pop(row.seq_id, None)
                try:
                    self._meet(row.seq_id, row.new)
                except Exception as error:
                    wrong[i] = one_line(error)
            asked = self._asked.get(row.seq_id)
            if asked is not None and row.start + len(row.tokens) > len(asked.tokens):
                asked.tokens[row.start :] = row.tokens
        return wrong

    def _meet(self, seq_id: int, new: NewSequence) -> None:
        k = new.params.logprobs
        if k is not None or new.params.shapes_logits:
            ends = sorted({*new.eos_token_ids, *new.params.stop_token_ids})
            self._asked[seq_id] = _Asked(new, None if k is None else index(k), new.tokens[:], ends)

    def logprobs(self, row: Row) -> int | None:
        """Number of likeliest tokens to return with each token of the row. None: no log probabilities."""
        asked = self._asked.get(row.seq_id)
        return row.top or (asked.logprobs if asked else None)

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> dict[int, str]:
        """Shapes rows of the logits [L, vocab] in place, if their requests ask for it.

        Returns row -> why no token can be drawn.
        """
        wrong: dict[int, str] = {}
        for i, row in enumerate(rows if self._asked else ()):
            asked = self._asked.get(row.seq_id)
            if asked is None or not asked.new.params.shapes_logits:
                continue
            try:
                if not self._shape(logits[i], row, asked):
                    wrong[i] = NOTHING_LEFT
            except Exception as error:
                wrong[i] = one_line(error)
        return wrong

    def _shape(self, logits: Tensor, row: Row, asked: _Asked) -> bool:
        """False if every token is banned."""
        params, known = asked.new.params, row.start + row.n
        marks = self._marked(logits, asked, known)
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
        banned = _banned(params, asked.tokens, known)
        if banned:
            wide = wide.index_fill(0, _there(banned, torch.int64, wide.device), BANNED)
        if known - asked.new.prompt_tokens < params.min_tokens and len(marks.ends):
            wide = wide.index_fill(0, marks.ends, BANNED)
            banned += asked.ends
        logits.copy_(wide)
        banned += [t for t, b in params.logit_bias if b <= BANNED]
        return len(banned) < len(logits) or len({t for t in banned if t < len(logits)}) < len(logits)

    def _marked(self, logits: Tensor, asked: _Asked, known: int) -> _Marks:
        new, tokens = asked.new, asked.tokens
        params, device, vocab = new.params, logits.device, len(logits)
        marks = asked.marks
        if marks is None or marks.counted > known:
            size = vocab if params.counts_tokens else 0
            marks = asked.marks = _Marks(
                0,
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.zeros(size, dtype=torch.bool, device=device),
                _there([t for t, _ in params.logit_bias], torch.int64, device),
                _there([max(b, BANNED) for _, b in params.logit_bias], torch.float64, device),
                _there([t for t in asked.ends if t < vocab], torch.int64, device),
            )
        if params.counts_tokens and marks.counted < known:
            fresh = _there(tokens[marks.counted : known], torch.int64, device)
            marks.seen[fresh] = True
            sampled = fresh[max(0, new.prompt_tokens - marks.counted) :]
            marks.counts.index_add_(0, sampled, torch.ones_like(sampled, dtype=torch.int32))
        marks.counted = known
        return marks


def _banned(params: SamplingParams, tokens: Sequence[int], known: int) -> list[int]:
    """Tokens that would complete a bad word after the first `known` tokens."""
    out = []
    for *before, last in params.bad_word_ids:
        n = len(before)
        if n <= known and list(tokens[known - n : known]) == before:
            out.append(last)
    return out


class Logprobs:
    """The log probabilities of the model for the rows that ask, read before the logits are shaped."""

    def __init__(self, logits: Tensor, wanted: Iterable[int | None]) -> None:
        """wanted: number of likeliest tokens for each row of the logits [L, vocab]; None: the row does not ask."""
        self._asked = {i: k for i, k in enumerate(wanted) if k is not None}
        if self._asked:
            wide = torch.stack(
                [logits[i] for i in self._asked]
            )  # indexing with a list would copy the list to the device
            self._all = (wide if wide.dtype == torch.float64 else wide.float()).log_softmax(-1)

    def __bool__(self) -> bool:
        """Some row asks."""
        return bool(self._asked)

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, on the device, for the A rows that ask: log probabilities [A, 1 + k] of the drawn token and of the k
        likeliest tokens, and the ids [A, k] of these. ids [L]: the token drawn in each row."""
        drawn = torch.stack([ids[i] for i in self._asked]).long().clamp(min=0)
        most = max(self._asked.values())
        top, top_ids = self._all.topk(min(most, self._all.shape[1]))
        own = self._all.gather(1, drawn[:, None])
        del self._all
        return torch.cat((own, top), 1), top_ids

    def of(self, values: list[list[float]], top_ids: list[list[int]]) -> dict[int, Logprob]:
        """The results of `look_up` on the host, by row."""
        return {
            i: Logprob(own, ids[:k], top[:k])
            for (i, k), (own, *top), ids in zip(self._asked.items(), values, top_ids, strict=True)
        }


def _there(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values on the device. Does not wait for queued work."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and len(values):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
