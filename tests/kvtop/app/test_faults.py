"""What readers do to an engine that runs: a disk that fills, a reader that stops, a sink that raises, aborts."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.events import StepBatch
from kvtop.record.recorder import Recorder
from kvtop.sources import LiveSource
from kvtop.state.dashboard import DashboardState
from tests.demos.toy import VOCAB, build
from tests.toy_runner import expected

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.conformance(84, 107)
def test_no_reader_slows_or_ends_the_engine(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    engine = Engine(EngineConfig(num_blocks=60, hash_seed=1), build=build, device_interval=0)
    problems: list[str] = []
    recorder = Recorder(tmp_path / "a.jsonl", on_problem=problems.append)
    recorder._raw.close()
    recorder._raw = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    stopped, state = LiveSource(engine, capacity=5), DashboardState()
    good: list[StepBatch] = []

    def broken(batch: StepBatch) -> None:
        raise RuntimeError("a sink of no use")

    for sink in (recorder, broken, good.append):
        engine.subscribe(sink)
    engine.start()
    engine.wait_ready(30)
    r = random.Random(4)
    prompts = [[(7 * i + f) % VOCAB for i in range(r.randint(5, 60))] for f in range(40)]
    ids = [engine.submit(p, FOUR) for p in prompts]
    gone = set(r.sample(ids, 10))
    for i in gone:
        engine.abort(i)
        time.sleep(0.0005)
    until = time.monotonic() + 30
    seen = DashboardState(strict=True)
    at = 0
    while time.monotonic() < until and not all(i in seen.requests and seen.requests[i].done for i in ids):
        while at < len(good):
            seen.apply(good[at])
            at += 1
        time.sleep(0.001)
    engine.stop()
    recorder.close()
    for batch in good[at:]:
        seen.apply(batch)
    for i, p in zip(ids, prompts, strict=True):
        view = seen.requests[i]
        assert view.finish_reason == "length" or (i in gone and view.finish_reason == "abort")
        assert view.output_ids == expected(p, 4, VOCAB)[: len(view.output_ids)]
    assert seen.pool.active == 0 and seen.engine.stopped is not None and seen.stream.losses == 0
    assert len(problems) == 1 and "No space left" in problems[0] and recorder.failed
    for batch in stopped.drain():  # it looks again at last: what was lost is counted
        state.apply(batch)
    assert stopped.lost > 0 and state.engine.stopped is not None
