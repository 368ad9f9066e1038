"""The shipped demos on a toy and on the built-in model, and what happens to a demo that goes wrong."""

from __future__ import annotations

import io
import json
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from engine.errors import SetupError
from engine.events import EngineError, RequestQueued, StepBatch
from engine.files.model_files import ModelFiles
from kvtop.play import demo
from kvtop.play.demo import Demo, Performance, Script, Stage
from kvtop.record.verify import verify
from kvtop.state.dashboard import DashboardState
from tests.demos.toy import build

NAMES = ["cache-hit", "eviction"]


def play(scene: Demo, **options: Any) -> tuple[int, dict[str, Any], list[str]]:
    """Exit code, verdict and captions of a headless run."""
    out, err = io.StringIO(), io.StringIO()
    code = demo.run_headless(scene, EngineConfig(), as_json=True, out=out, err=err, **options)
    return code, json.loads(out.getvalue().splitlines()[-1]), err.getvalue().splitlines()


def failed(verdict: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in verdict["checks"] if not c["ok"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_demo_on_a_toy(name: str) -> None:
    code, verdict, captions = play(demo.load(name), build=build)
    assert failed(verdict) in (
        [],
        [c for c in verdict["checks"] if "sooner" in c["name"]],
    )  # a toy has no speed
    assert verdict["type"] == "verdict"
    assert verdict["demo"] == name
    assert code == (0 if verdict["ok"] else 1)
    assert [line.split(".")[0] for line in captions] == [str(i + 1) for i in range(len(captions))]
    assert len(captions) >= 4
    assert max(len(line) for line in captions) <= 215, "three rows of 80 columns, with the key behind them"


def test_cache_hit_on_the_built_in_model(builtin_model: ModelFiles) -> None:
    code, verdict, _ = play(demo.load("cache-hit"))
    assert failed(verdict) == []
    assert code == 0
    assert len(verdict["ttft_cold_ms"]) == len(verdict["ttft_hit_ms"]) == 3
    got = {c["name"]: c["got"] for c in verdict["checks"]}
    assert got["second user: blocks hit"] == 125
    assert got["second user: blocks computed"] == 13


def test_eviction_on_the_built_in_model(builtin_model: ModelFiles) -> None:
    code, verdict, _ = play(demo.load("eviction"))
    assert failed(verdict) == []
    assert code == 0
    assert verdict["evicted_blocks"] > 0
    assert verdict["blocks_left"] > 0


def test_in_the_dashboard_captions_wait_for_the_reader() -> None:
    batches: queue.SimpleQueue[StepBatch] = queue.SimpleQueue()
    scene, state = demo.load("eviction"), DashboardState(strict=True)
    engine = Engine(scene.config(EngineConfig()), build=build)
    engine.subscribe(batches.put)
    performance = Performance(scene, engine, state, hold=True)
    assert performance.tick() is False, "nothing to show before the engine has said who it is"
    assert performance.caption == scene.title
    engine.start()
    engine.wait_ready()
    read: list[str] = []
    while performance.verdict is None:
        performance.tick()
        if performance.waiting:
            assert performance.tick() is False
            read.append(performance.caption)
            performance.advance()
        elif performance.verdict is None:
            state.apply(batches.get(timeout=30))
    engine.stop()
    assert performance.verdict["ok"]
    assert len(read) == 4
    assert len(set(read)) == 4
    assert performance.caption == "8 of 8 checks passed"
    performance.advance()


def test_every_got_comes_from_events() -> None:
    """The same verdict from the batches alone, with no engine behind them."""
    scene = demo.load("eviction")
    batches: list[StepBatch] = []
    _, live, _ = play(scene, build=build, sinks=[batches.append])

    class Silent:
        """Takes requests and does nothing: what the script then learns can only be from the batches."""

        ids = iter([e.request_id for b in batches for e in b.events if isinstance(e, RequestQueued)])

        def submit(self, *_: Any, **__: Any) -> int:
            return next(self.ids)

        def new_conversation(self, *_: Any) -> int:
            return 1

    state = DashboardState(strict=True)
    performance = Performance(scene, Silent(), state, hold=False)  # type: ignore[arg-type]
    for batch in batches:
        state.apply(batch)
        performance.tick()
    assert performance.verdict == live


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_demo_verifies(tmp_path: Path, name: str) -> None:
    play(demo.load(name), build=build, record=tmp_path / "demo.jsonl.gz")
    report = verify(tmp_path / "demo.jsonl.gz")
    assert report.ok, report.violations


def test_list() -> None:
    listed = json.loads(demo.listing(as_json=True))
    assert [d["name"] for d in listed] == NAMES
    assert all(set(d) == {"name", "title"} for d in listed)
    assert demo.listing(as_json=False).startswith("cache-hit  ")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("DEMO = 3", "has no DEMO"),
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_demo(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(SetupError, match=says) as caught:
        demo.load(str(tmp_path / "mine.py"))
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no-such", "x" * 500, "/no/such/file.py", ""])
def test_an_unknown_demo(name: str) -> None:
    with pytest.raises(SetupError) as caught:
        demo.load(name)
    assert len(str(caught.value)) <= 200


def test_a_demo_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from kvtop.demo import Demo\n"
        "def script(stage):\n"
        "    yield stage.caption('hello\\n  there')\n"
        "    r = stage.submit([1, 2, 3], max_tokens=2)\n"
        "    yield stage.finished(r)\n"
        "    stage.check('tokens', 2, stage.request(r).num_output)\n"
        "DEMO = Demo('mine', 'my own', script, {'num_blocks': 9})\n"
    )
    code, verdict, captions = play(demo.load(str(tmp_path / "mine.py")), build=build)
    assert (code, verdict["ok"], verdict["num_blocks"]) == (0, True, 9)
    assert captions == ["1. hello there", "2. 1 of 1 checks passed"]


def too_large(stage: Stage) -> Script:
    yield stage.finished(stage.submit([1] * 999, max_tokens=1))
    stage.check("never", 1, 1)


def buggy(stage: Stage) -> Script:
    yield stage.caption("soon")
    raise KeyError("oops")


def empty(stage: Stage) -> Script:
    yield stage.caption("nothing is checked")


def wrong(stage: Stage) -> Script:
    yield stage.caption("one is not two")
    stage.check("a number", 1, 2)


@pytest.mark.parametrize(
    ("script", "got"), [(too_large, "refused"), (buggy, "KeyError: 'oops'"), (wrong, "2"), (empty, None)]
)
def test_a_demo_that_goes_wrong_fails(script: Any, got: str | None) -> None:
    code, verdict, _ = play(Demo("bad", "bad", script, {"num_blocks": 5}), build=build)
    assert (code, verdict["ok"]) == (1, False)
    assert [got in str(c["got"]) for c in failed(verdict)] == ([True] if got else [])


def test_a_fatal_error_ends_the_demo() -> None:
    state = DashboardState()
    performance = Performance(Demo("x", "x", empty), None, state, hold=True)  # type: ignore[arg-type]
    state.apply(StepBatch(0, 0.0, 0, 0, [EngineError("the engine broke", fatal=True)]))
    performance.tick()
    assert performance.verdict is not None
    assert performance.verdict["checks"][0]["got"] == "the engine broke"


def test_a_model_that_is_not_there_is_a_setup_error() -> None:
    def absent(*_: Any) -> Any:
        raise SetupError("no such model")

    with pytest.raises(SetupError, match="no such model"):
        play(demo.load("eviction"), build=absent)


def test_exact_prompts_say_who_speaks() -> None:
    """Token ids cut to size still fold and name their page on the screen."""
    batches: list[StepBatch] = []
    play(demo.load("cache-hit"), build=build, sinks=[batches.append])
    queued = [e for b in batches for e in b.events if isinstance(e, RequestQueued)]
    assert len(queued) == 8
    for request in queued[2:]:
        assert len(request.prompt_token_ids) == 2200
        assert [s[2] for s in request.spans] == ["template", "system", "template", "user", "template"]
        assert request.spans[1][1:] == (2000, "system", "handbook")
        assert [s[1] for s in request.spans] == [*(s[0] for s in request.spans[1:]), 2200]


@pytest.mark.parametrize(
    ("number", "want"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_in_the_middle_of_a_demo_completes_the_recording(
    tmp_path: Path, number: int, want: int
) -> None:
    code = (
        "import sys; from engine import EngineConfig; from kvtop.play.demo import *\n"
        "from tests.demos.toy import build\n"
        "def script(stage):\n"
        "    yield stage.finished(stage.submit('x', max_tokens=3))\n"
        "    stage.caption('now it waits')\n"
        "    yield Until(lambda: False)\n"
        "demo = Demo('d', 'waits', script)\n"
        "sys.exit(run_headless(demo, EngineConfig(), record=sys.argv[1], build=build))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "1. now it waits\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == want
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert verify(tmp_path / "a.jsonl").violations == []
