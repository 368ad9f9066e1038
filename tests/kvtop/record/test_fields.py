"""Every field of every event: verify notices a change, or the field is listed with the reason why nobody can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from engine import events as ev
from kvtop.record.verify import verify_batches
from tests.kvtop.record.test_verify import renumbered, without
from tests.kvtop.streams import every_event

MOST = 2
"""Events of a type that are changed, spread over the stream, besides the one with most fields set."""

MEASURED = "measured; no other event says it"
NAMED = "a name; nothing follows from it"
ASKED = "a parameter of the caller, on which no other event depends"
DECIDED = "the scheduler's own decision, of which the stream has only the outcome"
BOUNDED = "only within bounds: "
UNPROVEN = {
    "ModelLoading.done": MEASURED,
    "ModelLoading.total": MEASURED,
    "ModelLoading.what": NAMED,
    "EngineStarted.schema": BOUNDED + "a newer one is refused",
    "EngineStarted.source": NAMED,
    "EngineStarted.capabilities": NAMED,
    "EngineStarted.model": NAMED,
    "EngineStarted.device": NAMED,
    "EngineStarted.dtype": NAMED,
    "EngineStarted.bytes_per_block": MEASURED,
    "EngineStarted.weights_bytes": MEASURED,
    "EngineStarted.epoch": MEASURED,
    "EngineStarted.max_model_len": BOUNDED + "no sequence is longer",
    "EngineStarted.knobs": BOUNDED + "caching, audit and the budget show in what follows",
    "EngineStopped.reason": NAMED,
    "EngineError.message": NAMED,
    "EngineError.fatal": NAMED,
    "HitAudited.error": BOUNDED + "over the tolerance exactly where blocks are bad",
    "HitAudited.tolerance": BOUNDED + "below the error exactly where blocks are bad",
    **dict.fromkeys((f"DeviceSample.{name}" for name in ev.DeviceSample.__struct_fields__), MEASURED),
    **dict.fromkeys((f"KernelsProfiled.{name}" for name in ev.KernelsProfiled.__struct_fields__), MEASURED),
    **dict.fromkeys((f"GraphCaptured.{name}" for name in ev.GraphCaptured.__struct_fields__), MEASURED),
    "RequestQueued.priority": ASKED,
    "RequestQueued.conversation": ASKED,
    "RequestQueued.spans": ASKED,
    "RequestQueued.params": BOUNDED
    + "lengths, samples, stop tokens and log probabilities show in what follows",
    "PrefixLookup.template_rewrote_history": ASKED,
    "AdmissionBlocked.need": BOUNDED + "more than is free",
    "AdmissionBlocked.free": BOUNDED + "less than is needed, and no more than the queue",
    "AdmissionBlocked.reason": DECIDED,
    "RequestFinished.error": BOUNDED + "there is one exactly where it failed",
    "TokenPieces.bytes": BOUNDED + "text shows them, of tokens that are sampled",
    "TokenLogprobs.top_ids": BOUNDED + "each once, and explained",
    "TokenLogprobs.top_logprobs": BOUNDED
    + "at most 0, falling, and the drawn token's where it is among them",
    "StepCompleted.slow": MEASURED,
    "StepCompleted.budget": BOUNDED + "no less than was computed, no more than the knob",
    "StepCompleted.overrun": BOUNDED + "what the budget leaves",
    **dict.fromkeys(
        (f"StepCompleted.{name}" for name in ("t_schedule", "t_prepare", "t_forward", "t_sample", "t_gpu")),
        MEASURED,
    ),
}
"""Event.field -> why a change of it may go unnoticed."""


def changes(value: Any, hint: Any = None) -> Iterator[Any]:
    """Other values of the same kind."""
    choices = [c for c in get_args(hint) if isinstance(c, str)]
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value - 1
    elif isinstance(value, float):
        yield value + 1000.0
        yield value - 1000.0
    elif isinstance(value, str):
        yield from (
            (c for c in choices if c != value)
            if choices
            else [("0" if value[:1] != "0" else "1") + value[1:]]
        )
    elif isinstance(value, bytes):
        yield b"?" + value
    elif isinstance(value, list) and value:
        for place in sorted({0, len(value) - 1}):
            for other in changes(value[place]):
                yield [*value[:place], other, *value[place + 1 :]]
        yield value[:-1]
    elif isinstance(value, tuple) and value:
        for place, item in enumerate(value):
            for other in changes(item):
                yield (*value[:place], other, *value[place + 1 :])
    elif isinstance(value, dict):
        for name, item in value.items():
            for other in changes(item):
                yield value | {name: other}


def fields(e: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(Event.field, the event with another value there); of a struct inside, Event.field.field."""
    hints = get_type_hints(type(e))
    for field in e.__struct_fields__:
        value = getattr(e, field)
        if isinstance(value, msgspec.Struct):
            for inner, other in fields(value, f"{name}.{field}"):
                of_knobs = isinstance(value, ev.Knobs)  # one claim: how the engine is set
                yield f"{name}.{field}" if of_knobs else inner, replace(e, **{field: other})
            continue
        for other in changes(value, hints[field]):
            yield f"{name}.{field}", replace(e, **{field: other})


