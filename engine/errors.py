"""SetupError: what stops a start or a command, in one line that says what to do."""

from __future__ import annotations


class SetupError(Exception):
    """Bad input or set-up. The message is one line, at most 200 characters, and says what to do."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 200 else line[:199] + "…")
