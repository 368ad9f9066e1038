"""The walls between the rooms: what the linter proves of the source, what an interpreter really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.syntax import syntax_tree

if TYPE_CHECKING:
    from engine.files.model_files import ModelFiles

ROOT = Path(__file__).resolve().parent.parent

NO_TORCH = (
    "engine engine.events engine.config engine.params engine.errors engine.clock engine.kv.paging "
    "engine.step.core engine.step.detok engine.files.hub engine.files.tokenizer engine.chat.turns engine.sizing "
    "engine.sim.simulated engine.sim.arrivals engine.sim.load_driver tests.toy_runner "
    "kvtop.cli.program kvtop.cli.headless kvtop.cli.size_table kvtop.state.dashboard kvtop.state.explain "
    "kvtop.record.recorder kvtop.record.verify kvtop.play.demo kvtop.play.session kvtop.settings"
).split()
"""Importing any of these loads neither torch nor transformers."""


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("engine", "kvtop")
    for path in sorted((ROOT / top).rglob("*.py"))
}
"""File of each module by its dotted name."""


def imports(path: Path) -> set[str]:
    """Modules of ours that this file imports, inside functions too; not those for typing alone."""
    found: set[str] = set()
    todo: list[ast.AST] = [syntax_tree(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.level, f"{path} imports by a relative name"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
        todo += ast.iter_child_nodes(node)
    return found & MODULES.keys()


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


def test_no_modules_import_one_another_in_a_circle() -> None:
    arrows = {name: imports(path) for name, path in MODULES.items()}
    done: set[str] = set()
    for start in arrows:
        circle = _circle(arrows, start, [], done)
        assert not circle, " -> ".join(circle)


def _circle(arrows: dict[str, set[str]], at: str, path: list[str], done: set[str]) -> list[str]:
    """The first circle of imports that is met on the way from `at`; empty if there is none."""
    if at in path:
        return [*path[path.index(at) :], at]
    if at in done:
        return []
    for target in sorted(arrows[at]):
        circle = _circle(arrows, target, [*path, at], done)
        if circle:
            return circle
    done.add(at)
    return []


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}, "a", [], set()) == ["b", "c", "b"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}, "a", [], set()) == []


def test_rooms_are_small() -> None:
    rooms: dict[str, int] = {}
    for path in MODULES.values():
        if path.name != "__init__.py":
            room = str(path.parent.relative_to(ROOT))
            rooms[room] = rooms.get(room, 0) + 1
    assert {room: n for room, n in rooms.items() if n > 14} == {}


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
