"""From settings to click: options, arguments, and help in groups.

Owns how an option looks and how its word becomes a value. Everything else about it is in its field. What a person
wrote wrongly is one SetupError that names the flag or the variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import click
from click.core import ParameterSource

from engine import Group, KnobError, Setting, SetupError
from kvtop.cli.command import Command, Given, Source
from kvtop.values import from_toml, from_word

GROUPS: tuple[str, ...] = get_args(Group)
_SOURCES: dict[ParameterSource, Source] = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "variable",
    ParameterSource.DEFAULT_MAP: "file",
}


def click_command(command: Command) -> click.Command:
    """The command as click runs it; the return value is the exit code."""

    def run(**values: Any) -> int:
        context = click.get_current_context()
        sources = {n: _SOURCES.get(s) for n in values if (s := context.get_parameter_source(n)) is not None}
        by = {n: s for n, s in sources.items() if s is not None}
        given = Given(command, {n: values[n] for n in by}, by)
        try:
            return command.run(given)
        except SetupError as error:
            raise given.blamed(error) from None

    # A command that has the options of others asks for none of them.
    settings = command.settings.values()
    made = [_parameter(s, required=s.knob.required and not command.others) for s in settings]
    return _Command(command.name, params=made, callback=run, help=command.help, epilog=command.epilog)


def _parameter(setting: Setting, *, required: bool) -> click.Parameter:
    if setting.knob.argument:
        return click.Argument([setting.name], type=_Word(setting), metavar=metavar(setting))
    return _Option(setting, required=required)


class _Word(click.ParamType[Any]):
    """A word becomes the setting's value. What is no text was checked where it was read, in the config file."""

    name = "word"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or _source(param, ctx) == "file":
            return value
        return _read(self.setting, value, param, ctx)


class _Switch(click.types.BoolParamType):
    """--name or --no-name; as a variable true or false."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        return value if isinstance(value, bool) else _read(self.setting, str(value), param, ctx)


def _read(setting: Setting, word: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    try:
        return from_word(setting, word)
    except KnobError as error:
        name = metavar(setting) if setting.knob.argument else setting.flag
        if _source(param, ctx) == "variable":
            name = setting.variable
        raise SetupError(error.named(lambda _: name)) from None


def _source(param: click.Parameter | None, ctx: click.Context | None) -> Source | None:
    if param is None or ctx is None or param.name is None:
        return None
    source = ctx.get_parameter_source(param.name)
    return None if source is None else _SOURCES.get(source)


class _Option(click.Option):
    """An option of a setting. Nothing is its default: the field has it."""

    def __init__(self, setting: Setting, *, required: bool) -> None:
        self.setting = setting
        switch = setting.kind is bool
        flags = f"{setting.flag}/--no-{setting.flag[2:]}" if switch else setting.flag
        super().__init__(
            [setting.name, *setting.knob.short, flags],
            type=_Switch(setting) if switch else _Word(setting),
            multiple=setting.many,
            # In newer versions of click a default of None counts as a value.
            **({"required": True} if required else {"default": None}),
            envvar=setting.variable,
            help=setting.knob.help,
        )

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """A variable of an option that may be given several times holds one value: the words of a prompt are
        not prompts."""
        value = self.resolve_envvar_value(ctx)
        return [value] if self.multiple and value is not None else value


class _Command(click.Command):
    """A command whose help shows the options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A heading a group, where there are several."""
        options = [p.setting for p in self.params if isinstance(p, _Option)]
        groups = [g for g in GROUPS if any(s.knob.group == g for s in options)]
        for group in groups:
            rows = [(_left(s), _right(s)) for s in options if s.knob.group == group]
            with formatter.section(group.capitalize() if len(groups) > 1 else "Options"):
                formatter.write_dl(rows, col_max=32)
        with formatter.section("Help"):
            formatter.write_dl([("-h, --help", "Show this message and exit.")])


def metavar(setting: Setting) -> str:
    """What help writes for the value; nothing for a switch."""
    if setting.kind is bool:
        return ""
    if setting.knob.metavar or setting.choices:
        return setting.knob.metavar or "|".join(setting.choices)
    return "SIZE" if setting.is_size else {int: "N", float: "X"}.get(setting.kind, "TEXT")


def _left(setting: Setting) -> str:
    name = setting.flag
    if setting.kind is bool and setting.default is not False:
        name = f"{name} / --no-{name[2:]}"
    return f"{', '.join((*setting.knob.short, name))} {metavar(setting)}".rstrip()


def _right(setting: Setting) -> str:
    return f"{setting.knob.help}  [{shown}]" if (shown := default(setting)) else setting.knob.help


def default(setting: Setting) -> str:
    """The default as help writes it; empty where there is none to tell."""
    value = setting.default
    if value is None or value is False or value in ((), ""):
        return ""
    if value is True:
        return "on"
    if setting.is_size:
        return f"{value >> 30}GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def group_command(commands: Sequence[Command], top: Callable[..., None], **more: Any) -> click.Group:
    """The program: `top` runs before any command."""
    group = click.Group("kvtop", callback=top, **more)
    for command in commands:
        group.add_command(click_command(command))
    return group


def grouped(commands: Sequence[Command]) -> Iterator[tuple[str, list[Setting]]]:
    """Every option of the commands by group; those that share name and help once."""
    found: dict[tuple[str, str], Setting] = {}
    for command in commands:
        for setting in command.settings.values():
            if not setting.knob.argument:
                found.setdefault((setting.name, setting.knob.help), setting)
    for group in GROUPS:
        settings = [s for s in found.values() if s.knob.group == group]
        if settings:
            yield group, settings


def example(setting: Setting) -> Any:
    """A value for the config file: the default, or where there is none one that may be set."""
    knob = setting.knob
    if setting.default not in (None, ()):
        return setting.default
    if knob.example is not None:
        value: Any = [knob.example] if setting.many else knob.example
    elif setting.choices:
        value = setting.choices[0]
    elif setting.kind is bool:
        value = True
    elif setting.kind in (int, float):
        value = next((v for v in (knob.le if knob.le == 1 else None, knob.ge, 1) if v is not None), 1)
    else:
        value = "…"
    from_toml(setting, value)  # raises where it is none
    return value
