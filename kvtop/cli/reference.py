"""docs/options.md: every option by group, made from the knobs. `python -m kvtop.cli.reference` prints it.

Owns the layout of the page. Invariant: it holds what the code takes and nothing else; a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine import Setting
from kvtop.cli.command import Command
from kvtop.cli.commands import COMMANDS
from kvtop.cli.options import default, grouped, metavar

_HEAD = """# Options

Every option is a flag, a variable and a key of the config file under the same name: `--num-blocks 64`,
`KVTOP_NUM_BLOCKS=64`, `num_blocks = 64`. A flag overrides the variable, the variable overrides the file, and the
file overrides the default. A switch has its opposite, like `--no-motion`; in the file it is `true` or `false`. An
option that may be given several times is a list in the file, and one value as a variable. `kvtop config show` prints
what is set and where, `kvtop config path` prints the path of the file, and `kvtop config default` prints a file with
every key.

This page is made from the code (`make options`)."""

_RULE = "|---|---|---|---|---|"


def page(commands: Sequence[Command]) -> str:
    """The page in Markdown."""
    lines = [_HEAD]
    for group, settings in grouped(commands):
        lines += [
            "",
            f"## {group.capitalize()}",
            "",
            "| flag | takes | default | commands | |",
            _RULE,
        ]
        lines += [_row(s, [c.name for c in commands if _has(c, s)]) for s in settings]
    return "\n".join(lines) + "\n"


def _has(command: Command, setting: Setting) -> bool:
    own = command.settings.get(setting.name)
    return own is not None and own.knob.help == setting.knob.help


def _row(setting: Setting, names: list[str]) -> str:
    flags = f"`{', '.join((*setting.knob.short, setting.flag))} {metavar(setting)}".rstrip() + "`"
    cells = (flags, setting.values, default(setting), ", ".join(names), setting.knob.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Prints the page."""
    print(page([c for c in COMMANDS if c.name != "config"]), end="")


if __name__ == "__main__":
    main()
