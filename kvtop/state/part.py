"""Part: what DashboardState is composed of.

A part owns its fields, takes the events that it cares for (methods marked with `takes`) and can be copied.
Invariants: a part changes nothing but itself; it may read the other parts, of which those before it have taken
the event already. A copy has every field, since it is made by reflection: a field added later cannot be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import msgspec

Method = TypeVar("Method", bound=Callable[..., None])

_IMMUTABLE = (type(None), bool, int, float, str, bytes, tuple, msgspec.Struct)
"""Values that a copy shares: events are frozen, and a tuple holds nothing that is written later."""


def takes(*events: type) -> Callable[[Method], Method]:
    """Marks a method `(event, state)` of a part: it is called for each of these events."""

    def mark(method: Method) -> Method:
        method.takes = events  # type: ignore[attr-defined]
        return method

    return mark


class Copied:
    """A class with slots whose copy is independent, field by field."""

    __slots__ = ()

    SHARED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are never written in place, so that copies may share them."""

    FIELDS: ClassVar[tuple[str, ...]] = ()
    """All its slots and those of the classes that it derives from."""

    def __init_subclass__(cls) -> None:
        cls.FIELDS = tuple(name for c in reversed(cls.__mro__) for name in getattr(c, "__slots__", ()))

    def copy(self) -> Self:
        """An independent object in the same state."""
        other = object.__new__(type(self))
        for name in self.FIELDS:
            value = getattr(self, name)
            setattr(other, name, value if name in self.SHARED else copied(value))
        return other


class Part(Copied):
    """See the module."""

    __slots__ = ()

    handlers: ClassVar[dict[type, str]] = {}
    """Event type -> name of the method that takes it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers = {e: name for name, f in vars(cls).items() for e in getattr(f, "takes", ())}


def copied(value: Any) -> Any:
    """The value itself where it is immutable, else an independent copy. A list or dictionary is copied one level
    deeper where it holds something that is written in place; its values are all of one kind."""
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is dict and _is_mutable(next(iter(value.values()), None)):
        return {key: item.copy() for key, item in value.items()}
    if type(value) is list and value and _is_mutable(value[0]):
        return [item.copy() for item in value]
    return value.copy()


def _is_mutable(value: Any) -> bool:
    return not isinstance(value, _IMMUTABLE)
