"""Values as people write them: words of the command line and of variables, values of the config file.

Owns the way from such a value to the one that a setting holds. The kind and the range are the setting's own; a wrong
value raises KnobError, which leaves out where the value came from: the caller names the flag, the variable or the key.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine import KnobError, Setting
from kvtop.text import cut, safe_text

_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", 1)
    for name, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_SWITCH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


def parse_size(text: str, name: str) -> int:
    """ "192MiB", "2G", "1.5GiB", "300MB" (decimal) or plain bytes -> bytes. Raises KnobError for `name`."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    shown = repr(cut(safe_text(text), 30))
    if not found or unit is None:
        raise KnobError("{} must be a size like 192MiB, 2G or 1.5GiB, not ", name, value=shown)
    size = round(float(found[1]) * unit)
    if size >= 1 << 60:
        raise KnobError("{} must be under 2^60 bytes, not ", name, value=shown)
    return size


def from_word(setting: Setting, word: str) -> Any:
    """One word; of a setting that takes several, one of them."""
    return _one(setting, _parsed(setting, word))


def from_toml(setting: Setting, value: Any) -> Any:
    """A value of the config file. A list may be written as its only member, a size as a number."""
    if setting.many:
        return setting.check(value if isinstance(value, list) else [value])
    return setting.check(_parsed(setting, value) if setting.is_size and isinstance(value, str) else value)


def to_toml(value: Any) -> str:
    """The value as the config file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    return msgspec.json.encode(str(value)).decode()  # a basic string of TOML takes JSON's escapes


def _one(setting: Setting, value: Any) -> Any:
    return setting.check((value,))[0] if setting.many else setting.check(value)


def _parsed(setting: Setting, word: str) -> Any:
    """The word in the setting's kind; as it is where it cannot be that, which `check` then says."""
    if setting.is_size:
        return parse_size(word, setting.name)
    if setting.kind is bool:
        return _SWITCH.get(word.strip().lower(), word)
    if setting.kind in (int, float):
        try:
            return msgspec.convert(word.strip(), setting.kind, strict=False)
        except msgspec.ValidationError:
            pass
    return word
