"""Commit: what an executed step changes, phase by phase, in the order of its events.

Owns that order: tokens, then drafts, dropped beams, publications, ends. Invariants: a block is published only after
the stop check, so what is hashed is exactly what was computed; a failure while one request is committed ends that
request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from engine.errors import one_line
from engine.events import BeamPruned, DraftVerified, Event, TokenLogprobs, TokensSampled
from engine.kv.paging import Paging
from engine.step.beam import BeamSearch
from engine.step.detok import Pieces
from engine.step.ending import Ending
from engine.step.flight import Flight, Flights
from engine.step.generation import PRUNED, Generation, Grown
from engine.step.runner import Logprob, Row, StepOutput
from engine.step.scheduler import Scheduler
from engine.step.sequence import Request, Sequence

_NOT_FINITE = "the model gave NaN or infinite logits; its cached blocks were dropped"


class _Outcome(msgspec.Struct, eq=False):
    """A step while it is being committed."""

    output: StepOutput
    now: float
    rows: list[tuple[int, Sequence, Row]]
    """(place in the plan, sequence, row) of the rows that count."""
    bad: dict[Request, None] = {}
    """Requests whose logits were not finite."""
    searches: dict[Request, BeamSearch] = {}
    """Beam searches that got new offers."""
    advanced: list[Grown] = []
    logprobs: list[tuple[int, int, Logprob]] = []
    """(sequence, token, what the model thought of it), where a request asks."""
    pruned: list[Sequence] = []
    done: dict[Request, None] = {}


class Commit:
    """The commit of one step after another."""

    def __init__(
        self,
        paging: Paging,
        scheduler: Scheduler,
        flights: Flights,
        generation: Generation,
        ending: Ending,
        pieces: Pieces,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._paging = paging
        self._scheduler = scheduler
        self._flights = flights
        self._generation = generation
        self._ending = ending
        self._pieces = pieces
        self._emit = emit
        self._clock = clock

    def apply(self, flight: Flight, output: StepOutput) -> None:
        """Commit `flight`, which was executed with `output` and was removed from the flights."""
        step = self._outcome(flight, output)
        self._take_offers(step)
        self._advance(step)
        self._move_beams(step)
        self._report_tokens(step)
        self._verify_drafts(step)
        self._drop_beams(step)
        self._publish(step)
        self._end(step)

    def _outcome(self, flight: Flight, output: StepOutput) -> _Outcome:
        """Which rows count, and which of their requests have failed already."""
        rows = [(i, seq, row) for i, (seq, row) in enumerate(zip(flight.seqs, flight.plan.rows, strict=True))]
        if len(flight.live) < len(rows):
            rows = [one for one in rows if one[1] in flight.live]
        step = _Outcome(output, self._clock(), rows)
        if output.bad_rows or output.errors:
            for i, seq, _ in rows:
                if i in output.bad_rows:
                    step.bad[seq.request] = None
                elif i in output.errors:
                    seq.request.error = output.errors[i]
        return step

    def _take_offers(self, step: _Outcome) -> None:
        """Hand the candidate tokens of each beam to its search."""
        for i, seq, row in step.rows:
            request = seq.request
            if row.top and request.search is not None and request.error is None and request not in step.bad:
                with _alone(request):
                    (offered,) = step.output.logprobs[i]
                    request.search.offer(seq.seq_id, offered.top_ids, offered.top)
                    step.searches[request] = request.search

    def _advance(self, step: _Outcome) -> None:
        """Count the KV of the rows as computed, and append the sampled tokens."""
        advance, now, token_ids, logprobs = (
            self._generation.advance,
            step.now,
            step.output.token_ids,
            step.output.logprobs,
        )
        for i, seq, row in step.rows:
            plain = not row.top and seq.request.error is None and seq.request not in step.bad
            grown = advance(seq, row, token_ids[i] if plain else [], now)
            step.advanced += grown
            if logprobs and plain:
                tokens = [(branch.seq_id, token) for branch, new, _ in grown for token in new]
                thoughts = logprobs.get(i, ())
                step.logprobs += [(*one, p) for one, p in zip(tokens, thoughts, strict=False)]

    def _move_beams(self, step: _Outcome) -> None:
        """Move each beam search on whose beams all have candidates."""
        for request, search in step.searches.items():
            with _alone(request):
                step.pruned += self._generation.move_beams(request, search, step.advanced, step.now)

    def _report_tokens(self, step: _Outcome) -> None:
        """TokensSampled, and TokenLogprobs where a request asks."""
        token_ids = [token for _, new, _ in step.advanced for token in new]
        self._pieces.show(token_ids)
        self._emit(
            TokensSampled(
                [seq.seq_id for seq, _, _ in step.advanced],
                token_ids,
                [len(new) for _, new, _ in step.advanced],
                [seq.num_computed for seq, _, _ in step.advanced],
                [text for _, _, text in step.advanced],
            )
        )
        if step.logprobs:
            self._pieces.show([token for _, _, p in step.logprobs for token in p.top_ids])
            self._emit(
                TokenLogprobs(
                    [seq_id for seq_id, _, _ in step.logprobs],
                    [token for _, token, _ in step.logprobs],
                    [p.sampled for _, _, p in step.logprobs],
                    [p.top_ids for _, _, p in step.logprobs],
                    [p.top for _, _, p in step.logprobs],
                )
            )

    def _verify_drafts(self, step: _Outcome) -> None:
        """How many drafts were right; the slots of the others go back."""
        for _, seq, row in step.rows:
            if row.drafts and seq.request not in step.bad:
                # All but the newest token are computed: that many of the drafts were right.
                self._emit(DraftVerified(seq.seq_id, row.drafts, seq.num_computed - row.start - 1))
                self._paging.truncate(seq, seq.num_computed)

    def _drop_beams(self, step: _Outcome) -> None:
        """Beams that do not go on release their blocks."""
        for seq in step.pruned:
            self._emit(BeamPruned(seq.request.request_id, seq.seq_id))
            self._scheduler.retire(seq, self._flights)

    def _publish(self, step: _Outcome) -> None:
        """Blocks that this step filled become findable; branches that ended go."""
        for seq, _, _ in step.advanced:
            if seq.finish_reason == PRUNED:
                continue
            request = seq.request
            if request.error is None and request not in step.bad:
                self._paging.publish(seq, seq.num_computed)
            if seq.finish_reason:
                if request.live:
                    self._scheduler.retire(seq, self._flights)
                else:
                    step.done[request] = None
        step.done |= {request: None for request, search in step.searches.items() if search.over}

    def _end(self, step: _Outcome) -> None:
        """Requests that are finished, and those that failed."""
        failed = dict.fromkeys([s.request for _, s, _ in step.rows if s.request.error is not None])
        for request in step.done:
            if request not in failed:
                self._ending.finish(request, request.branches[0].finish_reason or "stop")
        for request in failed:
            self._ending.finish(request, "error", request.error)
        for request in step.bad:
            if request in failed:
                continue
            readers = self._paging.invalidate(request.branches[0], self._flights)
            self._ending.finish(request, "error", _NOT_FINITE)
            # Sequences of the next step have read the bad blocks: they start over.
            self._scheduler.preempt_all(readers, self._flights)


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """An error inside ends this request alone."""
    try:
        yield
    except Exception as error:
        request.error = one_line(error)
