"""Signals that ask a run without a terminal to end: SIGTERM, SIGHUP and ctrl+c.

Owns their handlers and exit codes. Invariant: the run ends through its own `finally`, so that the engine is stopped
and a recording is closed whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Ended(KeyboardInterrupt):
    """A signal asked for the end; `signal` is which."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def exit_code(end: KeyboardInterrupt) -> int:
    """143 after SIGTERM, 129 after SIGHUP, 130 after ctrl+c."""
    return 128 + (end.signal if isinstance(end, Ended) else signal.SIGINT)


def reason(end: KeyboardInterrupt) -> str:
    """For people."""
    return f"ended by {end.signal.name}" if isinstance(end, Ended) else "interrupted"


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Ended meanwhile, unless they are ignored (nohup) or this is no main thread."""
    kept: dict[int, Any] = {}

    def end(number: int, _frame: object) -> None:
        raise Ended(number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # SIGHUP is not on every system
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                kept[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
