"""What README and docs/ show is true: their examples run, their sums come out, their options exist."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.sim.workload import load_workload
from kvtop import cli
from kvtop.app.screens.help import MAP
from kvtop.play import demo
from kvtop.widgets.map import block_map
from tests.demos.toy import build

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README, MEMORY, ANSWERS = PAGES["README"], PAGES["models-and-memory"], PAGES["map-and-answers"]

Kvtop = Callable[..., str]


@pytest.fixture
def kvtop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvtop:
    """Runs a command line, which must succeed; returns its stdout."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kvtop", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert not end.value.code, err
        return out

    return run


def fenced(page: str, language: str) -> list[str]:
    """Blocks of code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def test_the_demo_to_copy_plays(tmp_path: Path) -> None:
    code = fenced("extending", "python")[0]
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    out = io.StringIO()
    scene = demo.load(str(tmp_path / "mine.py"))
    assert demo.run_headless(scene, EngineConfig(), build=build, out=out, err=io.StringIO()) == 0, (
        out.getvalue()
    )


@pytest.mark.parametrize("page", [README, MEMORY], ids=["README", "models-and-memory"])
def test_the_sum_of_the_built_in_model(page: str) -> None:
    token = 30 * 3 * 64 * 2 * 2
    blocks = 192 * 2**20 // (16 * token)
    for figure in (token, 16 * token, 16 * (blocks - 1)):
        assert f"{figure:,}" in page
    assert (blocks, blocks - 1) == (546, 545)
    assert "545 × 16" in page


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "says"),
    [(80, 8, 128, "320 KiB"), (94, 4, 128, "188 KiB"), (62, 8, 128, "248 KiB")],
)
def test_what_a_token_costs(layers: int, heads: int, dim: int, says: str) -> None:
    assert f"{layers * heads * dim * 2 * 2 // 1024} KiB" == says
    assert f"| {says} |" in MEMORY


@pytest.mark.parametrize(
    ("page", "heading"),
    [(README, "## How to read the map"), (ANSWERS, "## The map")],
    ids=["README", "answers"],
)
def test_every_state_of_the_map_is_in_its_table(page: str, heading: str) -> None:
    table = page.split(f"\n{heading}\n")[1].split("\n## ")[0]
    for name, _, _ in MAP:
        assert f"| {name} |" in table
    for code in (block_map.FREE, block_map.CACHED, block_map.ACTIVE, block_map.HIT, block_map.EVICTED):
        assert f"| `{block_map.GLYPHS[code]}` |" in table


def test_every_option_that_is_shown_exists(kvtop: Kvtop) -> None:
    options = {}
    for name in ("run", "replay", "demo", "shot", "verify", "explain", "size", "bench", "config"):
        text = kvtop(name, "--help")
        switches = {f"--no-{word}" for word in re.findall(r"--\[no-\]([\w-]+)", text)}
        options[name] = switches | set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text.replace("[no-]", "")))
    shown = [
        (page, shlex.split(line, comments=True))
        for page in PAGES
        for block in fenced(page, "sh")
        for line in block.splitlines()
        if line.startswith("kvtop ")
    ]
    assert len(shown) > 40
    for page, words in shown:
        command = words[1] if len(words) > 1 and words[1] in options else "run"
        given = {word for word in words if word.startswith("-")}
        assert given <= options[command], f"{page}: {shlex.join(words)}"
    known = set.union(*options.values()) | {"--torch-backend", "--pip-args"}
    for page, text in PAGES.items():
        assert set(re.findall(r"`(--[a-z][\w-]*)", text)) - {"--no-", "--no-NAME"} <= known, page


def test_the_prompts_and_the_summary_are_as_described(kvtop: Kvtop, tmp_path: Path) -> None:
    (line,) = [block for block in fenced("headless", "json") if "prompt" in block]
    (tmp_path / "prompts.jsonl").write_text(line)
    simulated = ["--simulate", "llama-3.1-70b", "--on", "h100", "--weights", "int4", "--n", "2"]
    out = kvtop(*simulated, "--prompts", str(tmp_path / "prompts.jsonl"), "--headless", "--once", "--json")
    summary = json.loads(out)
    (row,) = summary["requests"]
    assert row["output_tokens"] == 40
    for field in (*summary, *row, *summary["prefix_cache"]):
        assert f"`{field}`" in PAGES["headless"], field


def test_the_load_to_copy_is_read(tmp_path: Path) -> None:
    (text,) = fenced("simulation-and-loads", "toml")
    (tmp_path / "mine.toml").write_text(text)
    assert load_workload(str(tmp_path / "mine.toml")).requests == 700