def chosen(batches: list[ev.StepBatch], places: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Places of events of one type whose fields are changed."""

    def fields_set(place: tuple[int, int]) -> int:
        e = batches[place[0]].events[place[1]]
        return sum(getattr(e, name) not in (None, [], "") for name in e.__struct_fields__)

    return {max(places, key=fields_set), *places[:: max(1, len(places) // MOST)][:MOST]}


@pytest.fixture(scope="module")
def noticed() -> dict[str, list[bool]]:
    """Event.field -> of each change whether verify noticed it."""
    batches = every_event()
    assert verify_batches(batches).violations == []
    places: dict[type, list[tuple[int, int]]] = {}
    for at, batch in enumerate(batches):
        for place, e in enumerate(batch.events):
            places.setdefault(type(e), []).append((at, place))
    assert set(places) == set(ev.ALL_EVENTS)
    found: dict[str, list[bool]] = {}
    for kind, occurrences in places.items():
        for at, place in chosen(batches, occurrences):
            events = batches[at].events
            for field, other in fields(events[place], kind.__name__):
                changed = replace(batches[at], events=[*events[:place], other, *events[place + 1 :]])
                report = verify_batches([*batches[:at], changed, *batches[at + 1 :]])
                found.setdefault(field, []).append(not report.ok)
    return found


def test_every_field_is_proven_or_listed_with_a_reason(noticed: dict[str, list[bool]]) -> None:
    unnoticed = {field for field, results in noticed.items() if not all(results)}
    assert unnoticed - UNPROVEN.keys() == set()


def test_no_field_is_listed_that_is_proven(noticed: dict[str, list[bool]]) -> None:
    assert {field for field in UNPROVEN if all(noticed[field])} == set()


def test_every_field_was_changed(noticed: dict[str, list[bool]]) -> None:
    def names(kind: Any, name: str) -> Iterator[str]:
        for field, hint in get_type_hints(kind).items():
            inside = isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint is not ev.Knobs
            yield from names(hint, f"{name}.{field}") if inside else [f"{name}.{field}"]

    every = {field for kind in ev.ALL_EVENTS for field in names(kind, kind.__name__)}
    assert every - noticed.keys() == set()


NOT_MISSED = {
    "ModelLoading": "progress",
    "PoolSnapshot": "a key-frame; the closing one is missed",
    "AdmissionBlocked": "the scheduler's word that it would not admit; it changes nothing",
    "DeviceSample": "a sample",
    "KernelsProfiled": "a sample",
    "GraphCaptured": "what a device does",
}
"""Types whose events can be taken out of a stream that is numbered anew, and why that is not noticed."""


def test_an_event_that_is_cut_out_is_noticed_or_its_type_is_listed() -> None:
    batches = every_event()
    unnoticed: set[str] = set()
    for at, batch in enumerate(batches):
        for place, e in enumerate(batch.events):
            name = type(e).__name__
            if name not in unnoticed and verify_batches(renumbered(without(batches, at, place))).ok:
                unnoticed.add(name)
    assert unnoticed == NOT_MISSED.keys()
