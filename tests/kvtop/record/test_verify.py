"""verify passes what is whole and fails what is not, event by event."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine import events as ev
from kvtop.record.recorder import Recorder
from kvtop.record.redact import Redactor
from kvtop.record.verify import MOST_VIOLATIONS, verify, verify_batches
from kvtop.state.dashboard import DashboardState
from tests.kvtop.streams import Storm, rich_stream


def renumbered(batches: list[ev.StepBatch]) -> list[ev.StepBatch]:
    """As if nothing had been taken out: empty batches dropped, seq and first_event contiguous."""
    out: list[ev.StepBatch] = []
    total = 0
    for batch in batches:
        if batch.events:
            out.append(replace(batch, seq=len(out), first_event=total))
            total += len(batch.events)
    return out


def without(batches: list[ev.StepBatch], at: int, place: int) -> list[ev.StepBatch]:
    """The same stream with one event taken out."""
    events = batches[at].events
    cut = replace(batches[at], events=events[:place] + events[place + 1 :])
    return [*batches[:at], cut, *batches[at + 1 :]]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(30))
def test_every_storm_verifies(seed: int, ahead: int) -> None:
    storm = Storm(seed, vocab=2 if seed % 3 == 0 else 60, ahead=ahead)
    for _ in range(250):
        storm.act()
    storm.drain()
    report = verify_batches(storm.stop())
    assert report.violations == []
    assert report.ok
    assert report.snapshots > 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_storms_over_every_policy_verify_and_the_state_keeps_their_queue(seed: int, ahead: int) -> None:
    knobs = {"long_prefill_token_threshold": 5, "watermark": 0.2, "scheduling_policy": "priority"}
    storm = Storm(seed, ahead=ahead, **knobs)
    state = DashboardState(strict=True)
    storm._sink = state.apply
    for batch in storm.batches:
        state.apply(batch)
    for _ in range(200):
        storm.act()
        storm.core.snapshot()  # a strict state compares
        assert state.requests.waiting == [q.request_id for q in storm.core.scheduler.waiting]
        assert state.requests.running == [q.request_id for q in storm.core.scheduler.running]
    storm.drain()
    assert verify_batches(storm.stop()).violations == []
    assert 0 <= state.requests.tokens_back <= state.requests.tokens_lost


def test_what_beams_publish_as_they_move_is_not_taken_back_with_a_later_step() -> None:
    """It is reported before their tokens, as what the next step publishes would be; but it is written."""
    storm = Storm(1, num_blocks=60, block_size=2)
    storm.submit([5 + i for i in range(17)], max_tokens=5, beam_width=2)
    storm.core.step()
    storm.core.step()  # the block of the prompt's last token is full now, and stored
    assert storm.core.reset_prefix_cache(reset_running=True)
    storm._fail = "before"
    storm.core.step()
    report = verify_batches(storm.stop())
    assert report.violations == []


@pytest.mark.parametrize("redact", [False, True])
def test_a_recording_verifies_from_its_file(tmp_path: Path, redact: bool) -> None:
    batches = rich_stream()
    recorder = Recorder(tmp_path / "a.jsonl.gz", redact)
    for batch in batches:
        recorder(batch)
    recorder.close()
    report = verify(tmp_path / "a.jsonl.gz")
    assert report.violations == []
    assert report.batches == len(batches)
    assert bool(report.notes) == redact
    reported = json.loads(json.dumps(report.as_dict()))
    assert reported["ok"] is True
    assert reported["snapshots"] == sum(isinstance(b.events[-1], ev.PoolSnapshot) for b in batches)


@pytest.mark.parametrize("ahead", [0, 1])
def test_any_one_event_taken_out_is_noticed(ahead: int) -> None:
    batches = rich_stream(60, ahead=ahead)
    for at, batch in enumerate(batches):
        for place, e in enumerate(batch.events):
            assert not verify_batches(without(batches, at, place)).ok, f"{type(e).__name__} in batch {at}"


UNNOTICED = {"ModelLoading", "PoolSnapshot", "AdmissionBlocked", "DeviceSample"}
"""What no other event of a stream implies: progress and samples, key-frames but the closing one, and the
scheduler's word that it would not admit."""


@pytest.mark.parametrize(("redacted", "ahead"), [(False, 0), (True, 0), (False, 1)])
def test_a_missing_event_is_noticed_even_after_renumbering(redacted: bool, ahead: int) -> None:
    batches = rich_stream(110, ahead=ahead)
    if redacted:
        redactor = Redactor()
        batches = [redactor(b) for b in batches]
    missed: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    state = DashboardState(strict=True)
    for at, batch in enumerate(batches):
        cleared = state.moments.total
        state.apply(batch)
        new = list(state.moments)[len(state.moments) - (state.moments.total - cleared) :]
        cleared_nothing = any(m.kind == "cleared" and not m.ids for m in new)
        for place, e in enumerate(batch.events):
            if isinstance(e, ev.CacheCleared) and cleared_nothing:
                continue  # nothing followed from it
            seen[type(e).__name__] += 1
            if verify_batches(renumbered(without(batches, at, place))).ok:
                missed[type(e).__name__] += 1
    allowed = UNNOTICED | ({"TokenPieces"} if redacted else set())
    assert set(missed) <= allowed, missed
    assert len(seen) >= 18, "the stream is not rich enough"
    closing = sum(isinstance(b.events[-1], ev.PoolSnapshot) for b in batches) - 1
    assert missed["PoolSnapshot"] == closing, "all but the closing one are implied"


