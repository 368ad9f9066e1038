"""Part: what DashboardState is composed of.

A part owns its fields, handles the events that it needs (methods marked with `takes`) and can be copied.
Invariants: a part changes only itself. It may read the other parts; those before it have already handled the event.
A copy is made by reflection over all fields, so a field that is added later cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import msgspec

Method = TypeVar("Method", bound=Callable[..., None])

_IMMUTABLE = (type(None), bool, int, float, str, bytes, tuple, msgspec.Struct)
"""Values that a copy shares: events are frozen, and no tuple here contains anything that is written later."""


def takes(*events: type) -> Callable[[Method], Method]:
    """Marks a method `(event, state)` of a part. It is called for each of these events."""

    def mark(method: Method) -> Method:
        method.takes = events  # type: ignore[attr-defined]
        return method

    return mark


class Copied:
    """A class with slots that can be copied field by field into an independent object."""

    __slots__ = ()

    SHARED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are never written in place, so that copies may share them."""

    FIELDS: ClassVar[tuple[str, ...]] = ()
    """All its slots, including those of its base classes."""

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
    """Event type -> name of the method that handles it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers = {e: name for name, f in vars(cls).items() for e in getattr(f, "takes", ())}


def copied(value: Any) -> Any:
    """The value itself if it is immutable, else an independent copy.

    A list or dictionary of mutable values is copied with its values. Its first value decides, since all of them have
    the same type.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is dict and _is_mutable(next(iter(value.values()), None)):
        return {key: item.copy() for key, item in value.items()}
    if type(value) is list and value and _is_mutable(value[0]):
        return [item.copy() for item in value]
    return value.copy()


def _is_mutable(value: Any) -> bool:
    return not isinstance(value, _IMMUTABLE)
