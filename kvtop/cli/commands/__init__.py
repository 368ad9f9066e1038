"""All commands, in the order of the help."""

from __future__ import annotations

from engine import Setting
from kvtop.cli.command import Command
from kvtop.cli.commands import bench, config, demo, explain, replay, run, shot, size, verify

_OTHERS = (
    run.COMMAND,
    replay.COMMAND,
    demo.COMMAND,
    shot.COMMAND,
    verify.COMMAND,
    explain.COMMAND,
    size.COMMAND,
    bench.COMMAND,
)
COMMANDS: tuple[Command, ...] = (*_OTHERS, config.command(_OTHERS))


def all_settings() -> dict[str, Setting]:
    """Every option by its name; of two with one name that of the first command."""
    found: dict[str, Setting] = {}
    for command in COMMANDS:
        found = {n: s for n, s in command.settings.items() if not s.knob.argument} | found
    return found