def test_two_batches_swapped_or_one_lost_is_noticed() -> None:
    batches = rich_stream(60)
    for at in range(3, len(batches) - 3, 7):
        lost = [*batches[:at], *batches[at + 1 :]]
        swapped = [*batches[:at], batches[at + 1], batches[at], *batches[at + 2 :]]
        assert not verify_batches(lost).ok
        assert not verify_batches(swapped).ok


def test_a_truncated_recording_says_so() -> None:
    batches = rich_stream(30)
    report = verify_batches(batches[:-1])
    assert any("truncated" in v for v in report.violations)
    *rest, end = batches
    while isinstance(rest[-1].events[-1], ev.PoolSnapshot):
        rest.pop()
    report = verify_batches(renumbered([*rest, end]))
    assert any("closing PoolSnapshot" in v for v in report.violations)
    assert not verify_batches([]).ok


def test_damage_inside_a_file_is_a_violation_with_its_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.jsonl")
    for batch in rich_stream(30):
        recorder(batch)
    recorder.close()
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    lines[7] = lines[7][: len(lines[7]) // 2] + b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    report = verify(tmp_path / "a.jsonl")
    assert not report.ok
    assert any("line 8" in v for v in report.violations)


def tampered(batches: list[ev.StepBatch], kind: type, **fields: Any) -> list[ev.StepBatch]:
    """The last event of a kind with other values; callables get the old value."""
    at, place = max((i, j) for i, b in enumerate(batches) for j, e in enumerate(b.events) if type(e) is kind)
    event = batches[at].events[place]
    new = {k: v(getattr(event, k)) if callable(v) else v for k, v in fields.items()}
    events = batches[at].events[:]
    events[place] = replace(event, **new)
    return [*batches[:at], replace(batches[at], events=events), *batches[at + 1 :]]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ev.BlocksStored, {"hashes": lambda h: ["0" * 32, *h[1:]]}),
        (ev.BlocksStored, {"token_ids": lambda t: [t[0] + 1, *t[1:]]}),
        (ev.BlocksStored, {"parent": "0" * 32}),
        (ev.StepCompleted, {"free": lambda n: n + 1, "active": lambda n: n - 1}),
        (ev.StepCompleted, {"queues": {"running": 9, "waiting": 0, "preempted": 0}}),
        (ev.StepCompleted, {"overrun": 10**6}),
        (ev.TokensSampled, {"num_computed": lambda c: [c[0] + 1, *c[1:]]}),
        (ev.PrefixLookup, {"hit_blocks": lambda n: n + 1, "hit_tokens": lambda n: n + 4}),
        (ev.RequestFinished, {"usage": lambda u: replace(u, cached_tokens=u.cached_tokens + 1)}),
        (ev.RequestFinished, {"usage": lambda u: replace(u, cache_write_tokens=u.cache_write_tokens + 1)}),
        (ev.RequestQueued, {"prompt_token_ids": lambda t: [*t[:-1], (t[-1] + 1) % 60]}),
        (ev.RequestQueued, {"salt": "0" * 32}),
        (ev.PoolSnapshot, {"queue": lambda q: [q[0], q[1] - 1, *q[2:]] if q[1] > 1 else q[2:]}),
        (ev.EngineStarted, {"hash_seed": 12345}),
        (ev.EngineStarted, {"num_blocks": 1 << 40}),
    ],
)
def test_a_changed_figure_is_noticed(kind: type, fields: dict[str, Any]) -> None:
    batches = rich_stream(127)
    assert verify_batches(batches).ok
    assert not verify_batches(tampered(batches, kind, **fields)).ok


def test_violations_are_bounded_and_name_their_batch() -> None:
    batches = rich_stream()
    report = verify_batches([b for i, b in enumerate(batches) if i % 3])
    assert len(report.violations) == MOST_VIOLATIONS < report.found == report.as_dict()["found"]
    assert all(v.startswith(("batch ", "request", "truncated", "no closing")) for v in report.violations)
    lines = report.lines()
    assert lines[:5] == report.violations[:5] and len(lines) == 7
    assert lines[5].startswith(f"… and {report.found - 5:,} more")
    assert lines[6].startswith(f"{report.found:,} violations: ")


def test_few_violations_are_all_told() -> None:
    report = verify_batches(rich_stream()[:-1])
    assert report.lines()[:-1] == report.violations and 0 < report.found == len(report.violations) <= 5
