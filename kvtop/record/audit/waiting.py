"""Law of the waiting queue: a request enters it at its `position`, and only the head is admitted or blocked.

Owns the queue in its order. Older recordings have no `position` and are not checked.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes


class WaitingLaw(Law):
    """With the policy `priority` the queue is sorted by priority, arrival and id."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._queue: list[int] = []
        self._has_positions = False
        """An event had a position, so this recording is not an older one."""
        self._sorted = books.knobs.scheduling_policy == "priority"

    @takes(ev.RequestQueued, ev.RequestPreempted)
    def enters(self, e: ev.RequestQueued | ev.RequestPreempted) -> None:
        """The position is an index of the queue. -1: the request never waits."""
        if e.position < 0:
            return
        self._has_positions = True
        queue, place, mine = self._queue, e.position, e.request_id
        queue.insert(place, mine)
        need(place < len(queue), f"request {mine} enters at {place} of {len(queue)}")
        if self._sorted:
            near = [self._rank(i) for i in queue[max(0, place - 1) : place + 2]]
            need(
                near == sorted(near), f"request {mine} enters at {place}, where its priority does not belong"
            )
        elif type(e) is ev.RequestQueued:
            need(place == len(queue) - 1, f"request {mine} enters at {place}, not at the end")

    @takes(ev.RequestAdmitted)
    def admitted(self, e: ev.RequestAdmitted) -> None:
        """Only the head leaves the queue."""
        if self._has_positions:
            head = self._queue[:1]
            self._leave(e.request_id)
            need(
                head == [e.request_id], f"request {e.request_id} is admitted, the head of the queue is {head}"
            )

    @takes(ev.AdmissionBlocked)
    def blocked(self, e: ev.AdmissionBlocked) -> None:
        """Only the head is blocked."""
        head = self._queue[:1]
        need(
            not self._has_positions or head == [e.request_id],
            f"request {e.request_id} is blocked, the head is {head}",
        )

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """A request may be aborted or refused while it waits."""
        self._leave(e.request_id)

    def _leave(self, request_id: int) -> None:
        if request_id in self._queue:
            self._queue.remove(request_id)

    def _rank(self, request_id: int) -> tuple[int, float, int]:
        queued = self.books.life(request_id).queued
        return queued.priority, queued.t_arrival, request_id
