"""Sources: live batches arrive once and in order; a recording is exact wherever one seeks."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine import events as ev
from kvtop.record.recorder import Recorder
from kvtop.record.recording import RecordingError
from kvtop.sources import LiveSource, RecordingSource, Source
from kvtop.sources import recording as module
from kvtop.state.dashboard import DashboardState
from tests.kvtop.state.test_state import fingerprint
from tests.kvtop.streams import rich_stream


class Wall:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.t = 100.0

    def __call__(self) -> float:
        return self.t


def stretched(acts: int = 150) -> list[ev.StepBatch]:
    """A rich stream whose batches are 0.1 s apart, so that it is worth key-frames."""
    return [replace(b, t=1.0 + i * 0.1) for i, b in enumerate(rich_stream(acts))]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[ev.StepBatch]]:
    batches = stretched()
    recorder = Recorder(tmp_path / "a.jsonl.gz")
    for batch in batches:
        recorder(batch)
    recorder.close()
    return tmp_path / "a.jsonl.gz", batches


def straight(batches: list[ev.StepBatch], t: float) -> str:
    """What a replay up to t must show."""
    state = DashboardState(strict=True)
    for batch in batches:
        if batch.t <= t:
            state.apply(batch)
    return fingerprint(state)


def opened(path: Path) -> tuple[RecordingSource, DashboardState, Wall]:
    wall = Wall()
    source, state = RecordingSource(path, wall=wall), DashboardState(strict=True)
    source.attach(state)
    return source, state, wall


def pump(source: RecordingSource, state: DashboardState) -> int:
    batches = source.drain()
    for batch in batches:
        state.apply(batch)
    return len(batches)


def test_it_plays_at_the_recorded_pace(recorded: Any) -> None:
    path, batches = recorded
    source, state, wall = opened(path)
    pump(source, state)
    begin = next(b.t for b in batches if not isinstance(b.events[0], ev.ModelLoading))
    assert state.t == begin == source.t, "loading is not waited for"
    for elapsed in (0.05, 0.35, 2.0, 5.0):
        wall.t = 100.0 + elapsed
        pump(source, state)
        assert fingerprint(state) == straight(batches, begin + elapsed)
    wall.t += 1000
    while pump(source, state):
        pass
    assert source.ended
    assert source.paused
    assert fingerprint(state) == straight(batches, 1e9)


def test_it_can_begin_later(recorded: Any) -> None:
    path, batches = recorded
    wall = Wall()
    source = RecordingSource(path, wall=wall)
    source.start_at(6.0)
    wall.t += 50
    state = DashboardState(strict=True)
    source.attach(state)
    assert state.stream.num_batches == 0 and "LOADING 0 %" in source.place, "nothing is waited for"
    while source.loading:
        assert source.drain() == []
    assert fingerprint(state) == straight(batches, 6.0)
    pump(source, state)
    wall.t += 1
    pump(source, state)
    assert fingerprint(state) == straight(batches, 7.0)


def unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordingSource, DashboardState]:
    """A recording of which only the first batches are in the index, as with a large file."""
    monkeypatch.setattr("kvtop.sources.index.CHECKED_BATCHES", 10)
    monkeypatch.setattr(module, "OPEN_S", 0.0)
    monkeypatch.setattr(module, "SEEK_S", 0.0)
    source, state = RecordingSource(path), DashboardState(strict=True)
    source.attach(state)
    assert not source._index.whole and source.loading is not None and not source.ended
    return source, state


def test_a_large_file_is_read_after_the_first_frame_and_jumps_wait_for_it(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batches = recorded
    source, state = unread(path, monkeypatch)
    assert "READING" in source.place and "/" not in source.place, "nobody knows yet how long it is"
    source.start_at(6.0)
    source.seek(source.t + 2.0)
    source.step(3)
    source.step(-1)
    said = []
    while source.loading is not None:
        said.append(source.loading.badge)
        assert source.drain() == []
    assert [word.split()[0] for word in said] == sorted((w.split()[0] for w in said), reverse=True)
    assert "LOADING 0 %" in said
    applied = sum(b.t <= 8.0 for b in batches) + 2
    assert state.stream.num_batches == applied and source.paused
    assert fingerprint(state) == straight(batches, batches[applied - 1].t)
    source.seek(1e9, wait=True)
    assert source.ended and source.duration == batches[-1].t


def test_waiting_for_a_seek_reads_the_rest_of_the_file(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batches = recorded
    source, state = unread(path, monkeypatch)
    source.seek(1e9, wait=True)
    assert source.loading is None and source.ended
    assert fingerprint(state) == straight(batches, 1e9)


def test_damage_that_is_found_while_reading_on_ends_the_recording_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "a.jsonl")
    for batch in stretched():
        recorder(batch)
    recorder.close()
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    for name, bad in (
        ("garbage", b"garbage\n"),
        ("claim", b'{"seq":-1,"t":1.0,"step":0,"first_event":0,"events":[]}\n'),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"".join([*lines[:100], bad, *lines[101:]]))
        source, state = unread(path, monkeypatch)
        while source.loading is not None:
            source.drain()
        assert source.problem is not None and "line 101" in source.problem
        source.seek(1e9, wait=True)
        assert state.stream.num_batches == 99 and source.ended


def test_what_a_source_can_do_is_in_its_type() -> None:
    live: Source = LiveSource(FakeEngine())  # type: ignore[arg-type]
    assert live.transport is None and live.loading is None and live.problem is None and live.place == ""


def test_speed_pause_and_step(recorded: Any) -> None:
    path, batches = recorded
    source, state, wall = opened(path)
    pump(source, state)
    begin = state.t
    source.change_speed(1)
    assert source.speed == 2.0
    wall.t += 1
    pump(source, state)
    assert fingerprint(state) == straight(batches, begin + 2.0)
    source.toggle()
    wall.t += 10
    assert pump(source, state) == 0
    at = state.stream.num_batches
    source.step()
    assert state.stream.num_batches == at + 1
    source.step(-1)
    source.step(-1)
    assert state.stream.num_batches == at - 1
    assert fingerprint(state) == straight(batches, batches[at - 2].t)
    source.toggle()
    wall.t += 0.5
    pump(source, state)
    assert state.stream.num_batches > at - 1
    assert "×2" in source.place


def test_seeking_is_exact_from_anywhere_to_anywhere(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_BATCHES", 10)
    path, batches = recorded
    source, state, wall = opened(path)
    r = random.Random(4)
    for _ in range(60):
        wall.t += r.random() * 0.5
        pump(source, state)
        choice = r.random()
        if choice < 0.7:
            t = r.uniform(0, batches[-1].t + 1)
            source.seek(t, wait=True)
            assert fingerprint(state) == straight(batches, max(t, batches[0].t))
            assert abs(source.t - min(max(t, batches[0].t), batches[-1].t)) < 1e-9
        elif choice < 0.9:
            source.step(r.choice([-3, -1, 1, 2]))
        else:
            source.toggle()
        assert fingerprint(state) == straight(batches, batches[max(0, state.stream.num_batches - 1)].t)
    assert len(source._frames) > 5


def test_a_long_seek_goes_on_in_the_background(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEEK_S", 0.0)
    path, batches = recorded
    source, state, _ = opened(path)
    source.pause()
    source.seek(batches[-1].t)
    assert "LOADING" in source.place
    rounds = 0
    while "LOADING" in source.place:
        assert source.drain() == []
        rounds += 1
    assert rounds > 2
    assert fingerprint(state) == straight(batches, batches[-1].t)


def test_playing_again_after_the_end_starts_over(recorded: Any) -> None:
    path, _ = recorded
    source, state, _ = opened(path)
    source.seek(1e9, wait=True)
    pump(source, state)
    assert source.paused
    source.play()
    assert state.t < 2.0
    assert not source.paused


def test_key_frames_are_bounded_and_stay_evenly_apart(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_BATCHES", 1)
    monkeypatch.setattr(module, "MOST_FRAMES", 20)
    path, batches = recorded
    source, state, _ = opened(path)
    source.seek(1e9, wait=True)
    places = [at for at, _ in source._frames]
    assert 8 <= len(places) <= 20
    gaps = {b - a for a, b in pairwise(places)}
    assert max(gaps) <= 2 * min(gaps)
    source.seek(batches[len(batches) // 2].t, wait=True)
    assert fingerprint(state) == straight(batches, batches[len(batches) // 2].t)
    monkeypatch.setattr(module, "FRAME_MEMORY", 1)
    source, _, _ = opened(path)
    source.seek(1e9, wait=True)
    assert len(source._frames) <= 4


def test_a_damaged_recording_is_played_up_to_the_damage(tmp_path: Path) -> None:
    batches = stretched(40)
    recorder = Recorder(tmp_path / "a.jsonl")
    for batch in batches:
        recorder(batch)
    recorder.close()
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_bytes(b"".join([*lines[:20], b"garbage\n", *lines[21:]]))
    source, state, _ = opened(tmp_path / "b.jsonl")
    source.seek(1e9, wait=True)
    assert state.stream.num_batches == 19
    assert source.problem is not None
    assert "line 21" in source.problem
    assert source.ended
    (tmp_path / "c.jsonl").write_bytes(lines[0])
    with pytest.raises(RecordingError, match="holds no batch"):
        RecordingSource(tmp_path / "c.jsonl")


def test_a_claim_that_cannot_be_is_refused_at_the_start_and_ends_a_playback_further_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = stretched(40)
    recorder = Recorder(tmp_path / "a.jsonl")
    for batch in batches:
        recorder(batch)
    recorder.close()
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if i >= 20 and b'"ids":[' in line)
    lines[at] = lines[at].replace(b'"ids":[', b'"ids":[99999,', 1)
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(RecordingError, match=rf"line {at + 1}: .*ids.*block 99,999 is outside the pool"):
        RecordingSource(tmp_path / "b.jsonl")
    monkeypatch.setattr("kvtop.sources.index.CHECKED_BATCHES", 5)
    source, state, _ = opened(tmp_path / "b.jsonl")
    source.seek(1e9, wait=True)
    assert state.stream.num_batches == at - 1
    assert source.problem is not None
    assert f"line {at + 1}" in source.problem


# -------------------------------------------------------------------------------------------- live


class FakeEngine:
    """As much of an engine as LiveSource needs."""

    def __init__(self) -> None:
        self.asked = 0

    def subscribe(self, sink: Any) -> None:
        self.sink = sink

    def request_snapshot(self) -> None:
        self.asked += 1


def test_a_live_source_hands_out_every_batch_once() -> None:
    engine = FakeEngine()
    source = LiveSource(engine)  # type: ignore[arg-type]
    batches = rich_stream(30)
    got = []
    for i, batch in enumerate(batches):
        engine.sink(batch)
        if i % 3 == 0:
            got += source.drain()
    assert got + source.drain() == batches
    assert source.drain() == []
    assert engine.asked == source.lost == 0


def test_an_overflow_is_counted_and_healed_by_a_snapshot() -> None:
    engine = FakeEngine()
    source = LiveSource(engine, capacity=10)  # type: ignore[arg-type]
    state, whole = DashboardState(), DashboardState()
    batches = rich_stream(150)
    for i, batch in enumerate(batches):
        engine.sink(batch)
        whole.apply(batch)
        if i < 50 or i > 70:
            for b in source.drain():
                state.apply(b)
    assert engine.asked == 1
    assert state.stream.losses == source.lost > 0
    assert state.stream.synced, "a later snapshot of the stream healed it"
    assert state.pool.ref.tolist() == whole.pool.ref.tolist()
    assert state.pool.next_out(99) == whole.pool.next_out(99)
