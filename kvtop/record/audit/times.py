"""Law of instants: every instant in a request's timings lies in the batch with the matching event.

Owns between which two batches each request was admitted and sampled its first and its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes

Between = tuple[float, float]


@dataclass(slots=True)
class _Instants:
    """(t of the batch before, t of the batch) of each event; None if it never came."""

    admitted: Between | None = None
    first: Between | None = None
    last: Between | None = None


class TimeLaw(Law):
    """An arrival is checked exactly, every other instant to within its batch."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._instants: dict[int, _Instants] = {}

    @property
    def _now(self) -> Between:
        return self.books.t_before, self.books.t

    @takes(ev.RequestQueued)
    def queued(self, e: ev.RequestQueued) -> None:
        """A request arrives before it is queued."""
        self._instants[e.request_id] = _Instants()
        need(e.t_arrival <= self.books.t, f"it arrived at {e.t_arrival}, after its batch at {self.books.t}")

    @takes(ev.RequestAdmitted)
    def admitted(self, e: ev.RequestAdmitted) -> None:
        """The first admission counts."""
        if not e.resumed and e.request_id in self._instants:
            self._instants[e.request_id].admitted = self._now

    @takes(ev.TokensSampled)
    def sampled(self, e: ev.TokensSampled) -> None:
        """The first tokens, and the latest so far."""
        for i, count in zip(e.seq_ids, e.counts, strict=True):
            instants = self._instants.get(self.books.branch(i).request.queued.request_id)
            if count and instants is not None:
                instants.first = instants.first or self._now
                instants.last = self._now

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """Each instant lies in its batch, and the instants are in order."""
        life, t = self.books.life(e.request_id), e.timings
        known = self._instants.pop(e.request_id, _Instants())
        need(
            t.t_arrival == life.queued.t_arrival, f"it arrived at {life.queued.t_arrival}, not {t.t_arrival}"
        )
        for name, instant, between in (
            ("admitted", t.t_admitted, known.admitted),
            ("t_first_token", t.t_first_token, known.first),
            ("t_last_token", t.t_last_token, known.last),
            ("t_finished", t.t_finished, self._now),
        ):
            if between is None or instant is None:
                need(
                    between is None and instant is None,
                    f"{name} is {instant}, which does not agree with the events",
                )
            else:
                need(between[0] <= instant <= between[1], f"{name} is {instant}, its batch is {between}")
        instants = [
            x
            for x in (t.t_arrival, t.t_admitted, t.t_first_token, t.t_last_token, t.t_finished)
            if x is not None
        ]
        need(instants == sorted(instants), "its instants are out of order")
