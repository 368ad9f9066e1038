"""Headless runs over a toy engine: what is printed, what is summed up, how it ends."""

from __future__ import annotations

import errno
import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams, SetupError, load_workload
from engine.config import EngineConfig as Config
from engine.events import EngineStarted, EngineStopped, StepBatch, decode_batch
from engine.files.model_files import Progress
from engine.loaded import Built
from kvtop.cli.headless import Job, run
from kvtop.cli.prompts import Prompt
from kvtop.record.recorder import Recorder
from kvtop.record.verify import verify
from kvtop.state.dashboard import DashboardState
from tests.demos.toy import VOCAB, WordPieces, build
from tests.toy_runner import ToyRunner

FIVE = SamplingParams(max_tokens=5)
PAGE = "The lighthouse stood alone on its rock and the keeper counted ships. " * 20


def answer(asks: list[Prompt], job: Job, config: Config | None = None, **more: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = io.BytesIO(), io.StringIO()
    job = replace(job, prompts=asks)
    code = run(config or EngineConfig(), job, build=more.get("build", build), out=out, err=err)
    return code, out.getvalue().decode(), err.getvalue()


def test_the_summary_is_the_pinned_one() -> None:
    asks = [Prompt("Who?", PAGE, params=FIVE), Prompt("And then?", PAGE, params=FIVE)]
    code, out, err = answer(asks, Job(as_json=True, once=True))
    assert code == 0
    reported = json.loads(out)
    assert out.count("\n") == 1
    assert list(reported)[:2] == ["schema", "type"]
    assert set(reported) == {
        *("schema", "type", "source", "model", "device", "dtype", "block_size", "num_blocks"),
        *("usable_blocks", "bytes_per_block", "requests", "prefix_cache", "evictions"),
        *("peak_blocks", "slots_filled", "slots_held"),
    }
    cold, hit = reported["requests"]
    assert set(cold) == {
        *("id", "text", "prompt_tokens", "cached_tokens", "computed_tokens", "cache_write_tokens"),
        *("output_tokens", "finish_reason", "queue_ms", "ttft_ms", "itl_ms", "preemptions"),
        "recomputed_tokens",
    }
    assert cold["cached_tokens"] == 0
    assert hit["cached_tokens"] > 200
    for row in (cold, hit):
        assert row["cached_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        assert row["output_tokens"] == 5
        assert row["finish_reason"] == "length"
        assert set(row["itl_ms"]) == {"p50", "p99"}
    cache = reported["prefix_cache"]
    assert cache["lookups"] == 2
    assert cache["query_tokens"] == cold["prompt_tokens"] + hit["prompt_tokens"]
    assert cache["hit_rate"] == round(cache["hit_tokens"] / cache["query_tokens"], 6)
    assert reported["usable_blocks"] == reported["num_blocks"] - 1
    # The second prompt reads the blocks of the first one, so it alone gives the peak.
    tokens = max(r["prompt_tokens"] for r in (cold, hit)) + 4
    assert reported["peak_blocks"] == -(-tokens // reported["block_size"])
    assert reported["slots_held"] == reported["peak_blocks"] * reported["block_size"]
    assert reported["slots_filled"] == tokens
    assert "KV: " in err
    assert "tokens" in err


def test_without_lookups_there_is_no_hit_rate() -> None:
    config = EngineConfig(enable_prefix_caching=False)
    _, out, _ = answer([Prompt("x", params=FIVE)], Job(as_json=True, once=True), config)
    reported = json.loads(out)
    assert reported["prefix_cache"] == {"lookups": 0, "query_tokens": 0, "hit_tokens": 0}


def test_json_without_once_is_the_whole_stream_and_the_summary_last() -> None:
    code, out, _ = answer([Prompt("x y z", params=FIVE)], Job(as_json=True))
    *lines, last = out.splitlines()
    state = DashboardState(strict=True)
    for line in lines:
        state.apply(decode_batch(line))
    assert isinstance(state.started, EngineStarted)
    assert isinstance(state.engine.stopped, EngineStopped)
    assert json.loads(last) == json.loads(json.dumps(state.summary()))
    assert code == 0


def test_plain_text_is_the_answers_in_order() -> None:
    asks = [Prompt(f"question {i}", params=FIVE) for i in range(3)]
    texts = []
    for concurrent in (False, True):
        _, out, err = answer(asks, Job(concurrent=concurrent))
        assert out.endswith("\n")
        assert len(out.splitlines()) == 3
        assert [line.split()[0] for line in err.splitlines() if line.startswith("#")] == ["#1", "#2", "#3"]
        texts.append(out)
    assert texts[0] == texts[1], "the same answers, one after another or at once"


def test_token_ids_and_salts_reach_the_engine() -> None:
    ids = [5] * 64
    asks = [Prompt(ids, salt=s, params=FIVE) for s in (None, None, "a", "a")]
    _, out, _ = answer(asks, Job(as_json=True, once=True))
    assert [r["cached_tokens"] for r in json.loads(out)["requests"]] == [0, 48, 0, 48]


def test_one_refused_request_stands_in_the_list_and_all_refused_is_exit_2() -> None:
    config = EngineConfig(num_blocks=5)
    fits, too_long = Prompt([1] * 20, params=FIVE), Prompt([1] * 500, params=FIVE)
    code, out, _ = answer([too_long, fits], Job(as_json=True, once=True), config)
    assert code == 0
    refused, fine = json.loads(out)["requests"]
    assert refused["finish_reason"] == "refused"
    assert "500 tokens" in refused["error"]
    assert "ttft_ms" not in refused
    assert "error" not in fine
    code, _, err = answer([too_long], Job(), config)
    assert code == 2
    assert "refused" in err
    code, _, err = answer([too_long], Job(as_json=True, once=True), config)
    assert code == 2
    assert sum("refused" in line and "500 tokens" in line for line in err.splitlines()) == 1


def test_a_recording_on_a_full_disk_is_exit_1_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    real = Recorder._write

    def full(self: Recorder, batches: list[StepBatch]) -> None:
        real(self, batches)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "_write", full)
        code, out, err = answer([Prompt("x", params=FIVE)], Job(record=path))
    assert code == 1
    assert out, "the answer is given all the same"
    assert "No space left on device; free space or record elsewhere" in err


def test_a_recording_of_a_run_verifies(tmp_path: Path) -> None:
    for redact in (False, True):
        path = tmp_path / f"{redact}.jsonl.gz"
        answer([Prompt("a b c", PAGE, params=FIVE)], Job(record=path, redact=redact))
        report = verify(path)
        assert report.violations == []
        assert report.snapshots == 1


def test_a_start_that_fails_is_a_setup_error() -> None:
    def absent(config: EngineConfig, progress: Progress) -> Built:
        progress(1, 2, "weights")
        raise SetupError("no such model; try another")

    with pytest.raises(SetupError, match="try another"):
        answer([Prompt("x")], Job(), build=absent)


def test_a_start_that_crashes_is_one_line_that_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtop.cli.headless.log_file", lambda: tmp_path / "state" / "kvtop.log")

    def crash(config: EngineConfig, progress: Progress) -> Built:
        raise RuntimeError("unforeseen")

    with pytest.raises(SetupError, match=r"unforeseen.*; see .*kvtop\.log"):
        answer([Prompt("x")], Job(), build=crash)
    assert "Traceback" in (tmp_path / "state" / "kvtop.log").read_text()


def test_an_engine_that_breaks_on_the_way_says_so() -> None:
    class Broken(ToyRunner):
        def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
            raise RuntimeError("out of order")

    def broken(config: EngineConfig, progress: Progress) -> Built:
        return Built(Broken(64, 16, VOCAB), WordPieces(), eos_ids=(0,))

    code, _, err = answer([Prompt("x")], Job(), build=broken)
    assert code == 1
    assert "out of order" in err


def test_ctrl_c_is_130_and_a_reader_that_went_away_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.BytesIO):
        def __init__(self, error: type[BaseException]) -> None:
            super().__init__()
            self.error = error

        def write(self, data: Any) -> int:
            raise self.error

    for error, want in ((KeyboardInterrupt, 130), (BrokenPipeError, 0)):
        err = io.StringIO()
        assert (
            run(EngineConfig(), Job([Prompt("x", params=FIVE)]), build=build, out=Gone(error), err=err)
            == want
        )
        assert "Traceback" not in err.getvalue()


@pytest.mark.parametrize(
    ("number", "want"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_in_the_middle_stops_the_engine_and_completes_the_recording(
    tmp_path: Path, number: int, want: int
) -> None:
    code = (
        "import sys; from pathlib import Path; from kvtop.cli.headless import *; from kvtop.cli.prompts import *; "
        "from tests.demos.toy import build; from engine import EngineConfig\n"
        "w = Job([Prompt('x')], record=Path(sys.argv[1]), slow=30)\n"
        "sys.exit(run(EngineConfig(), w, build=build))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert process.stdout is not None
    assert process.stdout.read(1), "the first word is out, the second waits for 30 s"
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == want
    assert "Traceback" not in err
    assert verify(tmp_path / "a.jsonl").violations == []


@pytest.mark.parametrize("params", [SamplingParams(n=65), SamplingParams(beam_width=65), SamplingParams()])
@pytest.mark.parametrize(
    "job", [Job(), Job(as_json=True), Job(as_json=True, once=True), Job(concurrent=True)]
)
def test_a_refused_request_with_several_answers_is_one_line(params: SamplingParams, job: Job) -> None:
    too_long = PAGE * 60 if params.n == params.beam_width == 1 else "x"
    code, out, err = answer([Prompt(too_long, params=params)], job)
    assert code == 2
    assert sum("refused" in line for line in err.splitlines()) == 1
    assert "Traceback" not in err
    if job.as_json:
        assert json.loads(out.splitlines()[-1])["requests"][0]["finish_reason"] == "refused"
    else:
        assert (out, "#1 refused: " in err) == ("", True)


def test_of_several_prompts_with_several_answers_the_refused_ones_are_named() -> None:
    wide, fits = SamplingParams(n=65, max_tokens=5), SamplingParams(n=2, max_tokens=5, temperature=1)
    for concurrent in (False, True):
        prompts = [Prompt("x", params=wide), Prompt("y", params=fits), Prompt("z", params=wide)]
        code, out, err = answer(prompts, Job(concurrent=concurrent))
        assert code == 0
        assert [line[:3] for line in out.splitlines()] == ["[1]", "[2]"]
        assert [line.split()[:2] for line in err.splitlines() if line.startswith("#")] == [
            *(["#1", "refused:"], ["#2", "read"], ["#3", "refused:"])
        ]


def failing(*steps: int) -> Any:
    """An engine whose steps of these numbers fail, so that the requests in them do."""

    def fault(step: int, when: str) -> None:
        if step in steps or not steps:
            raise RuntimeError("no luck")

    def make(config: EngineConfig, progress: Progress) -> Built:
        return Built(ToyRunner(64, 16, VOCAB, fault=fault), WordPieces(), eos_ids=(0,))

    return make


@pytest.mark.parametrize("params", [FIVE, SamplingParams(n=3, max_tokens=5, temperature=1)])
@pytest.mark.parametrize("job", [Job(), Job(as_json=True, once=True)])
def test_exit_code_1_where_all_requests_failed(params: SamplingParams, job: Job) -> None:
    prompts = [Prompt("x", params=params), Prompt("y", params=params)]
    code, out, err = answer(prompts, job, build=failing())
    assert code == 1
    assert "no luck" in err
    assert "Traceback" not in err
    if job.as_json:
        assert [r["finish_reason"] for r in json.loads(out)["requests"]] == ["error", "error"]
        assert sum("every request failed: " in line for line in err.splitlines()) == 1


def test_exit_code_0_where_one_succeeded_and_1_where_the_others_were_refused() -> None:
    too_long = Prompt([1] * 5000, params=FIVE)
    good, other = Prompt("x", params=FIVE), Prompt("y", params=FIVE)
    code, _, err = answer([other, good], Job(), build=failing(0))
    assert (code, "#1 error: " in err) == (0, True)
    assert answer([too_long, other], Job(), build=failing())[0] == 1
    assert answer([too_long, good], Job())[0] == 0


def test_peak_blocks_are_those_of_the_fullest_step_and_count_shared_ones_once() -> None:
    """Two prompts of 48 equal tokens at once: three blocks in common at most, one of its own each."""
    prompts = [Prompt([5] * 50, params=FIVE), Prompt([5] * 50, params=FIVE), Prompt([7] * 10, params=FIVE)]
    _, out, _ = answer(prompts, Job(as_json=True, once=True))
    summary = json.loads(out)
    assert (summary["peak_blocks"], summary["slots_filled"], summary["slots_held"]) == (4, 54, 64)
    n = SamplingParams(n=2, max_tokens=5, temperature=1)
    _, out, _ = answer([Prompt([5] * 48, params=n)], Job(as_json=True, once=True))
    summary = json.loads(out)
    assert (summary["peak_blocks"], summary["slots_filled"], summary["slots_held"]) == (5, 56, 80)


def test_a_loads_figures_name_the_most_blocks_held() -> None:
    workload = load_workload("chat")
    stream = replace(
        workload.streams[0], requests=6, arrivals=replace(workload.streams[0].arrivals, think=0.0)
    )  # type: ignore[type-var]
    _, out, _ = answer([], Job(load=replace(workload, streams=(stream,))))
    assert "blocks held, of their " in out
