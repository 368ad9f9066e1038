"""Beam search: which branches go on, which end and which are dropped. Policy over fork and release; no torch.

Owns the scores. Equal to transformers' `num_beams` without sampling: of all continuations of all beams the
best (1 + number of end tokens) x width are looked at; those that end count if they are among the first
`width` and score sum of log probabilities / length ** length_penalty, end token included; the best that do
not end go on. Invariant: at most `width` beams live, at most `width` hypotheses are kept, best first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from engine.params import EarlyStopping


class Move(NamedTuple):
    """Branch `parent` continues with `token`; `score` is the sum of log probabilities then. ends: no further."""

    parent: int
    token: int
    score: float
    ends: bool


@dataclass(slots=True)
class Hypothesis:
    """A finished branch and its score, length penalty applied."""

    seq_id: int
    score: float


class BeamSearch:
    """The search of one request. Branches are named by sequence id.

    most: tokens of the longest hypothesis; ends: tokens that end one. early_stopping: `yes` ends with `width`
    hypotheses; `no` when the best beam, at its present length, cannot beat the worst of them; `never` when
    it cannot at any length.
    """

    def __init__(
        self,
        width: int,
        most: int,
        ends: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = "no",
    ) -> None:
        self.width = width
        self.hypotheses: list[Hypothesis] = []
        """The best so far, best first."""
        self.over = False
        self._most, self._ends = most, ends
        self._penalty, self._early = length_penalty, early_stopping
        self._scores: dict[int, float] = {}
        self._offers: dict[int, tuple[Sequence[int], Sequence[float]]] = {}

    @property
    def candidates(self) -> int:
        """Continuations of a beam that are looked at."""
        return max(2, 1 + len(self._ends)) * self.width

    def begin(self, seq_id: int) -> None:
        """The prompt's own branch is the one beam."""
        self._scores = {seq_id: 0.0}

    def offer(self, seq_id: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """A beam's likeliest continuations, falling."""
        self._offers[seq_id] = (tokens, logprobs)

    def has_offered(self, seq_id: int) -> bool:
        """Its continuations for the next step are known."""
        return seq_id in self._offers

    def step(self, beams: Sequence[int], length: int) -> tuple[list[Move], list[int]]:
        """All of `beams`, each with `length` tokens of output, have offered. Returns the moves, beams that go on
        first, and the hypotheses that better ones displace. Then call `moved` for each move."""
        found = (
            (score + p, -at, seq_id, token)
            for at, seq_id in enumerate(beams)
            for score, (tokens, logprobs) in ((self._scores[seq_id], self._offers[seq_id]),)
            for token, p in zip(tokens, logprobs, strict=True)
        )
        best = nlargest(self.candidates, found)
        last = length + 1 >= self._most
        moves = [Move(parent, token, score, last or token in self._ends) for score, _, parent, token in best]
        running = [m for m in moves if not m.ends][: self.width]
        ended = [m for m in moves[: self.width] if m.ends]
        # The same order as a top-k over hypotheses, then newcomers: of equal scores the older stays.
        pool: list[tuple[float, Hypothesis | Move]] = [(h.score, h) for h in self.hypotheses]
        pool += [(self._final(m, length), m) for m in ended]
        kept = sorted(pool, key=lambda one: -one[0])[: self.width]
        staying = [one for _, one in kept if isinstance(one, Hypothesis)]
        new = [one for _, one in kept if isinstance(one, Move)]
        displaced = [h.seq_id for h in self.hypotheses if h not in staying]
        self.hypotheses = staying
        self._offers.clear()
        self._scores = {}
        worst = min((one[0] for one in kept), default=0.0)
        full = len(kept) >= self.width
        self.over = not running or (
            full and (self._early == "yes" or not self._improves(running, length + 1, worst))
        )
        going: list[Move] = [] if self.over else running
        return [*going, *new], displaced

    def moved(self, move: Move, seq_id: int, length: int) -> None:
        """The branch that a move became; `length` is its tokens of output before the move."""
        if move.ends:
            self.hypotheses.append(Hypothesis(seq_id, self._final(move, length)))
            self.hypotheses.sort(key=lambda h: -h.score)
        else:
            self._scores[seq_id] = move.score

    def _final(self, move: Move, length: int) -> float:
        return move.score / (length + 1) ** self._penalty

    def _improves(self, running: Iterable[Move], length: int, worst: float) -> bool:
        at = self._most if self._early == "never" and self._penalty > 0 else length
        return max(m.score for m in running) / at**self._penalty > worst
