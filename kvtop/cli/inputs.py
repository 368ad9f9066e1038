"""What the command line may ask: prompts, system texts, sizes. Words in, checked values out.

Owns the forms of `--prompts`, `--system` and SIZE. Whatever is wrong is one SetupError that names the file
and the line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine import SamplingParams, SetupError
from kvtop.text import cut, safe_text

LARGEST_FILE = 64 << 20
"""Bytes of a file of prompts or a system text."""

_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", 1)
    for name, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_SAMPLING = {
    "max_tokens": int,
    "n": int,
    "beam_width": int,
    "length_penalty": float,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
    "ignore_eos": bool,
    "min_tokens": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logprobs": int,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, in a conversation of its own. A prompt of token ids goes in as it is."""

    prompt: str | list[int]
    system: str | None = None
    system_name: str = ""
    """File that the system text came from."""
    salt: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower is sooner, where the engine's policy heeds it."""


def parse_size(text: str, option: str) -> int:
    """ "192MiB", "2G", "1.5GiB", "300MB" (decimal) or plain bytes -> bytes. Raises SetupError."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if not found or unit is None:
        raise SetupError(f"{option} {cut(safe_text(text), 30)!r}: write a size like 192MiB, 2G or 1.5GiB")
    size = round(float(found[1]) * unit)
    if not 0 < size < 1 << 60:
        raise SetupError(f"{option} {cut(safe_text(text), 30)!r}: between 1 byte and 2^60 bytes, please")
    return size


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


def read_prompts(file: str, like: Ask) -> list[Ask]:
    """--prompts FILE: one prompt a line, or JSONL with {"prompt": …, "system": …, "max_tokens": …, …}.
    What a line leaves out is as in `like`. Raises SetupError with the line's number."""
    path = Path(file).expanduser()
    lines = [(n, x.strip()) for n, x in enumerate(read_text(path, "--prompts").splitlines(), 1) if x.strip()]
    if not lines:
        raise SetupError(f"--prompts: {cut(safe_text(file), 80)} holds no prompt")
    if path.suffix != ".jsonl" and not lines[0][1].startswith("{"):
        return [replace(like, prompt=text) for _, text in lines]
    return [_from_json(text, f"--prompts: {cut(safe_text(path.name), 60)}:{n}", like) for n, text in lines]


def _from_json(text: str, where: str, like: Ask) -> Ask:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SetupError(cut(f"{where}: not JSON: {safe_text(str(error))}", 200)) from None
    if not isinstance(row, dict) or not _is_prompt(row.get("prompt")):
        raise SetupError(f'{where}: needs an object with "prompt": a text or a list of token ids')
    sampling: dict[str, Any] = {}
    ask = replace(like, prompt=row.pop("prompt"))
    for name, value in row.items():
        if name in _SAMPLING:
            kind = _SAMPLING[name]
            good = type(value) is kind or (kind is float and type(value) is int)
            _need(good or value is None, where, name, f"must be a {kind.__name__}")
            sampling[name] = value
        elif name in ("stop", "stop_token_ids", "bad_words"):
            kind = int if name == "stop_token_ids" else str
            value = [value] if type(value) is kind else value
            good = isinstance(value, list) and all(type(v) is kind for v in value)
            _need(good, where, name, f"must be a list of {kind.__name__}")
            sampling[name] = tuple(value)
        elif name == "bad_word_ids":
            good = isinstance(value, list) and all(isinstance(w, list) for w in value)
            good = good and all(type(i) is int for w in value for i in w)
            _need(good, where, name, "must be a list of lists of token ids")
            sampling[name] = tuple(map(tuple, value))
        elif name == "logit_bias":
            sampling[name] = _bias(value, where)
        elif name == "priority":
            _need(type(value) is int and abs(value) < 2**31, where, name, "must be a whole number")
            ask = replace(ask, priority=value)
        elif name in ("system", "salt"):
            _need(value is None or isinstance(value, str), where, name, "must be a text")
            system, file = read_system(value) if name == "system" else (ask.system, ask.system_name)
            salt = value if name == "salt" else ask.salt
            ask = replace(ask, system=system, system_name=file, salt=salt)
        else:
            _need(False, where, name, "no such field")
    try:
        return replace(ask, params=replace(like.params, **sampling))
    except (ValueError, TypeError) as error:
        raise SetupError(cut(f"{where}: {error}", 200)) from None


def _bias(value: Any, where: str) -> dict[int, float]:
    """An object's keys are texts: {"42": -100}."""
    good = isinstance(value, dict) and all(k.isascii() and k.isdigit() and len(k) < 10 for k in value)
    good = good and all(type(b) in (int, float) for b in value.values())
    _need(good, where, "logit_bias", "must be an object of token ids and numbers")
    return {int(k): b for k, b in value.items()}


def _is_prompt(value: Any) -> bool:
    whole = isinstance(value, list) and all(type(t) is int and -(2**31) <= t < 2**31 for t in value)
    return isinstance(value, str) or whole


def _need(ok: bool, where: str, name: str, what: str) -> None:
    if not ok:
        raise SetupError(cut(f"{where}: {safe_text(name)[:40]!r}: {what}", 200))


def sampling(**given: Any) -> SamplingParams:
    """SamplingParams from options; None keeps a field's default. Raises SetupError that names the option."""
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, Sequence) else v for k, v in given.items() if v is not None
    }
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise SetupError(f"--{name.replace('_', '-')} {rest}") from None
