"""Themes: TOML files turned into Textual themes, and the Palette from which widgets take their styles.

Owns every colour on the screen. A file gives Textual's own colours plus kvtop's names for block states, marks
and graphs; a name that it leaves out comes from the default theme of the same lightness. Any theme works,
also Textual's built-in ones and a user's; a wrong file is one line with its name, line and key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

from engine import SetupError
from kvtop.paint.palette import GROUPS, VARIABLES, Palette
from kvtop.settings import config_folder, data_folder, read_toml, wrong
from kvtop.text import cut, safe_text

DEFAULT = "kvtop-dark"
"""Also the source of what a dark theme leaves out; `kvtop-light` is that of the light ones."""

_ORDER = (DEFAULT, "kvtop-light", "mono", "ansi")
"""In which themes are listed and switched; others follow by name."""

_COLOURS = (
    *("primary", "secondary", "accent", "foreground", "background", "surface", "panel", "boost"),
    *("warning", "error", "success"),
)
Table = dict[str, Any]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A theme file. Colours are text; whether a text is a colour is checked key by key."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[\w.-]{1,40}\Z")]
    dark: bool = True
    ansi: bool = False
    author: str = ""
    description: str = ""
    colors: Table = {}
    blocks: Table = {}
    marks: Table = {}
    graphs: Table = {}
    variables: Table = {}


Fail = Callable[[str, str, str], SetupError]
"""(table, key, what is wrong) to the error."""

_STYLE_WORDS = frozenset("none not bold b italic i underline u reverse dim strike".split())


def default_name(no_color: bool) -> str:
    """Theme of a start without --theme. Under NO_COLOR the terminal's own background stays."""
    return "ansi" if no_color else DEFAULT


def user_folder() -> Path:
    """Where a user's own themes lie."""
    return config_folder() / "themes"


def load(path: Path) -> Theme:
    """The theme in a file. Raises SetupError: file, line, key and what is wrong."""
    document, text = read_toml(path)

    def fail(table: str, key: str, what: str) -> SetupError:
        return wrong(path, text, table, key, what)

    try:
        file = msgspec.convert({"name": path.stem, **document}, _File)
    except msgspec.ValidationError as error:
        raise _explained(error, fail) from None
    colours: dict[str, Any] = _colours(file.colors, "colors", _COLOURS, fail)
    if "primary" not in colours:
        raise fail("colors", "primary", "is missing; every theme needs it")
    # Textual's widgets refer to variables that only its own two native themes define.
    variables = (
        dict(BUILTIN_THEMES["ansi-dark" if file.dark else "ansi-light"].variables) if file.ansi else {}
    )
    for table, (prefix, keys) in GROUPS.items():
        found = _colours(getattr(file, table), table, keys, fail)
        variables |= {f"{prefix}-{key}": value for key, value in found.items()}
    for key, value in file.variables.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not _is_css(value):
            raise fail("variables", key, "must be a Textual variable with a colour or text style in quotes")
        variables[key] = value
    return Theme(name=file.name, dark=file.dark, ansi=file.ansi, variables=variables, **colours)


def _explained(error: msgspec.ValidationError, fail: Fail) -> SetupError:
    """The line for what msgspec found wrong with a key of the file itself."""
    said = str(error)
    if unknown := re.search(r"unknown field `(.*)`", said, re.DOTALL):
        return fail("", unknown[1], f"unknown; there are {_list(_File.__struct_fields__)}")
    found = re.search(r"`\$\.(\w+)", said)
    key = found[1] if found else ""
    if "matching regex" in said:
        return fail("", key, "must be letters, digits, dots and dashes, at most 40")
    wanted = re.search(r"Expected `(\w+)", said)
    what = {"bool": "true or false", "object": f"a table: [{key}]"}.get(
        wanted[1] if wanted else "", "text in quotes"
    )
    return fail("", key, f"must be {what}")


def _colours(table: dict[str, Any], name: str, keys: Iterable[str], fail: Fail) -> dict[str, str]:
    for key, value in table.items():
        if key not in keys:
            raise fail(name, key, f"unknown; there are {_list(keys)}")
        colour = _parse(value)
        if colour is None or colour.a != 1:
            shown = cut(safe_text(repr(value)), 30)
            raise fail(name, key, f"{shown} is no colour; write '#rrggbb' or 'ansi_bright_blue'")
    return dict(table)


def _parse(value: object) -> Color | None:
    try:
        return Color.parse(value) if isinstance(value, str) else None
    except ColorParseError:
        return None


def _is_css(value: object) -> bool:
    """A colour, perhaps with a percentage, or text styles: all that a theme variable may hold."""
    if not isinstance(value, str) or not value.split():
        return False
    first, *rest = value.split()
    if first == "auto" or _parse(first) is not None:
        return not rest or (len(rest) == 1 and re.fullmatch(r"\d{1,3}%", rest[0]) is not None)
    return _parse(value) is not None or set(value.split()) <= _STYLE_WORDS


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def all_themes() -> tuple[list[Theme], list[str]]:
    """Packaged themes, then the user's (one of the same name takes the place of a packaged one), and a
    line for each of the user's files that cannot be used."""
    themes = {theme.name: theme for theme in _packaged()}
    problems = []
    for path in sorted(user_folder().glob("*.toml")):
        try:
            theme = load(path)
        except SetupError as error:
            problems.append(str(error))
        else:
            themes[theme.name] = theme
    return list(themes.values()), problems


def find(name: str) -> Theme:
    """The theme of `--theme NAME|FILE`: a .toml file, else a user's, a packaged or one of Textual's."""
    if name.endswith(".toml"):
        return load(Path(name).expanduser())
    own = user_folder() / f"{name}.toml"
    if Path(name).name == name and own.is_file():
        return load(own)  # asked for by name, its fault is an error and not a notice
    themes, _problems = all_themes()
    named = {theme.name: theme for theme in themes}
    theme = named.get(name) or BUILTIN_THEMES.get(name)
    if theme is None:
        shown = cut(safe_text(name), 40)
        raise SetupError(cut(f"no theme {shown}; there are {_list(named)}, or give a .toml file", 200))
    return theme


def defaults(dark: bool) -> dict[str, str]:
    """kvtop's variables for a theme that does not have them (App.get_theme_variable_defaults)."""
    wanted = DEFAULT if dark else "kvtop-light"
    return next(dict(theme.variables) for theme in _packaged() if theme.name == wanted)


def palette(theme: Theme, no_color: bool = False) -> Palette:
    """Styles for a theme, Textual's own included; no_color: App.no_color."""
    variables = defaults(theme.dark) | theme.to_color_system().generate() | theme.variables
    return Palette(theme.name, theme.dark, theme.ansi, variables, no_color)


@lru_cache(1)
def _packaged() -> tuple[Theme, ...]:
    files = data_folder("themes").glob("*.toml")
    rank = {name: place for place, name in enumerate(_ORDER)}
    themes = tuple(load(path) for path in sorted(files, key=lambda p: (rank.get(p.stem, len(rank)), p.stem)))
    complete = {theme.name for theme in themes if set(VARIABLES) <= set(theme.variables)}
    if not {DEFAULT, "kvtop-light"} <= complete:
        raise SetupError("the themes are missing from this installation; install kvtop-tui again")
    return themes
