"""LoadDriver: lets the requests of a workload arrive at a running engine.

Owns the load that is running, the mapping from requests to arrivals, and the counts that other threads read. All
methods except `asked` are called in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sim.arrivals import Arrival, Load
from engine.sim.synthetic import Language
from engine.sim.workload import Workload
from engine.step.core import EngineCore
from engine.step.sequence import Request


class LoadDriver:
    """Plays one load at a time. new_id: gives the number of the next request."""

    def __init__(self, new_id: Callable[[], int]) -> None:
        self._new_id = new_id
        self._load: Load | None = None
        self._arrivals: dict[int, Arrival] = {}
        """Requests of the load that are not finished."""
        self._asked = self._over = 0
        self.requests = 0
        """Requests that have arrived from loads so far."""

    def asked(self) -> None:
        """A caller has asked for a load, in its own thread. No load counts as over before this one is."""
        self._asked += 1

    @property
    def over(self) -> bool:
        """No request of a load will arrive any more. Those that arrived may still be running."""
        return self._asked == self._over

    @property
    def next_at(self) -> float | None:
        """When the next request arrives, on the engine's clock."""
        return self._load.next_at if self._load else None

    def begin(self, workload: Workload, language: Language, now: float) -> bool:
        """Starts a workload: its second 0 is `now`. False if another one is running."""
        if self._load is not None:
            self._over += 1
            return False
        self._load = Load(workload, language, now)
        return True

    def arrive(self, core: EngineCore) -> None:
        """Queues the requests that have arrived."""
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
        """The request is finished, so its user may continue."""
        arrival = self._arrivals.pop(request.request_id, None)
        if arrival is not None and self._load is not None:
            output = list(request.branches[0].output_ids) if request.branches else []
            self._load.finished(arrival, now, output)
            self._end()

    def _end(self) -> None:
        if self._load is not None and self._load.over:
            self._load = None
            self._over += 1
