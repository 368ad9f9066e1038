"""Command: one command of the program as data, and Given: what one command line gave to it.

Owns the way from the settings of dataclasses to a command's options, and back to instances of those classes.
Invariant: a value that nobody gave is the default of its field, which is written nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine import KnobError, Setting, SetupError, settings_of
from kvtop.settings import config_file

Source = Literal["flag", "variable", "file", "default"]
"""Where a value comes from, the strongest first."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Command:
    """takes: the dataclasses whose knobs are its options, as far as those name this command."""

    name: str
    help: str
    takes: tuple[type, ...]
    run: Callable[[Given], int]
    epilog: str = ""
    others: tuple[Command, ...] = ()
    """Commands whose options it has, too."""

    @property
    def settings(self) -> dict[str, Setting]:
        """Its options and arguments by name."""
        found = {
            s.name: s for owner in self.takes for s in settings_of(owner) if self.name in s.knob.commands
        }
        for other in self.others:
            found = {n: s for n, s in other.settings.items() if not s.knob.argument} | found
        return found


@dataclass(frozen=True)
class Given:
    """The values that a command line, the variables and the config file gave, and which of them did."""

    command: Command
    values: Mapping[str, Any]
    sources: Mapping[str, Source] = field(default_factory=dict)

    def make(self, cls: type[_T], **more: Any) -> _T:
        """An instance of one of the classes that the command takes; `more` goes over what was given.
        Raises SetupError that names a wrong value as it was written."""
        settings = self.command.settings
        owner = next((s.owner for s in settings.values() if issubclass(s.owner, cls)), cls)
        given = {n: v for n, v in self.values.items() if n in settings and settings[n].owner is owner}
        try:
            return owner(**given | more)
        except KnobError as error:
            raise SetupError(error.named(self.spell)) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of one option, or of its field's default."""
        setting = self.command.settings[name]
        return self.values.get(name, setting.default if default is None else default)

    def source(self, name: str) -> Source:
        """Where the value of an option comes from."""
        return self.sources.get(name, "default")

    def spell(self, name: str) -> str:
        """The name of an option where its value was written: a flag, a variable or a key of the config file."""
        return spelled(name, self.source(name), config_file())

    def blamed(self, error: SetupError) -> SetupError:
        """The error, which starts with an option: named as it was written, if that was no flag."""
        found = re.match(r"--([a-z][a-z-]*)", str(error))
        name = found[1].replace("-", "_") if found else ""
        if found is None or self.source(name) not in ("variable", "file"):
            return error
        return SetupError(self.spell(name) + str(error)[found.end() :])


def spelled(name: str, source: Source, file: Path) -> str:
    """`name` as a flag, a variable, or a key of the config file."""
    dashed = name.replace("_", "-")
    if source == "variable":
        return f"KVTOP_{name.upper()}"
    return f"{dashed} in {file.name}" if source == "file" else f"--{dashed}"
