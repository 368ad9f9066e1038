"""Recording and reading: what comes back is what went in; whatever is wrong is one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from engine import events as ev
from kvtop import __version__
from kvtop.record.recorder import Recorder
from kvtop.record.recording import RecordingError, read
from kvtop.record.verify import verify
from kvtop.sources import RecordingSource
from kvtop.state.dashboard import DashboardState
from tests.kvtop.streams import rich_stream


def record(path: Path, batches: list[ev.StepBatch], **options: Any) -> Recorder:
    recorder = Recorder(path, **options)
    for batch in batches:
        recorder(batch)
    recorder.close()
    return recorder


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_comes_back_is_what_went_in(tmp_path: Path, name: str) -> None:
    batches = rich_stream()
    recorder = record(tmp_path / name, batches)
    assert recorder.failed is None
    assert recorder.batches == len(batches)
    assert list(read(tmp_path / name)) == batches


def test_the_format_is_the_pinned_one(tmp_path: Path) -> None:
    record(tmp_path / "a.jsonl", rich_stream())
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines()
    assert json.loads(lines[0]) == {"kvtop": __version__, "schema": ev.SCHEMA}
    first = json.loads(lines[1])
    assert list(first) == ["seq", "t", "step", "first_event", "events"]
    assert lines[1].split(b'"events":[')[1].startswith(b'{"type":"ModelLoading"')
    started = json.loads(lines[2])["events"][0]
    assert next(iter(started)) == "type"
    last, end = json.loads(lines[-2]), json.loads(lines[-1])
    assert last["events"][-1]["type"] == "PoolSnapshot"
    assert end["events"][-1]["type"] == "EngineStopped"


def test_it_asks_for_a_key_frame_every_five_seconds_in_which_something_changed(tmp_path: Path) -> None:
    asked: list[float] = []
    now = 0.0
    recorder = Recorder(tmp_path / "a.jsonl", request_snapshot=lambda: asked.append(now))
    done = threading.Event()
    for i in range(41):
        now = i * 0.5
        busy = now < 12
        event = ev.BlocksAllocated(1, [i + 1]) if busy else ev.DeviceSample(util=1.0)
        recorder(ev.StepBatch(i, now, 0, i, [event]))
        until = time.monotonic() + 5
        while recorder.batches < i + 1 and time.monotonic() < until:
            done.wait(0.001)
    recorder.close()
    assert asked == [5.0, 10.0, 15.0], "the last change came at 11.5; nothing new after it"


def test_a_slow_disk_never_slows_the_engine(tmp_path: Path) -> None:
    problems: list[str] = []
    recorder = Recorder(tmp_path / "a.jsonl", on_problem=problems.append, capacity=50)
    gate = threading.Event()
    recorder._write = lambda batches: gate.wait()  # type: ignore[method-assign, assignment]
    start = time.perf_counter()
    for batch in rich_stream():
        recorder(batch)
    assert time.perf_counter() - start < 5
    assert len(problems) == 1
    assert "too slow" in problems[0]
    gate.set()
    recorder.close()


def test_a_full_disk_is_told_once_in_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    problems: list[str] = []
    recorder = object.__new__(Recorder)
    with pytest.raises(RecordingError, match="cannot be written: No space left"):
        recorder.__init__("/dev/full", on_problem=problems.append)  # type: ignore[misc]


def test_a_disk_that_fills_later_ends_the_recording_not_the_engine(tmp_path: Path) -> None:
    problems: list[str] = []
    recorder = Recorder(tmp_path / "a.jsonl", on_problem=problems.append)
    recorder._raw.close()
    recorder._raw = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for batch in rich_stream():
        recorder(batch)
    recorder.close()
    assert problems == [recorder.failed]
    assert "No space left" in problems[0]
    assert len(problems[0]) <= 200


@pytest.mark.parametrize("path", ["missing/a.jsonl", "."])
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(RecordingError, match="cannot be written") as info:
        Recorder(tmp_path / path)
    assert "\n" not in str(info.value)


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record(path, rich_stream(20))
    before = path.read_bytes()
    with pytest.raises(RecordingError) as info:
        Recorder(path)
    assert str(info.value) == "a.jsonl: exists already; record to another name, or remove it first"
    assert path.read_bytes() == before
    (tmp_path / "b.jsonl").symlink_to(path)
    with pytest.raises(RecordingError, match="exists already"):
        Recorder(tmp_path / "b.jsonl")
    assert path.read_bytes() == before


def test_two_recorders_never_write_one_file_and_a_crash_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()  # as mktemp leaves it
    first = Recorder(path)
    with pytest.raises(RecordingError, match=r"a.jsonl: (exists already|is being written by another kvtop)"):
        Recorder(path)
    for batch in rich_stream(20):
        first(batch)
    first.close()
    assert verify(path).ok
    crash = "import os; from kvtop.record.recorder import Recorder; Recorder('b.jsonl'); os._exit(1)"
    subprocess.run([sys.executable, "-c", crash], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    with pytest.raises(RecordingError, match="exists already"):
        Recorder(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"")
    record(tmp_path / "b.jsonl", rich_stream(20))
    assert verify(tmp_path / "b.jsonl").ok


def test_a_fifo_and_an_open_descriptor_may_be_recorded_to(tmp_path: Path) -> None:
    batches = rich_stream(20)
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    record(tmp_path / "pipe", batches)
    reader.join(10)
    (tmp_path / "a.jsonl").write_bytes(got[0])
    assert list(read(tmp_path / "a.jsonl")) == batches
    with (tmp_path / "b.jsonl").open("wb") as file:
        record(Path(f"/dev/fd/{file.fileno()}"), batches)
    assert list(read(tmp_path / "b.jsonl")) == batches
    assert (tmp_path / "pipe").exists()


def test_a_recording_of_an_engine_that_never_started_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record(path, rich_stream(20)[:1])
    assert not path.exists()


# ------------------------------------------------------------------------------------- redaction


def test_a_redacted_recording_says_nothing_and_still_replays(tmp_path: Path) -> None:
    batches = rich_stream()
    record(tmp_path / "plain.jsonl", batches)
    record(tmp_path / "a.jsonl", batches, redact=True)
    plain, private = DashboardState(strict=True), DashboardState(strict=True)
    hashes = set()
    for a, b in zip(read(tmp_path / "plain.jsonl"), read(tmp_path / "a.jsonl"), strict=True):
        plain.apply(a)
        private.apply(b)
        assert plain.pool.ref.tolist() == private.pool.ref.tolist()
        assert plain.pool.next_out(99) == private.pool.next_out(99)
        assert plain.pool.hashed.tolist() == private.pool.hashed.tolist()
        for e in b.events:
            for name in ("prompt_token_ids", "token_ids"):
                assert not getattr(e, name, [])
            if isinstance(e, ev.TokensSampled):
                assert not any(e.text)
            if isinstance(e, ev.TokenPieces):
                assert not e.ids
                assert not e.bytes
            if isinstance(e, ev.EngineStarted):
                assert e.hash_seed is None
                assert "text" not in e.capabilities
            hashes.update(getattr(e, "hashes", []))
    mine = {h for b in batches for e in b.events for h in getattr(e, "hashes", [])}
    assert len(hashes) == len(mine)
    assert not hashes & mine
    for i in plain.requests:
        view = plain.requests[i]
        other = private.requests[i]
        assert other.prompt_tokens == view.prompt_tokens
        assert other.num_output == view.num_output
        assert not other.text


def test_two_redacted_recordings_cannot_be_joined(tmp_path: Path) -> None:
    batches = rich_stream()
    stored = []
    for name in ("a.jsonl", "b.jsonl"):
        record(tmp_path / name, batches, redact=True)
        stored.append({h for b in read(tmp_path / name) for e in b.events for h in getattr(e, "hashes", [])})
    assert not stored[0] & stored[1]


# --------------------------------------------------------------------------------------- reading


def broken(tmp_path: Path, data: bytes, name: str = "a.jsonl") -> str:
    """The one line that reading `data` gives."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RecordingError) as info:
        list(read(path))
    text = str(info.value)
    assert "\n" not in text
    assert len(text) <= 200
    return text


