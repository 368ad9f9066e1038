"""The folders of kvtop, and the user's config file.

Owns the folders (data next to the package in a checkout, XDG folders of the user) and the reading of `config.toml`. Its
keys are the long names of the options, with the same checks as on the command line. Precedence: flag, then variable
(`KVTOP_…`), then file, then default. An error is one line that names the file and the key.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path, user_state_path

from engine import KnobError, Setting, SetupError
from kvtop.text import cut, safe_text
from kvtop.values import from_toml


def data_folder(name: str) -> Path:
    """The folder `name` (themes, demos): next to the package in a checkout, otherwise inside the package.

    In an editable install the copies inside the package may be out of date, so the checkout's folder is used. A
    checkout has a pyproject.toml; without one, a folder next to the package belongs to something else.
    """
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    return package / name


def config_folder() -> Path:
    """`$XDG_CONFIG_HOME/kvtop`: config.toml and themes/."""
    return user_config_path("kvtop", appauthor=False)


def log_file() -> Path:
    """`$XDG_STATE_HOME/kvtop/kvtop.log`: what was printed while the dashboard used the terminal."""
    return user_state_path("kvtop", appauthor=False) / "kvtop.log"


def config_file() -> Path:
    """The file named by KVTOP_CONFIG, else config.toml in the user's folder. It need not exist."""
    named = os.environ.get("KVTOP_CONFIG")
    return Path(named).expanduser() if named else config_folder() / "config.toml"


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The contents of a TOML file, and its text. Raises SetupError with file, line and reason."""
    try:
        text = path.read_text("utf-8")
        return tomllib.loads(text), text
    except OSError as error:
        raise SetupError(_line(path, 0, f"cannot be read: {error.strerror or error}")) from None
    except UnicodeDecodeError:
        raise SetupError(_line(path, 0, "is not UTF-8 text")) from None
    except (ValueError, RecursionError) as error:  # ValueError also for a number with thousands of digits
        where = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        what = str(error)[: where.start()] if where else str(error)
        raise SetupError(_line(path, int(where[1]) if where else 0, f"is not TOML: {what}")) from None


def wrong(path: Path, text: str, table: str, key: str, what: str) -> SetupError:
    """The error for `key` in `[table]` of a file with this text. An empty table is the top level."""
    name = f"{table}.{key}" if table else key
    return SetupError(_line(path, _line_of(text, table, key), f"{name}: {what}"))


def load_settings(settings: Mapping[str, Setting], path: Path | None = None) -> dict[str, Any]:
    """Values of the config file by option name with underscores. A missing file has no values.

    Raises SetupError for an unknown key and for a value that its setting does not accept. A file named by KVTOP_CONFIG
    or `path` must exist.
    """
    file = path or config_file()
    if path is None and "KVTOP_CONFIG" not in os.environ and not file.is_file():
        return {}
    document, text = read_toml(file)
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        setting = settings.get(name)
        if setting is None:
            close = difflib.get_close_matches(name, settings, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; `kvtop config default` lists all"
            raise wrong(file, text, "", key, f"no such option{hint}")
        if name in values:
            raise wrong(file, text, "", key, "is set twice, with dashes and with underscores")
        try:
            values[name] = from_toml(setting, value)
        except KnobError as error:
            raise wrong(file, text, "", key, error.what) from None
    return values


def _line(path: Path, line: int, what: str) -> str:
    """`file:line: what` in at most 200 characters. Only the start of a long path is cut."""
    home = str(Path.home())
    shown = str(path)
    if shown.startswith(home + os.sep):
        shown = "~" + shown[len(home) :]
    shown = safe_text(shown)
    if len(shown) > 70:
        shown = "…" + shown[-69:]
    return cut(f"{shown}:{line}: {safe_text(what)}" if line else f"{shown}: {safe_text(what)}", 200)


def _line_of(text: str, table: str, key: str) -> int:
    """Line on which `key` of `[table]` is set; else the line of `[table]`; else 0."""
    current, head = "", 0
    assignment = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[.=]""")
    for number, line in enumerate(text.splitlines(), 1):
        if section := re.match(r"""\s*\[\s*["']?([^"'\]]+?)["']?\s*\]""", line):
            current = section[1]
            if current == (table or key):
                head = number
        elif current == table and assignment.match(line):
            return number
    return head
