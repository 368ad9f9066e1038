"""Generation: what sampled tokens make of sequences: text, ends, new branches, the moves of a beam search.

Owns the stop checks and the one way in which a branch is born. Runs at the commit of a step, after its rows were
executed and before the events that report them; emits SequenceForked. Invariant: if an error occurs while a token
becomes text, that token is left out and only its request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.errors import one_line
from engine.events import Event, SequenceForked
from engine.kv.paging import Paging
from engine.step.beam import BeamSearch
from engine.step.runner import Row
from engine.step.sequence import Request, Sequence

PRUNED = "pruned"
"""finish_reason of a beam that was dropped; its request goes on without it."""


Grown = tuple[Sequence, list[int], str]
"""A branch, the tokens that it sampled in this step, and the text that became visible."""


class Generation:
    """seq_ids: numbers for branches; emit gets events in order."""

    def __init__(
        self, paging: Paging, seq_ids: Iterator[int], emit: Callable[[Event], None], max_model_len: int
    ) -> None:
        self._paging = paging
        self._seq_ids = seq_ids
        self._emit = emit
        self._max_model_len = max_model_len

    def fork(self, parent: Sequence) -> Sequence:
        """A child that shares the parent's computed blocks."""
        request = parent.request
        child = Sequence(next(self._seq_ids), request, branch=len(request.branches))
        child.tokens = parent.tokens[:]
        child.detok = parent.detok.fork() if parent.detok else None
        request.branches.append(child)
        self._emit(SequenceForked(request.request_id, parent.seq_id, child.seq_id))
        self._paging.fork(parent, child)
        return child

    def advance(self, seq: Sequence, row: Row, sampled: list[int], now: float) -> list[Grown]:
        """One executed row: its KV is there, its sampled tokens are appended, one to each branch where
        samples part. Returns the branches, what they sampled and what that shows."""
        accepted = 0
        if row.drafts and sampled:
            # A sample after a draft counts if the samples agree with all drafts before it.
            drafts = row.tokens[-row.drafts :]
            accepted = next((i for i, d in enumerate(drafts) if d != sampled[i]), row.drafts)
            sampled = sampled[: accepted + 1]
        parts = row.parts and len(sampled) > 1
        grown = [] if parts else [self._extend(seq, sampled, now)]
        if row.drafts:
            # All but the newest token are computed; an end may have come before the last accepted draft.
            accepted = max(0, len(grown[0][1]) - 1)
        computed = row.start + row.n - row.drafts + accepted
        if row.start < seq.high_computed:
            seq.request.recomputed_tokens += min(computed, seq.high_computed) - row.start
        seq.num_computed = computed
        seq.high_computed = max(seq.high_computed, computed)
        if parts:
            seq.request.parted = True
            branches = [seq, *(self.fork(seq) for _ in sampled[1:])]
            grown = [self._extend(b, [token], now) for b, token in zip(branches, sampled, strict=True)]
        return grown

    def move_beams(
        self,
        request: Request,
        search: BeamSearch,
        advanced: list[Grown],
        now: float,
    ) -> list[Sequence]:
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
        heirs: list[Sequence] = []
        for move in moves:
            parent = by_id[move.parent]
            heirs.append(self.fork(parent) if move.parent in taken else parent)
            taken.add(move.parent)
        place = {seq: i for i, (seq, _, _) in enumerate(advanced)}
        for move, seq in zip(moves, heirs, strict=True):
            search.moved(move, seq.seq_id, length)
            grown = self._extend(seq, [move.token], now)
            if seq in place:
                advanced[place[seq]] = grown
            else:
                advanced.append(grown)
        pruned = [s for s in beams if s.seq_id not in taken] + [by_id[i] for i in displaced]
        if search.over:
            best = search.hypotheses[0].seq_id
            pruned += [s for s in request.branches if s.seq_id != best and s not in pruned]
        for seq in pruned:
            seq.finish_reason = PRUNED
        request.branches = [s for s in request.branches if s.finish_reason != PRUNED]
        return pruned

    def _extend(self, seq: Sequence, sampled: list[int], now: float) -> Grown:
        """Append what was sampled, up to an end."""
        kept, text = 0, ""
        try:
            for token in sampled:
                if seq.finish_reason:
                    break
                text += self._append(seq, token, now)
                kept += 1
            if seq.finish_reason and seq.detok:
                text += seq.detok.flush()
        except Exception as error:
            seq.request.error = one_line(error)
        return seq, sampled if kept == len(sampled) else sampled[:kept], text

    def _append(self, seq: Sequence, token: int, now: float) -> str:
        """One sampled token: its visible text; sets finish_reason."""
        request, params = seq.request, seq.request.params
        output = len(seq.tokens) + 1 - request.prompt_tokens
        ends = token in request.eos_token_ids or token in params.stop_token_ids
        text = seq.detok.push(token, output >= params.min_tokens) if seq.detok and not ends else ""
        seq.tokens.append(token)
        if request.t_first_token is None:
            request.t_first_token = now
        request.t_last_token = now
        if ends or (seq.detok and seq.detok.stopped):
            seq.finish_reason = "stop"
        elif output >= params.max_tokens or len(seq.tokens) >= self._max_model_len:
            seq.finish_reason = "length"
        return text
