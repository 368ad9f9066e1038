"""Errors. SetupError: what stops a start or a command, in one line that says what to do. NotRunning: too late for
a request. one_line: any other failure, for an event or a log."""

from __future__ import annotations


class SetupError(Exception):
    """Bad input or set-up. The message is one line, at most 200 characters, and says what to do."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 200 else line[:199] + "…")


class NotRunning(SetupError, RuntimeError):
    """The engine was stopped, or has failed: it takes no more requests."""


def one_line(error: BaseException) -> str:
    """An unexpected failure in one line of at most 280 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:280]
