"""What the README shows must be true: its code runs, its sum comes out, its table is the map's."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from engine import EngineConfig
from kvtop.app.screens.help import MAP
from kvtop.play import demo
from kvtop.widgets.map import block_map
from tests.demos.toy import build

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_to_copy_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    out = io.StringIO()
    scene = demo.load(str(tmp_path / "mine.py"))
    assert demo.run_headless(scene, EngineConfig(), build=build, out=out, err=io.StringIO()) == 0, (
        out.getvalue()
    )


def test_the_sum_of_the_built_in_model() -> None:
    token = 30 * 3 * 64 * 2 * 2
    blocks = 192 * 2**20 // (16 * token)
    for figure in (token, 16 * token, 16 * (blocks - 1)):
        assert f"{figure:,}" in README
    assert (blocks, blocks - 1) == (546, 545)
    assert "545 × 16" in README


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "says"),
    [(80, 8, 128, "320 KiB"), (94, 4, 128, "188 KiB"), (62, 8, 128, "248 KiB")],
)
def test_what_a_token_costs(layers: int, heads: int, dim: int, says: str) -> None:
    assert f"{layers * heads * dim * 2 * 2 // 1024} KiB" == says
    assert f"| {says} |" in README


def test_every_state_of_the_map_is_in_its_table() -> None:
    table = README.split("## How to read the map")[1].split("##")[0]
    for name, _, _ in MAP:
        assert f"| {name} |" in table
    for code in (block_map.FREE, block_map.CACHED, block_map.ACTIVE, block_map.HIT, block_map.EVICTED):
        assert f"| `{block_map.GLYPHS[code]}` |" in table


def test_every_file_it_names_exists() -> None:
    named = set(
        re.findall(r"\b((?:engine|kvtop|demos|themes|tests)/[\w/]+\.(?:py|toml|txt|tcss|svg))", README)
    )
    assert len(named) > 8
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
