"""Every part of the state: a copy has every field, shares nothing that is written later, and goes on alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from engine import events as ev
from kvtop.state.dashboard import PARTS, DashboardState
from kvtop.state.part import Copied, Part
from kvtop.state.request_view import RequestView
from tests.kvtop.streams import rich_stream

EVENTS = [
    ev.DeviceSample(50.0, 1 << 30, 1 << 34, 70.0),
    ev.KernelsProfiled(4, 1, ["attention"], [2], [0.01], [100], [200], 0.02),
    ev.GraphCaptured(4, 1, 0.2),
    ev.EngineError("one request failed", 1),
    ev.HitAudited(1, [1, 2], [2], 0.5, 0.1),
    ev.UnknownEvent("Teleported"),
]
"""Those that a storm of the core does not make."""


def stream() -> list[ev.StepBatch]:
    """Every type of event, in the first half and in the second."""
    batches, events = [], 0
    for batch in rich_stream(500):
        more = EVENTS if batch.seq % 50 == 20 else []
        batches.append(msgspec.structs.replace(batch, first_event=events, events=[*more, *batch.events]))
        events += len(batches[-1].events)
    return batches


def image(value: Any) -> Any:
    """All that a value holds, by reflection over every field, as plain text and tuples that can be compared."""
    if isinstance(value, Copied):
        fields = {name for c in type(value).__mro__ for name in getattr(c, "__slots__", ())}
        assert not hasattr(value, "__dict__"), f"{type(value).__name__} has fields outside its slots"
        return (type(value).__name__, *((name, image(getattr(value, name))) for name in sorted(fields)))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return tuple((key, image(item)) for key, item in value.items())
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, tuple(image(item) for item in value)
    return repr(value)


def written(value: Any, path: str, found: dict[int, str]) -> dict[int, str]:
    """id -> path of everything that can be written in place, but for events and rows that are finished."""
    if isinstance(value, Copied):
        if isinstance(value, RequestView) and value.done:
            return found
        found[id(value)] = path
        for name in value.FIELDS:
            if name not in value.SHARED:
                written(getattr(value, name), f"{path}.{name}", found)
    elif isinstance(value, list | dict | set | deque | np.ndarray):
        found[id(value)] = path
        for item in (
            value.values() if isinstance(value, dict) else () if isinstance(value, np.ndarray) else value
        ):
            written(item, f"{path}[]", found)
    return found


@pytest.fixture(scope="module")
def batches() -> list[ev.StepBatch]:
    return stream()


def applied(batches: list[ev.StepBatch]) -> DashboardState:
    state = DashboardState()
    for batch in batches:
        state.apply(batch)
    return state


def test_the_stream_has_every_event_that_a_part_takes(batches: list[ev.StepBatch]) -> None:
    half = len(batches) // 2
    for part in (batches[:half], batches[half:]):
        seen = {type(e) for b in part for e in b.events}
        once = {ev.ModelLoading, ev.EngineStarted, ev.EngineStopped, ev.TokenLogprobs, ev.TokenPieces}
        assert set(ev.ALL_EVENTS) - seen <= once


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("at", [0.02, 0.3, 0.5, 0.8])
def test_a_copy_of_every_part_goes_on_alone_and_to_the_same_end(
    name: str, at: float, batches: list[ev.StepBatch]
) -> None:
    middle = int(len(batches) * at)
    state = applied(batches[:middle])
    copy = state.copy()
    then = image(getattr(copy, name))
    assert image(getattr(state, name)) == then, "the copy is another from the start"
    for batch in batches[middle:]:
        state.apply(batch)
    assert image(getattr(copy, name)) == then, "the original wrote into its copy"
    end = image(getattr(state, name))
    for batch in batches[middle:]:
        copy.apply(batch)
    assert image(getattr(copy, name)) == end, "the copy came to another end"
    assert image(getattr(state, name)) == end, "the copy wrote into its original"


@pytest.mark.parametrize("at", [0.3, 0.5, 0.8])
def test_a_copy_shares_nothing_that_is_written(at: float, batches: list[ev.StepBatch]) -> None:
    state = applied(batches[: int(len(batches) * at)])
    for name in PARTS:
        mine = written(getattr(state, name), name, {})
        theirs = written(getattr(state.copy(), name), name, {})
        assert not [mine[i] for i in mine.keys() & theirs.keys()]


def test_a_state_is_its_parts_and_each_event_has_one_that_takes_it() -> None:
    state = DashboardState()
    own = {name for name in DashboardState.__slots__ if isinstance(getattr(state, name), Part)}
    assert own == set(PARTS)
    taken = {e for name in PARTS for e in getattr(state, name).handlers}
    assert taken == set(ev.ALL_EVENTS)


def test_a_field_of_a_later_version_is_copied_too() -> None:
    class Extended(Part):
        __slots__ = ("ids", "inner", "rows")

        def __init__(self) -> None:
            self.ids, self.rows, self.inner = [1], {1: [2]}, DashboardState().series

    part = Extended()
    copy = part.copy()
    part.ids.append(2)
    part.rows[1].append(3)
    part.inner.output.add(1.0, 5)
    assert (copy.ids, copy.rows, copy.inner.output.total) == ([1], {1: [2]}, 0.0)


def test_the_handlers_of_a_copy_are_its_own(batches: list[ev.StepBatch]) -> None:
    """After a copy and after restore events reach the parts that are there now."""
    state = applied(batches[:100])
    other = DashboardState()
    other.restore(state)
    for batch in batches[100:]:
        other.apply(batch)
    assert state.seq == 99 and other.seq == batches[-1].seq
    assert other.generation > state.generation