HEADER = b'{"kvtop":"0.1.0","schema":1}\n'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"hello\n", "not a kvtop recording"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not a kvtop recording"),
        (b'{"schema":1}\n', "not a kvtop recording"),
        (b'{"kvtop":"9.0","schema":99}\n', "reads up to schema 1: update it"),
        (HEADER + b"garbage\n", "line 2"),
        (HEADER + b'{"seq":0,"t":0.0,"step":0,"first_event":0,"events":[]}\n{"seq":1', "line 3: is cut off"),
        (
            HEADER + b'{"seq":0,"t":0,"step":0,"first_event":0,"events":[{"type":"BlocksAllocated"}]}\n',
            "line 2",
        ),
        (HEADER + b'{"seq":0,"t":0,"step":0,"first_event":0,"events":[{"no":1}]}\n', "line 2"),
        (HEADER + b'{"seq":' + b"9" * 400 + b"}\n", "line 2"),
        (HEADER + b"[" * 100_000 + b"\n", "line 2"),
        (HEADER + b"\xff\xfe\n", "line 2"),
    ],
)
def test_a_bad_file_is_one_line_with_its_line_number(tmp_path: Path, data: bytes, says: str) -> None:
    assert says in broken(tmp_path, data)


def test_a_truncated_or_damaged_gzip_file_is_one_line(tmp_path: Path) -> None:
    record(tmp_path / "a.jsonl.gz", rich_stream())
    data = (tmp_path / "a.jsonl.gz").read_bytes()
    assert "ends too early" in broken(tmp_path, data[: len(data) // 2], "b.gz")
    spoiled = bytearray(data)
    spoiled[len(data) // 2] ^= 0xFF
    assert "line" in broken(tmp_path, bytes(spoiled), "c.gz")
    assert "line" in broken(tmp_path, data[:-8] + bytes(8), "d.gz"), "a wrong checksum is damage too"


def test_of_a_gzip_file_that_was_not_closed_every_whole_line_is_read(tmp_path: Path) -> None:
    batches = rich_stream()
    record(tmp_path / "a.jsonl.gz", batches)
    data = (tmp_path / "a.jsonl.gz").read_bytes()
    cut = tmp_path / "b.gz"
    for end in (len(data) // 2, len(data) - 9, len(data) - 1):
        cut.write_bytes(data[:end])
        got: list[ev.StepBatch] = []
        with pytest.raises(RecordingError, match=r"line [\d,]+: the compressed file ends too early"):
            got.extend(read(cut))
        whole = zlib.decompressobj(31).decompress(data[:end]).count(b"\n") - 1
        assert got == batches[:whole]
        assert whole > len(batches) // 4
    cut.write_bytes(data[: len(data) // 2])
    report = verify(cut)
    assert not report.ok
    assert any("truncated" in line for line in report.violations)
    assert RecordingSource(cut).problem
    cut.write_bytes(data + bytes(512))
    assert list(read(cut)) == batches, "padding is no damage"


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RecordingError) as info:
            list(read(path))
        assert "\n" not in str(info.value)


def test_the_name_decides_nothing_about_reading(tmp_path: Path) -> None:
    batches = rich_stream()
    record(tmp_path / "a.jsonl.gz", batches)
    (tmp_path / "a.jsonl.gz").rename(tmp_path / "b.jsonl")
    assert list(read(tmp_path / "b.jsonl")) == batches
    record(tmp_path / "c.jsonl", batches)
    with gzip.open(tmp_path / "d", "wb") as file:
        file.write((tmp_path / "c.jsonl").read_bytes())
    assert list(read(tmp_path / "d")) == batches


@pytest.mark.conformance(98)
def test_unknown_events_of_a_newer_minor_version_are_kept_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        HEADER + b'{"seq":0,"t":0.5,"step":0,"first_event":0,"events":[{"type":"New","x":{"y":[1]}}]}\n'
    )
    (batch,) = read(path)
    assert batch.events == [ev.UnknownEvent("New")]
