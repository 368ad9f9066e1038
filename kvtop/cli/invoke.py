"""One call of the command line: words in, exit code out.

Owns what stands between the words and a command: the config file's values, variables that hold a list, errors
as one line on stderr, a reader of stdout that went away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.exceptions import Abort, Exit, TyperException

from engine import SetupError
from kvtop.text import cut, safe_text


def invoke(app: typer.Typer, args: Sequence[str]) -> int:
    """One command line; returns the exit code. Errors are one line on stderr, at most 200 characters."""
    command = _command(app)
    words = list(args)
    names = [c.callback.__name__ for c in app.registered_commands if c.callback is not None]
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "-V", "--version")):
        words.insert(0, "run")
    try:
        given = _settings(app) if words[0] in names and not {"-h", "--help"} & set(words) else {}
        told = dict.fromkeys(names, given)
        # Not command.main: it turns a broken pipe into exit code 1.
        with command.make_context("kvtop", words, default_map=told) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, Abort):
        return 130
    except BrokenPipeError:
        forget_stdout()
        return 0
    except (SetupError, TyperException) as error:
        text = _said(error) if isinstance(error, TyperException) else str(error)
        return _wrong(text)
    except OSError as error:
        return _wrong(f"{error.filename or 'the system'}: {error.strerror or error}")


def _command(app: typer.Typer) -> Any:
    """The command tree. A variable of an option that may be given several times holds one value: words
    of a prompt are not prompts."""
    command: Any = typer.main.get_command(app)
    for sub in command.commands.values():
        for parameter in sub.params:
            if getattr(parameter, "multiple", False):
                parameter.value_from_envvar = partial(_whole_value, parameter)
    return command


def _whole_value(parameter: Any, context: Any) -> list[str] | None:
    value = parameter.resolve_envvar_value(context)
    return None if value is None else [value]


def forget_stdout() -> None:
    """Nobody reads it any more: what is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


_TAKES = {"int": "a whole number", "float": "a number", "bool": "true or false"}
"""By the first word of what pydantic, which typer asks, calls its errors: int_parsing, bool_type."""


def _said(error: TyperException) -> str:
    """What was wrong, in words of our own where typer hands on pydantic's: the option and what it takes."""
    option, details = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option is None or details is None:
        return error.format_message()
    first = details()[0]
    _, _, choices = first["msg"].partition(" is not one of ")
    takes = _TAKES.get(first["type"].partition("_")[0])
    if choices:
        takes = choices.replace("'", "").rstrip(".")
    name = max(option.opts, key=len) + (f" ({option.envvar})" if option.envvar else "")
    if takes is None:
        return f"{name}: {first['msg'].removeprefix('Value error, ')}"
    return f"{name} takes {takes}, not {cut(safe_text(str(first['input'])), 30)!r}"


def _wrong(text: str) -> int:
    line = " ".join(safe_text(text.replace("\n", " ")).split())
    print(cut(f"kvtop: {line}", 200), file=sys.stderr)
    return 2


def _settings(app: typer.Typer) -> dict[str, Any]:
    """The config file's values by parameter name, for every command that has the option."""
    from kvtop.settings import load_settings

    kinds: dict[str, type] = {}
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback).items():
            kind = _kind(hint)
            if kind is not None and name not in _NOT_SETTINGS:
                kinds.setdefault(name, kind)
    return dict(load_settings(kinds))


_NOT_SETTINGS = {
    *("return", "ctx", "file", "name", "out", "at", "format"),
    *("prompt", "json", "once", "headless", "load", "simulate", "on"),
}
"""What belongs to one call, not to a person."""


def _kind(hint: Any) -> type | None:
    """int, float, bool or str (also for paths and choices); None for lists."""
    options = [h for h in get_args(hint) if h is not type(None)] if get_origin(hint) is UnionType else [hint]
    kind = options[0]
    if get_origin(kind) is Literal or kind is Path:
        return str
    return kind if kind in (int, float, bool, str) else None
