"""The private names of Textual: they are there as they are used, and only one file uses them."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import textual
from textual._compositor import Compositor
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.command import CommandPalette
from textual.containers import Container
from textual.dom import DOMNode
from textual.drivers.linux_driver import LinuxDriver
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.widget import Widget
from textual.widgets import Input

from kvtop.terminal import textual_door
from tests.kvtop.screen import show
from tests.syntax import syntax_tree

ROOT = Path(textual_door.__file__).parents[2]
DOOR = Path(textual_door.__file__)
FILES = [path for top in ("kvtop", "tests") for path in sorted((ROOT / top).rglob("*.py")) if path != DOOR]

CALLED: dict[type, dict[str, list[str]]] = {
    App: {"_handle_exception": ["error"]},
    Screen: {"_set_dirty": ["*regions"], "_compositor_refresh": []},
    Compositor: {
        "_regions_to_spans": ["regions"],
        "render_update": ["full", "screen_stack", "simplify"],
        "render_partial_update": [],
        "render_strips": ["size"],
    },
    Input: {"_position_to_cell": ["position"], "_cell_offset_to_index": ["offset"]},
    CommandPalette: {"_select_or_command": ["event"], "_action_command_list": ["action"]},
    XTermParser: {
        "_parse_extended_key": ["sequence"],
        "feed": ["data"],
        "tick": [],
        "parse_mouse_code": ["code"],
    },
    LinuxDriver: {
        "_enable_mouse_support": [],
        "_request_terminal_sync_mode_support": [],
        "_query_in_band_window_resize": [],
        "_enable_bracketed_paste": [],
        "_disable_line_wrap": [],
        "_get_terminal_size": [],
        "_patch_iflag": ["attrs"],
        "_patch_lflag": ["attrs"],
        "process_message": ["message"],
    },
}
"""Parameters of the methods that are called or replaced."""

HELD: dict[type, list[str]] = {
    App: ["_exception", "_background_screens", "_driver", "_screen_stack", "_return_code"],
    Screen: ["_compositor", "_dirty_widgets"],
    Compositor: ["_full_map", "_dirty_regions", "full_map", "cuts", "visible_widgets", "size"],
    Input: ["_value"],
    XTermParser: ["_timeout_time", "mouse_pixels", "terminal_size", "terminal_pixel_size"],
    LinuxDriver: ["_app", "_loop", "_file", "_in_band_window_resize", "attrs_before", "input_tty", "fileno"],
}
"""Attributes that are read or set."""


def source_of(kind: type) -> str:
    """Of the class and of those of Textual that it builds on."""
    bases = [c for c in kind.__mro__ if c.__module__.startswith("textual")]
    return "\n".join(inspect.getsource(importlib.import_module(c.__module__)) for c in bases)


def test_the_series_is_the_one_that_this_file_was_written_for() -> None:
    assert textual.__version__.startswith("8.2.")


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in CALLED.items() for n in names])
def test_a_private_method_takes_what_it_is_given(kind: type, name: str) -> None:
    parameters = inspect.signature(inspect.unwrap(getattr(kind, name))).parameters.values()
    got = [
        ("*" if p.kind is p.VAR_POSITIONAL else "") + p.name
        for p in parameters
        if p.name not in ("self", "cls")
    ]
    assert got == CALLED[kind][name]


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in HELD.items() for n in names])
def test_a_private_attribute_is_there(kind: type, name: str) -> None:
    assert hasattr(kind, name) or f"self.{name}" in source_of(kind)


async def test_private_attributes_hold_what_is_expected() -> None:
    async with show((60, 20)) as shown:
        app, screen = shown.app, shown.app.screen
        assert (
            app._exception is None and app._background_screens == [] and list(app._screen_stack) == [screen]
        )
        assert isinstance(screen._dirty_widgets, set) and isinstance(screen._compositor, Compositor)
        assert isinstance(screen._compositor._dirty_regions, set)
        assert len(screen._compositor.cuts) == 20 and screen in screen._compositor.visible_widgets
    assert XTermParser()._timeout_time is None


def test_every_private_name_of_the_door_is_checked_here() -> None:
    tree = syntax_tree(DOOR.read_text("utf-8"))
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_private(node.attr)
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    own = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    own |= _assigned(tree)
    checked = {name for names in (*CALLED.values(), *HELD.values()) for name in names}
    assert used - own <= checked


def test_no_other_file_imports_a_private_module_of_textual() -> None:
    for path in FILES:
        for node in ast.walk(syntax_tree(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("textual._"):
                assert path == Path(__file__), path


def test_no_other_file_of_kvtop_reads_a_private_name_that_is_not_its_own() -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / "kvtop")]
    trees = {path: syntax_tree(path.read_text("utf-8")) for path in files}
    ours = set[str]().union(*map(_defined, trees.values()))
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                assert node.attr in ours, f"{path}:{node.lineno}: {node.attr}"


def test_no_class_of_kvtop_uses_a_private_name_of_the_textual_class_below_it() -> None:
    """Neither on purpose nor by chance: an attribute of the same name would break both."""
    theirs = set[str]()
    for kind in (App, Screen, Widget, DOMNode, MessagePump, ScrollView, Container, Input):
        theirs |= _defined(syntax_tree(inspect.getsource(inspect.getmodule(kind))))  # type: ignore[arg-type]
    for path in FILES:
        text = path.read_text("utf-8")
        if path.is_relative_to(ROOT / "kvtop") and "from textual" in text:
            used = {n for n in _defined(syntax_tree(text)) if not n.startswith("_on_")}
            assert not used & theirs, path


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_replace")


def _assigned(tree: ast.AST) -> set[str]:
    """Attributes that a class declares or sets on itself with a type."""
    found: set[str] = set()
    for node in ast.walk(tree):
        targets: list[Any] = []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = [t for target in node.targets for t in getattr(target, "elts", [target])]
        for target in targets:
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                found.add(target.attr)
    return found


def _defined(tree: ast.AST) -> set[str]:
    """Private names that the module gives a meaning."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        n
        for n in _assigned(tree) | {d.name for d in ast.walk(tree) if isinstance(d, kinds)}
        if _is_private(n)
    }
