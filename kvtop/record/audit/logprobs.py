"""Law of log probabilities: each token of a request that asks for them has a row of possible figures.

Owns the tokens of this batch whose TokenLogprobs has not come yet.
"""

from __future__ import annotations

from itertools import pairwise

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes

SLACK = 1e-3
"""Rounding error of a logarithm in the precision of the model."""


class LogprobLaw(Law):
    """A redacted recording has no log probabilities and is not checked."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._wanted: list[tuple[int, int]] = []
        """(sequence, token)"""

    @takes(ev.TokensSampled)
    def sampled(self, e: ev.TokensSampled) -> None:
        """Note the rows whose requests ask."""
        if self.books.redacted:
            return
        at = 0
        for i, count in zip(e.seq_ids, e.counts, strict=True):
            request = self.books.branch(i).request
            if self._places(i) is not None and not request.searches:
                self._wanted += [(i, token) for token in e.token_ids[at : at + count]]
            at += count

    @takes(ev.TokenLogprobs)
    def rows(self, e: ev.TokenLogprobs) -> None:
        """The figures are possible logarithms of probabilities, in falling order."""
        if self.books.redacted:
            return
        wanted, self._wanted = self._wanted, []
        rows = list(zip(e.seq_ids, e.token_ids, strict=True))
        need(
            rows == wanted,
            f"rows for {rows[:2]}, but the sampled tokens that need one are {wanted[:2]}",
        )
        for i, token, p, ids, top in zip(*(getattr(e, name) for name in e.__struct_fields__), strict=True):
            need(
                len(ids) == len(top) == self._places(i),
                f"sequence {i} has {len(ids)} likeliest tokens",
            )
            need(len(set(ids)) == len(ids), f"sequence {i} has a token twice among the likeliest")
            need(all(x <= SLACK for x in (p, *top)), f"sequence {i} has a logarithm above 0")
            need(all(a >= b for a, b in pairwise(top)), f"the likeliest of sequence {i} are not in order")
            if token in ids:
                other = top[ids.index(token)]
                need(abs(p - other) <= SLACK, f"token {token} has {p}, but {other} among the likeliest")
            elif top:
                need(p <= top[-1] + SLACK, f"token {token} is likelier than the likeliest of sequence {i}")

    def end_batch(self, batch: ev.StepBatch) -> None:
        """No row is missing."""
        wanted, self._wanted = self._wanted, []
        need(not wanted, f"TokenLogprobs is missing for {wanted[:2]}")

    def _places(self, seq_id: int) -> int | None:
        asked = self.books.branch(seq_id).request.queued.params.get("logprobs")
        return asked if type(asked) is int else None
