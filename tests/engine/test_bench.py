"""The measurements run through a real Engine; here over the toy, whose speed means nothing."""

from __future__ import annotations

import json

import pytest

from engine import bench
from engine.config import EngineConfig
from engine.errors import SetupError
from engine.files.model_files import Progress
from engine.loaded import Built
from tests.toy_runner import ToyRunner


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: EngineConfig, progress: Progress) -> Built:
        return Built(ToyRunner(num_blocks=config.num_blocks or 400, block_size=config.block_size))

    monkeypatch.setattr(bench, "build", build)
    monkeypatch.setattr(bench, "read_bandwidth", lambda config: 40e9)


def test_every_work_gets_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(EngineConfig(), as_json=True) == 0
    rows = {m["work"]: m for m in json.loads(capsys.readouterr().out)["measures"]}
    assert list(rows) == [
        "read bandwidth, all threads",
        "decode, 1 at once",
        "decode, 8 at once",
        "prefill, 1,000 tokens",
        "first token, 2,000 tokens cold",
        "first token, 2,000 tokens cached",
        "cold over cached",
    ]
    assert all(m["value"] > 0 for m in rows.values())
    assert rows["decode, 8 at once"]["of_limit"] == pytest.approx(rows["decode, 8 at once"]["gb_s"] / 40)


def test_the_table_has_a_line_a_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(EngineConfig()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(len(line) <= 82 for line in lines)


def test_a_context_that_is_too_short_is_told() -> None:
    with pytest.raises(SetupError, match="bench needs 2048 tokens of context, there are 144"):
        bench.main(EngineConfig(num_blocks=10))
