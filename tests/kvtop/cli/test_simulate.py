"""Simulations and loads from the command line to the screen: what is printed, recorded, shown and refused."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams, Simulation, load_workload
from engine import events as ev
from kvtop.cli import program as cli
from kvtop.cli.headless import Job, run
from kvtop.cli.prompts import Prompt
from kvtop.record.pipe import Pipe
from kvtop.record.recorder import Recorder
from kvtop.record.recording import read
from kvtop.record.verify import verify
from tests.demos.toy import build
from tests.kvtop.screen import show
from tests.kvtop.streams import rich_stream

H100 = Simulation("llama-3.1-70b", "h100", "int4")
CHAT = load_workload("chat")


def answer(job: Job, asks: list[Prompt] | None = None, **more: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = io.BytesIO(), io.StringIO()
    code = run(EngineConfig(hash_seed=1), replace(job, prompts=asks or []), out=out, err=err, **more)
    return code, out.getvalue().decode(), err.getvalue()


# -------------------------------------------------------------------------------------------- headless


def test_a_load_on_a_simulated_engine_as_one_object(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    code, out, err = answer(Job(as_json=True, once=True, record=path, load=CHAT, simulation=H100))
    assert code == 0
    reported = json.loads(out)
    assert (reported["source"], reported["model"], reported["device"], reported["dtype"]) == (
        *("simulated", "llama-3.1-70b", "H100"),
        "int4",
    )
    assert len(reported["requests"]) == CHAT.requests
    assert all(r["finish_reason"] == "length" for r in reported["requests"])
    assert reported["prefix_cache"]["hit_rate"] > 0.5
    assert "llama-3.1-70b on H100 in int4" in err
    assert "5,120 KiB a block" in err
    report = verify(path)
    assert report.ok, report.violations[:3]
    assert report.snapshots > 2


def test_recorded_twice_it_is_the_same_but_for_the_date(tmp_path: Path) -> None:
    lines = []
    for name in ("a.jsonl", "b.jsonl"):
        answer(Job(as_json=True, once=True, record=tmp_path / name, load=CHAT, simulation=H100))
        lines.append((tmp_path / name).read_bytes().splitlines())
    first, again = lines
    assert len(first) == len(again)
    differ = [a for a, b in zip(first, again, strict=True) if a != b]
    assert len(differ) == 1
    assert b"EngineStarted" in differ[0], "it has the time of the start"


def test_without_json_a_load_ends_in_a_few_figures() -> None:
    code, out, _ = answer(Job(load=CHAT, simulation=H100))
    assert code == 0
    assert f"{CHAT.requests} requests in " in out
    assert "prefix cache: " in out
    assert "first token: p50 " in out


def test_a_load_on_a_live_engine_beside_prompts() -> None:
    small = replace(CHAT, streams=tuple(replace(s, requests=6) for s in CHAT.streams))
    asks = [Prompt("Who?", params=SamplingParams(max_tokens=5))]
    fast = replace(small, streams=tuple(replace(s, arrivals=_hasty(s.arrivals)) for s in small.streams))
    code, out, _ = answer(Job(as_json=True, once=True, load=fast), asks, build=build)
    assert code == 0
    reported = json.loads(out)
    assert reported["source"] == "live"
    assert len(reported["requests"]) == 7


def _hasty(arrivals: Any) -> Any:
    return replace(arrivals, think=0.0)


def test_refused_are_only_those_that_cannot_fit() -> None:
    code, out, _ = answer(
        Job(as_json=True, once=True, simulation=H100),
        [Prompt([5] * 200_000), Prompt([5] * 100, params=SamplingParams(max_tokens=2))],
    )
    assert code == 0
    assert [r["finish_reason"] for r in json.loads(out)["requests"]] == ["refused", "length"]


# -------------------------------------------------------------------------------------- command line


def invoke(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.invoke(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_of_the_issue_in_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load, recorded = tmp_path / "small.toml", tmp_path / "h.jsonl.gz"
    load.write_text("""
        [[stream]]
        requests = 20
        arrivals = { kind = "poisson", rate = 2 }
        prompts = { kind = "prefix_repetition", prefix_len = 2000, num_prefixes = 2, output_len = 20 }
    """)
    words = (
        "run --simulate llama-3.1-70b --on h100 --weights int4 --kv-cache-dtype fp8 --headless --once --json"
    )
    code, out, _ = invoke(capsys, *words.split(), "--load", str(load), "--record", str(recorded))
    assert code == 0
    reported = json.loads(out)
    assert len(reported["requests"]) == 20
    assert reported["bytes_per_block"] == 16 * 163_840
    assert reported["prefix_cache"]["hit_tokens"] >= 17 * 2000
    assert cli.invoke(["verify", str(recorded)]) == 0


@pytest.mark.parametrize("option", ["--weights", "--quantization"])
def test_either_word_for_the_weights_counts_in_a_simulation(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    words = f"run --simulate llama-3.1-8b --on h100 {option} int8 --num-blocks 12 --block-size 4"
    code, _, err = invoke(capsys, *words.split(), "--headless", "--prompt", "x", "--max-tokens", "2")
    assert code == 0
    assert err.startswith("llama-3.1-8b on H100 in int8\n")
    assert "512 KiB a block, x 12 blocks = 6 MiB, 44 tokens" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--simulate llama-3.1-70b", "--simulate needs --on DEVICE"),
        ("--on h100", "--on goes with --simulate"),
        ("--weights 35GB", "--weights goes with --simulate"),
        ("--speed 3", "--speed goes with --simulate"),
        ("--simulate llama-3.1-70b --on h100 --model x", "leave out --model"),
        ("--simulate llama-3.1-70b --on h100", "does not fit on H100"),
        ("--simulate llama-3.1-70b --on h100 --weights 35GB", "--weights 35GB: one of bf16, fp8, int8, int4"),
        ("--simulate llama-3.1-7b --on h100", "did you mean llama-3.1-70b"),
        ("--simulate llama-3.1-8b --on h10", "no device 'h10'"),
        ("--simulate llama-3.1-8b --on h100 --speed 0", "--speed must be over 0"),
        ("--load hours", "no such load; there are chat, hour,"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    code, out, err = invoke(capsys, "run", "--headless", "--prompt", "x", *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert len(err) <= 201


# ---------------------------------------------------------------------------------------------- patience


def test_a_patient_pipe_holds_the_engine_until_it_is_read_or_closed() -> None:
    pipe = Pipe(patient=True, capacity=3)
    batches = rich_stream()[:10]
    put: list[int] = []

    def engine() -> None:
        for i, batch in enumerate(batches):
            pipe.put(batch)
            put.append(i)

    thread = threading.Thread(target=engine)
    thread.start()
    _until(lambda: len(put) == 3)
    time.sleep(0.02)
    assert len(put) == 3
    assert [pipe.get() for _ in range(2)] == batches[:2]
    _until(lambda: len(put) == 5)
    pipe.close()
    thread.join(5)
    assert len(put) == 10
    assert pipe.qsize() <= 1, "what waited is dropped, but for a batch that was being put"


def test_a_patient_recorder_waits_for_the_disk_and_loses_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.jsonl", capacity=2, patient=True)
    slow = recorder._write

    def write(batches: list[ev.StepBatch]) -> None:
        time.sleep(0.001)
        slow(batches)

    recorder._write = write  # type: ignore[method-assign]
    batches = rich_stream()
    for batch in batches:
        recorder(batch)
    recorder.close()
    assert recorder.failed is None
    assert list(read(tmp_path / "a.jsonl")) == batches


def test_key_frames_of_a_large_pool_are_not_most_of_the_file(tmp_path: Path) -> None:
    asked: list[int] = []
    recorder = Recorder(tmp_path / "a.jsonl", request_snapshot=lambda: asked.append(i))
    hashes = [f"{k:032x}" for k in range(800)]
    for i in range(500):
        if asked and asked[-1] == i - 1:
            event: ev.Event = ev.PoolSnapshot([], [1, 800], list(range(1, 801)), hashes, [], [], [])
        else:
            event = ev.BlocksAllocated(1, [i + 1])
        recorder(ev.StepBatch(i, 1.0 * i, 0, i, [event]))
    recorder.close()
    assert asked[:2] == [5, 106], "800 hashes: a hundred batches apart, not five seconds"
    assert len(asked) == 5


def _until(done: Any) -> None:
    end = time.monotonic() + 5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)
    assert done()


# --------------------------------------------------------------------------------------------- the screen


@pytest.mark.parametrize(
    ("speed", "badge"), [(None, " SIMULATED "), (1.0, " SIMULATED "), (10.0, " SIMULATED ×10 ")]
)
async def test_the_screen_says_simulated(tmp_path: Path, speed: float | None, badge: str) -> None:
    small = replace(CHAT, streams=tuple(replace(s, requests=3) for s in CHAT.streams))
    path = tmp_path / "run.jsonl"
    answer(Job(as_json=True, once=True, record=path, load=small, simulation=replace(H100, speed=None)))
    batches = list(read(path))
    started = batches[0].events[0]
    batches[0].events[0] = replace_struct(started, knobs=replace_struct(started.knobs, speed=speed))
    for width in (60, 100):
        async with show((width, 30), batches) as shown:
            await shown.settle()
            assert badge in shown.rows[0]
            assert "H100" in shown.rows[0] or width < 100


def replace_struct(event: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(event, **changes)
