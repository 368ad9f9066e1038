"""`kvtop config`: what is set, where the file is, and a file to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from engine import Knob
from kvtop.cli.command import Command, Given
from kvtop.cli.options import example, grouped
from kvtop.settings import config_file
from kvtop.text import safe_text
from kvtop.values import to_toml

_HERE = ("config",)


@dataclass(frozen=True, slots=True)
class Config:
    """What to print."""

    # fmt: off
    what: Annotated[Literal["show", "path", "default"], Knob("Every option with its value and source; the path of the file; a file with every key.", "output", _HERE, argument=True, metavar="show|path|default")] = "show"
    # fmt: on


def run(given: Given) -> int:
    """Prints it."""
    what = given.get("what")
    if what == "path":
        print(safe_text(str(config_file())))
    elif what == "default":
        print("\n".join(default_file(given.command)))
    else:
        print("\n".join(shown(given)))
    return 0


def shown(given: Given) -> list[str]:
    """A line an option: its value and where the value comes from."""
    lines = []
    for _, settings in grouped([given.command]):
        for setting in settings:
            value, source = given.get(setting.name), given.source(setting.name)
            where = {"variable": f"variable {setting.variable}", "file": f"file {config_file()}"}.get(
                source, source
            )
            text = "(not set)" if value is None else safe_text(to_toml(value))
            lines.append(f"{setting.name:<38}{text:<24}  {safe_text(where)}")
    return lines


def default_file(command: Command) -> list[str]:
    """A config.toml with every key, each in a comment of its own: without a # in front it reads as it is written."""
    lines = [
        "# Options of kvtop. A flag overrides the variable KVTOP_…, and the variable overrides this file.",
        f"# It lies at {safe_text(str(config_file()))}, or where KVTOP_CONFIG says.",
    ]
    for group, settings in grouped([command]):
        lines += ["", f"# ---- {group}"]
        for setting in settings:
            lines += ["", f"# {setting.knob.help}", f"# Takes {setting.values}."]
            lines.append(f"# {setting.name} = {to_toml(example(setting))}")
    return lines


def command(others: Sequence[Command]) -> Command:
    """The command; its options are those of all others, so that `show` can say what each would be."""
    text = "Options that are set, the config file's path, or a config file with every key."
    return Command("config", text, (Config,), run, others=tuple(others))
