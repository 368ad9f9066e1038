"""One call of the program: words in, exit code out.

Owns the exit codes and what lies between the words and a command: the config file's values, errors as one line on
stderr, a reader of stdout that went away. Exit codes: 0 ok; 1 a check failed, all requests failed, or the engine or
the recording ended early; 2 bad input or set-up, or all requests were refused; 130 ctrl+c, and without a dashboard
143 SIGTERM and 129 SIGHUP. Imports no torch and no textual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from engine import SetupError
from kvtop import __version__
from kvtop.cli.commands import COMMANDS, all_settings
from kvtop.cli.options import group_command
from kvtop.text import cut, safe_text

_HELP = {"-h", "--help"}
_TOP = {*_HELP, "-V", "--version"}


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `kvtop` script; exits."""
    code = invoke(sys.argv[1:] if args is None else args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    sys.exit(code)


def invoke(args: Sequence[str]) -> int:
    """One command line; returns the exit code. Errors are one line on stderr, at most 200 characters."""
    words = list(args)
    if not words or (words[0].startswith("-") and words[0] not in _TOP):
        words.insert(0, "run")
    try:
        # Not command.main: it turns a broken pipe into exit code 1.
        with program().make_context("kvtop", words, default_map=_from_file(words)) as context:
            code = context.command.invoke(context)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except click.ClickException as error:
        return _wrong(error.format_message())
    except SetupError as error:
        return _wrong(str(error))
    except OSError as error:
        return _wrong(f"{error.filename or 'the system'}: {error.strerror or error}")


def program() -> click.Group:
    """All commands, as click runs them."""

    def top(version: bool = False) -> None:
        if version:
            print(f"kvtop {__version__}")
            click.get_current_context().exit()

    version = click.Option(["-V", "--version"], is_flag=True, is_eager=True, help="Print the version.")
    return group_command(
        COMMANDS,
        top,
        params=[version],
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        help="Watch the KV blocks of an LLM engine. Plain `kvtop` is `kvtop run`: a dashboard over a live model.",
        epilog="Every option can be set as KVTOP_… in the environment or in config.toml; "
        "see `kvtop config default`.",
    )


def _from_file(words: Sequence[str]) -> dict[str, Any]:
    """The config file's values for the command of these words; none for its help."""
    command = next((c for c in COMMANDS if c.name == words[0]), None)
    if command is None or _HELP & set(words) or (command.name == "config" and "show" not in words):
        return {}
    from kvtop.settings import load_settings

    own = {n: s for n, s in command.settings.items() if not s.knob.argument}
    return {command.name: {n: v for n, v in load_settings(all_settings() | own).items() if n in own}}


def _forget_stdout() -> None:
    """Nobody reads it any more: what is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _wrong(text: str) -> int:
    line = " ".join(safe_text(text.replace("\n", " ")).split())
    print(cut(f"kvtop: {line}", 200), file=sys.stderr)
    return 2
