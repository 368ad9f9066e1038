"""Syntax trees of source files, for tests that read the code."""

from __future__ import annotations

import ast
import gc


def syntax_tree(source: str) -> ast.Module:
    """The tree of `source`. Without garbage collection meanwhile: in CPython before 3.12.2 an object that is finalised
    while a tree is made can end it with "AST constructor recursion depth mismatch"."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()
