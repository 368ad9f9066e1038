"""Prompts of the command line, from files and as words.

Owns the forms of `--prompts` and `--system`. What is wrong is one SetupError that names the file, the line and the
field; what a field of SamplingParams takes is its own affair.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine import KnobError, SamplingParams, SetupError, settings_of
from kvtop.text import cut, safe_text

LARGEST_FILE = 64 << 20
"""Bytes of a file of prompts or a system text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, in a conversation of its own. Token ids go in as they are."""

    prompt: str | list[int]
    system: str | None = None
    system_name: str = ""
    """File that the system text came from."""
    salt: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower is sooner, where the engine's policy heeds it."""


class _Line(msgspec.Struct, forbid_unknown_fields=False):
    """What a line of JSONL holds besides the fields of SamplingParams."""

    prompt: str | list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]
    system: str | msgspec.UnsetType | None = msgspec.UNSET
    salt: str | msgspec.UnsetType | None = msgspec.UNSET
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0


_KINDS = {"system": "a text", "salt": "a text", "priority": "a whole number"}


def read_system(text: str | None) -> tuple[str | None, str]:
    """--system: a text, or @FILE -> (text, file name). Raises SetupError."""
    if text is None or not text.startswith("@"):
        return text, ""
    path = Path(text[1:]).expanduser()
    return read_text(path, "--system").strip(), path.name


def read_text(path: Path, option: str) -> str:
    """A UTF-8 file; `-` is standard input. Raises SetupError."""
    shown = cut(safe_text(str(path)), 80)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(LARGEST_FILE + 1)
        else:
            with path.open("rb") as file:
                data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise SetupError(f"{option}: {shown}: {error.strerror or error}") from None
    if len(data) > LARGEST_FILE:
        raise SetupError(f"{option}: {shown} has over {LARGEST_FILE >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SetupError(f"{option}: {shown} is not UTF-8 text (byte {error.start})") from None


def read_prompts(file: str, like: Prompt) -> list[Prompt]:
    """--prompts FILE: one prompt a line, or JSONL with {"prompt": …, "system": …, "max_tokens": …, …}.
    What a line leaves out is as in `like`. Raises SetupError with the line's number."""
    path = Path(file).expanduser()
    lines = [(n, x.strip()) for n, x in enumerate(read_text(path, "--prompts").splitlines(), 1) if x.strip()]
    if not lines:
        raise SetupError(f"--prompts: {cut(safe_text(file), 80)} holds no prompt")
    if path.suffix != ".jsonl" and not lines[0][1].startswith("{"):
        return [replace(like, prompt=text) for _, text in lines]
    return [_from_json(text, f"--prompts: {cut(safe_text(path.name), 60)}:{n}", like) for n, text in lines]


def _from_json(text: str, where: str, like: Prompt) -> Prompt:
    try:
        row = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise SetupError(cut(f"{where}: not JSON: {safe_text(str(error))}", 200)) from None
    try:
        line = msgspec.convert(row, _Line)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("`$.")[2].rstrip("`")
        if key in _KINDS:
            raise _wrong(where, key, f"must be {_KINDS[key]}, not {row[key]!r:.40}") from None
        raise SetupError(f'{where}: needs an object with "prompt": a text or a list of token ids') from None
    prompt = replace(like, prompt=line.prompt, priority=line.priority)
    if line.system is not msgspec.UNSET:
        system, file = read_system(line.system)
        prompt = replace(prompt, system=system, system_name=file)
    if line.salt is not msgspec.UNSET:
        prompt = replace(prompt, salt=line.salt)
    own = {name: value for name, value in row.items() if name not in _Line.__struct_fields__}
    return replace(prompt, params=_params(own, where, like.params))


def _params(row: dict[str, Any], where: str, like: SamplingParams) -> SamplingParams:
    """`like`, changed by the fields of a line."""
    settings = {s.name: s for s in settings_of(SamplingParams)}
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name not in settings:
            raise _wrong(where, name, "no such field")
        try:
            if name == "logit_bias" and isinstance(value, dict):
                value = list(msgspec.convert(value, dict[int, float], str_keys=True).items())
            elif settings[name].many and isinstance(value, str | int):
                value = [value]  # one stop text, word or id
            values[name] = settings[name].check(value)
        except msgspec.ValidationError:
            raise _wrong(where, name, "must be an object of token ids and numbers") from None
        except KnobError as error:
            raise _wrong(where, name, error.what) from None
    try:
        return replace(like, **values)
    except KnobError as error:
        raise SetupError(cut(f"{where}: {error}", 200)) from None


def _wrong(where: str, name: str, what: str) -> SetupError:
    return SetupError(cut(f"{where}: {safe_text(name)[:40]!r}: {safe_text(what)}", 200))
