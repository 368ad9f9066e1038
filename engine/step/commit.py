"""Growth: what sampled tokens make of sequences: text, ends, new branches, the moves of a beam search.

Owns the stop checks and the one way a branch is born. Called at the commit of a step, between the rows that
were executed and the events that tell of them; emits SequenceForked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.events import Event, SequenceForked
from engine.kv.paging import Paging
from engine.step.beam import BeamSearch
from engine.step.runner import Row
from engine.step.sequence import Request
from engine.step.sequence import Sequence as Branch

PRUNED = "pruned"
"""finish_reason of a beam that was dropped; its request goes on without it."""

Grown = tuple[Branch, list[int], str]
"""A branch, the tokens that it sampled in this step, and the text that became visible."""


class Growth:
    """seq_ids: numbers for branches; emit gets events in order."""

    def __init__(
        self, paging: Paging, seq_ids: Iterator[int], emit: Callable[[Event], None], max_model_len: int
    ) -> None:
        self._paging = paging
        self._seq_ids = seq_ids
        self._emit = emit
        self._max_model_len = max_model_len

    def fork(self, parent: Branch) -> Branch:
        """A child that shares the parent's computed blocks."""
        request = parent.request
        child = Branch(next(self._seq_ids), request, branch=len(request.branches))
        child.tokens = parent.tokens[:]
        child.detok = parent.detok.fork() if parent.detok else None
        request.branches.append(child)
        self._emit(SequenceForked(request.request_id, parent.seq_id, child.seq_id))
        self._paging.fork(parent, child)
        return child

    def advance(self, row: Row, new: list[int], now: float) -> list[Grown]:
        """One executed row: its KV is there, its sampled tokens are appended, a token to each branch where
        samples part. Returns the branches, what they sampled and what that shows."""
        seq, end = row.seq, row.start + row.n - len(row.drafts)
        text = ""
        if row.drafts and new:
            # A sample behind a draft counts if the samples agree with all drafts before it.
            agreed = next((i for i, d in enumerate(row.drafts) if d != new[i]), len(row.drafts))
            known = len(seq)
            text = self._extend(seq, new[: agreed + 1], now)
            new = new[: len(seq) - known]
            end = row.start + len(new)
        if row.start < seq.high_computed:
            seq.request.recomputed_tokens += min(end, seq.high_computed) - row.start
        seq.num_computed = end
        seq.high_computed = max(seq.high_computed, end)
        if row.drafts:
            return [(seq, new, text)]
        if not row.branches or not new:
            return [(seq, new, self._extend(seq, new, now))]
        seq.request.parted = True
        branches = [seq, *(self.fork(seq) for _ in new[1:])]
        return [(b, [token], self._extend(b, [token], now)) for b, token in zip(branches, new, strict=True)]

    def move_beams(
        self,
        request: Request,
        search: BeamSearch,
        advanced: list[Grown],
        now: float,
    ) -> list[Branch]:
        """One step of a beam search, once every beam has offered its continuations: extends and forks
        branches (in `advanced`, too). Returns those that are dropped, marked as such."""
        beams = request.live
        # After a preemption the beams catch up one by one; the first ones wait.
        if any(s.num_computed < len(s) or not search.has_offered(s.seq_id) for s in beams):
            return []
        request.parted = True
        by_id = {s.seq_id: s for s in request.branches}
        length = len(beams[0]) - request.prompt_tokens
        moves, displaced = search.step([s.seq_id for s in beams], length)
        for seq in beams:  # before the forks, which then share what is published
            self._paging.publish(seq, seq.num_computed)
        # The first move of a beam takes its own branch; all others fork before any of them is extended.
        taken: set[int] = set()
        heirs: list[Branch] = []
        for move in moves:
            parent = by_id[move.parent]
            heirs.append(self.fork(parent) if move.parent in taken else parent)
            taken.add(move.parent)
        place = {seq: i for i, (seq, _, _) in enumerate(advanced)}
        for move, seq in zip(moves, heirs, strict=True):
            search.moved(move, seq.seq_id, length)
            row = (seq, [move.token], self._extend(seq, [move.token], now))
            if seq in place:
                advanced[place[seq]] = row
            else:
                advanced.append(row)
        pruned = [s for s in beams if s.seq_id not in taken] + [by_id[i] for i in displaced]
        if search.over:
            best = search.hypotheses[0].seq_id
            pruned += [s for s in request.branches if s.seq_id != best and s not in pruned]
        for seq in pruned:
            seq.finish_reason = PRUNED
        request.branches = [s for s in request.branches if s.finish_reason != PRUNED]
        return pruned

    def _extend(self, seq: Branch, new: list[int], now: float) -> str:
        text = ""
        for token in new:
            text += self._append(seq, token, now)
        if seq.finish_reason and seq.detok:
            text += seq.detok.flush()
        return text

    def _append(self, seq: Branch, token: int, now: float) -> str:
        """One sampled token: its visible text; sets finish_reason."""
        if seq.finish_reason:
            return ""
        request, params = seq.request, seq.request.params
        seq.tokens.append(token)
        if request.t_first_token is None:
            request.t_first_token = now
        request.t_last_token = now
        ends = token in request.eos_token_ids or token in params.stop_token_ids
        may_stop = len(seq) - request.prompt_tokens >= params.min_tokens
        text = seq.detok.push(token, may_stop) if seq.detok and not ends else ""
        if ends or (seq.detok and seq.detok.stopped):
            seq.finish_reason = "stop"
        elif len(seq) - request.prompt_tokens >= params.max_tokens or len(seq) >= self._max_model_len:
            seq.finish_reason = "length"
        return text
