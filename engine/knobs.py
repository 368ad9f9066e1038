"""Knob: the range, the help and the options of one setting.

Owns the check of a value: its type, its range and the words of the error. A knob is part of the annotation of a
dataclass field. The command line, the KVTOP_ variables, the config file, `kvtop config` and docs/options.md are made
from it. Invariant: a value that has passed `check` has the type and the range of its field, wherever it came from.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache, cached_property
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from engine.errors import SetupError

Group = Literal[
    "model",
    "memory and cache",
    "scheduling",
    "sampling",
    "prompts and loads",
    "simulation",
    "display",
    "output",
]


@dataclass(frozen=True, slots=True)
class Knob:
    """help: one line. ge, gt, le, lt: the range, as in msgspec.Meta. commands: those with this option.

    metavar: the name of the value in help. unit: the unit of a number; `bytes` may be written as a SIZE (2GiB). says:
    the range in words. test: the check of a range that numbers cannot express. short: other spellings of the flag.
    example: a value for the config file if there is no default.
    """

    help: str
    group: Group
    commands: tuple[str, ...] = ("run",)
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    most: int | None = None
    """Most values of a list."""
    unit: str = ""
    metavar: str = ""
    says: str = ""
    test: Callable[[Any], bool] | None = None
    short: tuple[str, ...] = ()
    example: str | int | float | None = None
    required: bool = False
    argument: bool = False
    """It is a positional argument, not an option."""


class KnobError(SetupError, ValueError):
    """A wrong value. knobs: the fields that `template` names, in the order of its {}."""

    def __init__(
        self, template: str, *knobs: str, value: str = "", spell: Callable[[str], str] = str
    ) -> None:
        self.template, self.knobs, self.value = template, knobs, value
        super().__init__(self.named(spell))

    def named(self, spell: Callable[[str], str]) -> str:
        """The message, with the names of fields as `spell` writes them, for example as flags."""
        return self.template.format(*map(spell, self.knobs)) + self.value

    @property
    def what(self) -> str:
        """The message without the name that it starts with."""
        return self.named(lambda _: "").strip()


def flag(name: str) -> str:
    """The option of a field: num_blocks -> --num-blocks."""
    return "--" + name.replace("_", "-")


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a file name",
}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Setting:
    """A field with a knob: its name, type, default and class."""

    name: str
    knob: Knob
    hint: Any
    default: Any
    owner: type

    @cached_property
    def many(self) -> bool:
        """A list of values."""
        return get_origin(self._inner) is tuple

    @property
    def _inner(self) -> Any:
        return _without_none(self.hint)

    @cached_property
    def choices(self) -> tuple[Any, ...]:
        """All possible values, if they are a list of names."""
        return get_args(self._inner) if get_origin(self._inner) is Literal else ()

    @cached_property
    def kind(self) -> type:
        """int, float, bool, str or Path: the type of the value, or of each value in a list. tuple for any other
        type."""
        inner = get_args(self._inner)[0] if self.many else self._inner
        if get_origin(inner) is Literal:
            return str
        return inner if isinstance(inner, type) else tuple

    @property
    def flag(self) -> str:
        """Its option."""
        return flag(self.name)

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"KVTOP_{self.name.upper()}"

    @property
    def is_size(self) -> bool:
        """A number of bytes, which may be written like 192MiB."""
        return self.knob.unit == "bytes"

    @cached_property
    def values(self) -> str:
        """The possible values in words: `between 0 and 64`, `auto, cpu or cuda`, `a text`."""
        if self.knob.says:
            return self.knob.says
        if self.choices:
            return _listed(self.choices)
        return _range(self.knob) or self._kind_text

    @cached_property
    def _kind_text(self) -> str:
        if self.many:
            return f"a list of {_MANY[self.kind]}" if self.kind in _MANY else self.knob.says
        return _KINDS[self.kind]

    def check(self, value: Any) -> Any:
        """The value in its type: a list becomes a tuple, and an int a float where the field is one. Raises
        KnobError."""
        if self.kind in (str, Path) and isinstance(value, PathLike):
            value = str(value)
        try:
            value = msgspec.convert(value, _strict(self.hint, self.kind, self.knob), str_keys=True)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise self._error(value, str(error)) from None
        if not self._passes(value):
            raise self._error(value, "")
        if type(value) is float:
            return value + 0.0  # no negative zero
        return Path(value) if self.kind is Path and isinstance(value, str) else value

    def _passes(self, value: Any) -> bool:
        k = self.knob
        if value is None:
            return True
        for one in value if self.many else (value,):
            if type(one) is float and not math.isfinite(one):
                return False
            if (
                type(one) is int and k.le is not None and one > k.le
            ):  # msgspec checks bounds only up to 2**63 - 1
                return False
            if k.test is not None and not k.test(one):
                return False
        return True

    def _error(self, value: Any, msgspec_says: str) -> KnobError:
        inside = isinstance(value, list | tuple) and self.many
        wrong_kind = "Expected" in msgspec_says and "got" in msgspec_says
        if inside and self.knob.most is not None and len(value) > self.knob.most:
            return KnobError("{} must be at most " + f"{self.knob.most}, not {len(value)}", self.name)
        if wrong_kind and not self.choices:
            simple = inside and self.kind is not tuple
            first = next((v for v in value if not _is(v, self.kind)), value) if simple else value
            return KnobError("{} must be " + f"{self._kind_text}, not ", self.name, value=f"{first!r:.40}")
        first = (
            next((v for v in value if not self._fine(v)), value)
            if inside and self.kind is not tuple
            else value
        )
        return KnobError("{} must be " + f"{self.values}, not ", self.name, value=f"{first!r:.40}")

    def _fine(self, one: Any) -> bool:
        k = self.knob
        try:
            return all(
                bound is None or good
                for bound, good in (
                    (k.ge, k.ge is None or one >= k.ge),
                    (k.gt, k.gt is None or one > k.gt),
                    (k.le, k.le is None or one <= k.le),
                    (k.lt, k.lt is None or one < k.lt),
                    (k.test, k.test is None or k.test(one)),
                )
            )
        except TypeError:
            return False


@cache
def settings_of(owner: type) -> tuple[Setting, ...]:
    """The fields of a dataclass that have a knob."""
    hints: dict[str, Any] = {}
    for cls in reversed(owner.__mro__):
        names = vars(sys.modules[cls.__module__])
        for name, hint in vars(cls).get("__annotations__", {}).items():
            # get_type_hints would fail: other fields may name types that are imported only for type checking.
            hints[name] = eval(hint, names) if str(hint).startswith("Annotated[") else None
    return tuple(_settings(owner, hints))


def _settings(owner: type, hints: dict[str, Any]) -> Iterator[Setting]:
    for field in fields(owner):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            knob = next((m for m in hint.__metadata__ if isinstance(m, Knob)), None)
            if knob is not None:
                yield Setting(field.name, knob, hint.__origin__, _default(field), owner)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def check_fields(instance: Any, *, spell: Callable[[str], str] = str) -> None:
    """Checks every field with a knob and stores it in its type. Raises KnobError with names as `spell` writes them."""
    owner: type = type(instance)
    for setting in settings_of(owner):
        given = getattr(instance, setting.name)
        if given is setting.default:
            continue
        try:
            value = setting.check(given)
        except KnobError as error:
            raise KnobError(error.template, *error.knobs, value=error.value, spell=spell) from None
        object.__setattr__(instance, setting.name, value)


@cache
def _strict(hint: Any, kind: type, knob: Knob) -> Any:
    """The type for msgspec, with the range of the value or of each value in a list."""
    inner = _without_none(hint)
    bounds: dict[str, Any] = {
        name: bound
        for name in ("ge", "gt", "le", "lt")
        if (bound := getattr(knob, name)) is not None and abs(bound) < 2**63
    }
    if kind is Path:
        inner = str
    meta = msgspec.Meta(**bounds)
    if kind in (int, float) and bounds:
        inner = tuple[Annotated[kind, meta], ...] if get_origin(inner) is tuple else Annotated[inner, meta]  # type: ignore[valid-type]
    if knob.most is not None:
        inner = Annotated[inner, msgspec.Meta(max_length=knob.most)]
    return inner | None if _is_optional(hint) else inner


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def _without_none(hint: Any) -> Any:
    if not _is_optional(hint):
        return hint
    (inner,) = (h for h in get_args(hint) if h is not NoneType)
    return inner


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


def _listed(words: Sequence[Any]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 2**31:
        top = value.bit_length()
        if value == 2**top - 1:
            return f"2**{top} - 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _range(k: Knob) -> str:
    low = (
        f"at least {_number(k.ge)}"
        if k.ge is not None
        else f"over {_number(k.gt)}"
        if k.gt is not None
        else ""
    )
    high = (
        f"at most {_number(k.le)}"
        if k.le is not None
        else f"under {_number(k.lt)}"
        if k.lt is not None
        else ""
    )
    if k.ge is not None and k.le is not None:
        return f"between {_number(k.ge)} and {_number(k.le)}"
    return " and ".join(filter(None, (low, high)))
