"""Ending: the end of a request, for any reason.

Owns RequestFinished with its usage and its instants. Invariants: a request ends once, and everything that it held is
released before the event. An error in the callback is reported and affects no other request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import one_line
from engine.events import EngineError, Event, RequestFinished, Timings, Usage
from engine.step.flight import Flights
from engine.step.scheduler import Scheduler
from engine.step.sequence import Request, Status

Finish = Callable[[Request], None]


class Ending:
    """requests: those that wait or run, by id. flights: the steps in flight, whose rows of it count no more.
    on_finished: called once for each request, after its RequestFinished."""

    def __init__(
        self,
        requests: dict[int, Request],
        scheduler: Scheduler,
        flights: Flights,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        on_finished: Finish | None,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._flights = flights
        self._emit = emit
        self._clock = clock
        self._on_finished = on_finished

    def finish(self, request: Request, reason: Any, error: str | None = None) -> None:
        """Release everything and report the end."""
        for seq in request.live:
            seq.finish_reason = reason
        self._scheduler.remove(request, self._flights)
        self.report(request, reason, error)

    def report(self, request: Request, reason: Any, error: str | None = None) -> None:
        """The end alone, of a request that holds nothing (any more)."""
        request.status = Status.FINISHED
        request.finish_reason, request.error = reason, error
        request.t_finished = self._clock()
        self._requests.pop(request.request_id, None)
        self._emit(RequestFinished(request.request_id, reason, timings(request), usage(request), error))
        if self._on_finished:
            try:
                self._on_finished(request)
            except Exception as problem:
                self._emit(EngineError(f"after its end: {one_line(problem)}", request.request_id))


def usage(request: Request) -> Usage:
    """Its tokens, by what became of them."""
    admitted = request.t_admitted is not None
    return Usage(
        request.prompt_tokens,
        request.cached_tokens,
        request.prompt_tokens - request.cached_tokens if admitted else 0,
        request.cache_write_tokens,
        request.num_output,
        request.preemptions,
        request.recomputed_tokens,
    )


def timings(request: Request) -> Timings:
    """Its instants."""
    return Timings(
        request.t_arrival,
        request.t_admitted,
        request.t_first_token,
        request.t_last_token,
        request.t_finished,
    )
