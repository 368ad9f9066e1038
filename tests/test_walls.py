"""The walls between the rooms: what the linter proves of the source, what an interpreter really loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine.hub import ModelFiles

ROOT = Path(__file__).resolve().parent.parent

NO_TORCH = (
    *("engine", "engine.events", "engine.config", "engine.params", "engine.hashing", "engine.blocks"),
    *("engine.paging", "engine.scheduler", "engine.sequence", "engine.runner", "engine.core", "engine.toy"),
    *("engine.detok", "engine.hub", "engine.chat", "engine.sizing", "engine.tokenizer"),
    *("engine.clock", "engine.cost", "engine.load", "engine.simulated", "engine.workload"),
    *("kvtop.cli", "kvtop.state", "kvtop.explain", "kvtop.series", "kvtop.recorder", "kvtop.verify"),
    *("kvtop.headless", "kvtop.demo", "kvtop.audit", "kvtop.settings", "kvtop.size_table"),
)
"""Importing any of these loads neither torch nor transformers."""


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after `code`, which must end well."""
    probe = f"{code}\nimport sys; print('\\n' + ' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


def test_linter_finds_every_wall_whole() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_light_modules_load_no_torch() -> None:
    loaded = loaded_by("\n".join(f"import {name}" for name in NO_TORCH))
    assert not loaded & {"torch", "transformers", "textual"}


def test_the_face_loads_on_first_use() -> None:
    assert "torch" not in loaded_by(
        "import engine\nengine.EngineConfig\nengine.SamplingParams\nengine.events"
    )


def test_help_and_demo_list_start_light() -> None:
    for words in (["--help"], ["demo", "list"]):
        loaded = loaded_by(_main(words))
        assert not loaded & {"torch", "transformers", "textual", "tokenizers"}, words


def test_headless_never_loads_textual(builtin_model: ModelFiles) -> None:
    words = ["--headless", "--prompt", "Hello", "--max-tokens", "2", "--temperature", "0", "--once", "--json"]
    loaded = loaded_by(_main(words))
    assert "torch" in loaded
    assert "textual" not in loaded


def _main(words: list[str]) -> str:
    """Source that runs the command line in place and goes on when it ends with exit code 0."""
    return f"""
import sys
sys.argv = {["kvtop", *words]!r}
from kvtop.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
assert not code, code
"""


@pytest.mark.parametrize("name", ["engine", "kvtop"])
def test_every_module_says_what_it_owns(name: str) -> None:
    """House rule: a module starts with what it owns and which invariant it keeps."""
    bare = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / name).rglob("*.py"))
        if path.read_text("utf-8").strip() and not path.read_text("utf-8").lstrip().startswith('"""')
    ]
    assert bare == []
