"""Playing: a workload whose requests arrive at a running engine.

Owns the load that is under way, which request is whose, and the counts that other threads read. Lives in
the engine thread but for `asked`.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sim.arrivals import Arrival, Load
from engine.sim.synthetic import Language
from engine.sim.workload import Workload
from engine.step.core import EngineCore
from engine.step.sequence import Request


class Playing:
    """One load at a time. new_id: number of the next request."""

    def __init__(self, new_id: Callable[[], int]) -> None:
        self._new_id = new_id
        self._load: Load | None = None
        self._arrivals: dict[int, Arrival] = {}
        """Requests of the load that are under way."""
        self._asked = self._over = 0
        self.requests = 0
        """Requests of loads that have come so far."""

    def asked(self) -> None:
        """A caller, in its own thread, has asked for a load: none is over before this one is."""
        self._asked += 1

    @property
    def over(self) -> bool:
        """No request of a load will come any more; those that came may still run."""
        return self._asked == self._over

    @property
    def next_at(self) -> float | None:
        """When the next request comes, on the engine's clock."""
        return self._load.next_at if self._load else None

    def begin(self, workload: Workload, language: Language, now: float) -> bool:
        """The workload's second 0 is `now`. False if another one is under way."""
        if self._load is not None:
            self._over += 1
            return False
        self._load = Load(workload, language, now)
        return True

    def arrive(self, core: EngineCore) -> None:
        """Queue what has come."""
        if self._load is None:
            return
        for arrival in self._load.take(core.clock()):
            request_id = self._new_id()
            self._arrivals[request_id] = arrival
            self.requests += 1
            core.add_request(
                request_id,
                arrival.token_ids,
                arrival.params,
                t_arrival=arrival.at,
                spans=arrival.spans,
            )
        self._end()

    def finished(self, request: Request, now: float) -> None:
        """Whoever asked it may go on."""
        arrival = self._arrivals.pop(request.request_id, None)
        if arrival is not None and self._load is not None:
            output = list(request.branches[0].output_ids) if request.branches else []
            self._load.finished(arrival, now, output)
            self._end()

    def _end(self) -> None:
        if self._load is not None and self._load.over:
            self._load = None
            self._over += 1
