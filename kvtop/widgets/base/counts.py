"""Counts of requests that more than one place on the screen shows, each counted once and in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class QueueCounts(NamedTuple):
    """A request is in exactly one of these, or finished."""

    running: int
    waiting: int
    """Never admitted yet; with the prompts that have not arrived at the engine."""
    preempted: int
    """Admitted before, and waiting to start over."""


def queue_counts(state: DashboardState, held: int) -> QueueCounts:
    """held: prompts that were sent and have not arrived."""
    requests = state.requests
    preempted = sum(requests[i].phase == "preempted" for i in requests.waiting)
    return QueueCounts(len(requests.running), len(requests.waiting) - preempted + held, preempted)
