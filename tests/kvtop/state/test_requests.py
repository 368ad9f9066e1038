"""Requests and their branches: an event costs what it names, not what was there before it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from engine import events as ev
from kvtop.state.dashboard import DashboardState
from kvtop.state.requests.branches import Branches
from kvtop.state.requests.written import Written
from tests.kvtop.streams import Storm

LONG = 100_000
"""Tokens of a long answer: a copy of its ids takes 800 kB, a copy of its text 500 kB."""
LITTLE = 200_000
"""Bytes that one event may need during a long answer. A list that grows reserves an eighth of its length in advance."""


def started() -> DashboardState:
    state = DashboardState()
    knobs = ev.Knobs()
    events = ["blocks", "text"]
    event = ev.EngineStarted(
        *(1, "live", events, "toy", "cpu", "float32", 64, 4, 64, 0, 1, 0.0, 1 << 20, knobs)
    )
    take(state, event)
    return state


def take(state: DashboardState, *events: Any) -> None:
    state.apply(ev.StepBatch(state.seq + 1, float(state.seq + 1), 0, state.stream.num_events, list(events)))


def answering(state: DashboardState, request_id: int = 1) -> None:
    """Request and sequence have the same id."""
    queued = ev.RequestQueued(request_id, [1], 0.0, position=len(state.requests.waiting))
    take(state, queued)
    take(state, ev.RequestAdmitted(request_id, request_id, 0))


def sampled(seq_id: int, n: int) -> ev.TokensSampled:
    return ev.TokensSampled([seq_id], [7] * n, [n], [n], ["words" * n])


def cost(work: Any) -> int:
    """Most bytes in use at once while `work` runs, above those before it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_token_of_a_long_answer_copies_none_of_it() -> None:
    state = started()
    answering(state)
    take(state, sampled(1, LONG))
    view = state.requests[1]
    assert (len(view.output_ids), len(view.text)) == (LONG, 5 * LONG)
    take(state, sampled(1, LONG // 10))  # room at the end of the list of ids
    assert cost(lambda: take(state, sampled(1, 1))) < LITTLE
    assert (len(view.output_ids), view.text[-10:]) == (LONG + LONG // 10 + 1, "wordswords")


def test_a_fork_of_a_long_answer_copies_none_of_it() -> None:
    state = started()
    answering(state)
    take(state, sampled(1, LONG))
    take(state, ev.SequenceForked(1, 1, 2))

    def search() -> None:
        for i in range(3, 40):
            take(state, sampled(i - 1, 1), ev.SequenceForked(1, i - 1, i))
            take(state, ev.BeamPruned(1, i - 2))

    assert cost(search) < 40 * 5_000
    view = state.requests[1]
    assert view.seq_ids == [38, 39]
    assert [len(text) for text in view.branch_texts()] == [5 * (LONG + 37)] * 2
    assert len(view.output_ids) == LONG + 37


def test_branches_of_one_piece_grow_alone() -> None:
    first = Written()
    first.add([1, 2], "ab")
    second = first.fork()
    third = second.fork()
    first.add([3], "c")
    second.add([4], "d")
    fourth = second.fork()
    fourth.add([5], "")
    copy = fourth.copy()
    fourth.add([6], "e")
    read = [(w.ids, w.text) for w in (first, second, third, fourth, copy)]
    assert read == [
        ([1, 2, 3], "abc"),
        ([1, 2, 4], "abd"),
        ([1, 2], "ab"),
        ([1, 2, 4, 5, 6], "abde"),
        ([1, 2, 4, 5], "abd"),
    ]


class Id(int):
    """A request id that counts how often it was compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return int(self) == other


def test_a_request_that_ends_does_not_search_the_waiting_ones() -> None:
    state = started()
    running, waiting = [Id(1_000 + i) for i in range(32)], [Id(10_000 + i) for i in range(2_000)]
    for i in running:
        answering(state, i)
    take(state, *(ev.RequestQueued(i, [1], 0.0, position=at) for at, i in enumerate(waiting)))
    Id.compared = 0
    usage, timings = ev.Usage(1, 0, 1, 0, 1), ev.Timings(0.0)
    for i in reversed(running):
        take(state, ev.RequestFinished(i, "stop", timings, usage))
    assert Id.compared <= len(running) ** 2
    Id.compared = 0
    for i in waiting[:200]:
        take(state, ev.RequestAdmitted(i, i, 0))
    assert Id.compared <= 200  # each was the first of its queue
    assert state.requests.waiting == waiting[200:] and state.requests.running == waiting[:200]


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_blocks_of_branches_are_what_their_tables_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted event by event, with preemptions (seeds 0 and 5): the same as counted over the tables."""
    storm = Storm(seed, num_blocks=30, block_size=4)
    for i in range(6):
        storm.submit([1 + (i + k) % 7 for k in range(14)], 40, n=2)
        storm.submit([1 + (2 * i + k) % 7 for k in range(14)], 30, beam_width=2)
    storm.drain()
    state, checked, count = DashboardState(strict=True), 0, Branches.count_moved

    def checking(branches: Branches, rows: Any) -> None:
        nonlocal checked
        for request_id in branches._moved:
            view, held = rows[request_id], branches._held[request_id]
            tables = [state.pool.table(i) for i in view.seq_ids]
            assert (held.blocks, held.unshared) == (len(set().union(*tables)), sum(map(len, tables)))
            checked += 1
        count(branches, rows)

    monkeypatch.setattr(Branches, "count_moved", checking)
    for batch in storm.stop():
        state.apply(batch)
    assert checked > 20 and not state.requests.branches._held
    assert bool(state.requests.preemptions) == (seed != 1)
