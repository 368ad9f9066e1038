"""Law: the base class of a rule that every stream of events must follow.

Owns how a law is written and how it reports. A law is one class in one file, listed in audit/__init__.py. Its methods
marked with `@takes(ev.X)` get every event of that type in order, `end_batch` is called after each batch, and `close` at
the end of the stream. Each of them raises Broken (through `need`) if the stream breaks the law. The law is called again
after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine import events as ev
from kvtop.record.audit.books import Books

Method = TypeVar("Method", bound=Callable[..., None])


def takes(*kinds: type) -> Callable[[Method], Method]:
    """Marks a method of a law. It is called with each event of these types."""

    def mark(method: Method) -> Method:
        method.takes = kinds  # type: ignore[attr-defined]
        return method

    return mark


class Law:
    """books: what the events have said so far. Each field is written by one law only."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def takers(self) -> list[tuple[type, Callable[[Any], None]]]:
        """(event type, method) of each marked method."""
        methods = [getattr(self, name) for name in dir(self) if not name.startswith("__")]
        return [(kind, method) for method in methods for kind in getattr(method, "takes", ())]

    def end_batch(self, batch: ev.StepBatch) -> None:
        """The batch is over."""

    def close(self) -> None:
        """The stream is over."""
