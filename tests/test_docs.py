"""What README and docs/ say about the repository is true: links, paths, module names, rooms, walls, walks.

The examples that they show are held by tests/demos/test_readme.py and by the tests of what they describe.
"""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtop.app.screens import figures
from kvtop.record.audit import LAWS
from kvtop.state.explain import Reason
from kvtop.widgets.base.panel import Panel
from tests.kvtop.record.test_fields import UNPROVEN
from tests.syntax import syntax_tree

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TEXT = {page: page.read_text("utf-8") for page in PAGES}

LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w./-])((?:engine|kvtop|demos|themes|tests|docs|\.ci)/[\w./-]*\w|pyproject\.toml|Makefile)"
)
MODULE = re.compile(r"(?<![\w./-])((?:engine|kvtop|tests)(?:\.[a-z_]\w*)+)\b(?!\()")
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
"""A function, as the walks name it."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(text: str) -> set[str]:
    """Anchors of the headings, by GitHub's rule: lower case, punctuation dropped, blanks to hyphens."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def prose(text: str) -> str:
    """Without the blocks of code, whose paths may be examples."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for words in LINK.findall(prose(TEXT[page])):
        target = words[0] or words[1]
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text("utf-8")), f"{page.name} links to {target}"


@pages
def test_paths_exist(page: Path) -> None:
    missing = [name for name in PATH.findall(TEXT[page]) if not (ROOT / name).exists()]
    assert [name for name in missing if name != "tests/gpu/results"] == []  # made by make gpu-check


@pages
def test_modules_exist(page: Path) -> None:
    names = {name for name in MODULE.findall(TEXT[page]) if not name.endswith((".py", ".toml"))}
    assert [name for name in sorted(names) if find_spec(name) is None] == []


def test_pages_are_found_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target, _ in LINK.findall(TEXT[ROOT / "README.md"])}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_the_readme_is_short() -> None:
    lines = TEXT[ROOT / "README.md"].splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 140] == []


# ------------------------------------------------------------------------------------- architecture

ARCHITECTURE = TEXT[ROOT / "docs" / "architecture.md"]


def column(heading: str) -> list[str]:
    """First column of the table under this heading, without its head."""
    section = ARCHITECTURE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_rooms_are_those_on_disk() -> None:
    packages = {path.parent for top in ("engine", "kvtop") for path in (ROOT / top).rglob("*.py")}
    assert sorted(column("Rooms")) == sorted(f"`{path.relative_to(ROOT)}`" for path in packages)


def test_walls_are_those_of_the_linter() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    names = [contract["name"] for contract in project["tool"]["importlinter"]["contracts"]]
    assert column("Walls") == names


def defined(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    out: set[str] = set()
    for node in syntax_tree(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        if isinstance(node, ast.ClassDef):
            out |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return out


@pages
def test_functions_that_are_named_with_their_file_exist(page: Path) -> None:
    for file, name in PLACE.findall(TEXT[page]):
        assert name in defined(ROOT / file), f"{file} has no {name}"


# --------------------------------------------------------------------------------- map and answers

ANSWERS = TEXT[ROOT / "docs" / "map-and-answers.md"]


def test_every_reason_of_a_miss_is_explained() -> None:
    for reason in Reason.__args__:
        assert f"\n| `{reason}` | " in ANSWERS


def panels(base: type[Panel] = Panel) -> list[type[Panel]]:
    """Those of the ops room."""
    below = [panel for sub in base.__subclasses__() for panel in panels(sub)]
    return [*(below or [base])]


def test_every_panel_is_explained_with_all_its_figures() -> None:
    for path in sorted((ROOT / "kvtop" / "widgets" / "ops").glob("[a-z]*.py")):
        __import__(f"kvtop.widgets.ops.{path.stem}")
    shown = [p for p in panels() if p.__module__.startswith("kvtop.widgets.ops.")]
    assert len(shown) >= 13
    for panel in shown:
        section = ANSWERS.split(f"\n### {panel.TITLE}\n")[1].split("\n### ")[0]
        assert [name for name, _ in panel.FIGURES if name not in section] == [], panel.TITLE


def test_every_figure_of_the_bars_is_explained() -> None:
    for title, definitions in figures.FIGURES.values():
        assert [name for name, _ in definitions if name not in ANSWERS] == [], title


# ------------------------------------------------------------------------------------------- proof

PROOF = TEXT[ROOT / "docs" / "recording-and-proof.md"]


def test_every_law_is_explained() -> None:
    for law in LAWS:
        assert f"\n| `{law.__module__.replace('.', '/')}.py` | " in PROOF


def test_every_field_that_is_not_proven_is_listed() -> None:
    for field in UNPROVEN:
        assert f"`{field}`" in PROOF or f"`{field.partition('.')[0]}.*`" in PROOF, field
    listed = set(re.findall(r"`([A-Z]\w+\.[a-z_]+)`", PROOF.split("\n## What it does not prove\n")[1]))
    assert listed <= set(UNPROVEN)
