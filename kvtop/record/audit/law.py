"""Law: one thing that every stream of events must keep to, with whatever it remembers of the stream.

Owns how a law is written and how it breaks. A law is one class in one file, listed in audit/__init__.py: methods
marked `@takes(ev.X)` get each event of that type in order, `end_batch` is called after each batch, `close` at the
end of the stream. All of them raise Broken (by `need`); a law may be asked again after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine import events as ev
from kvtop.record.audit.books import Books

Method = TypeVar("Method", bound=Callable[..., None])


def takes(*kinds: type) -> Callable[[Method], Method]:
    """Marks a law's method: it is called with each event of these types."""

    def mark(method: Method) -> Method:
        method.takes = kinds  # type: ignore[attr-defined]
        return method

    return mark


class Law:
    """`books` is what the events said so far; each entry is written by one law only."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def takers(self) -> list[tuple[type, Callable[[Any], None]]]:
        """(event type, method) for each marked method."""
        methods = [getattr(self, name) for name in dir(self) if not name.startswith("__")]
        return [(kind, method) for method in methods for kind in getattr(method, "takes", ())]

    def end_batch(self, batch: ev.StepBatch) -> None:
        """All events of the batch are in."""

    def close(self) -> None:
        """The stream is over."""
