"""Prompt: one line of input that remembers what was sent.

Owns the history. Enter with text sends it; Enter without text asks for the next example. Pasted line breaks
become blanks, so a paste never sends itself. Invariant: the line holds what was typed or pasted, character by
character, and shows a symbol for each one that could act on the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from kvtop.terminal.textual_door import SafeInput


class Prompt(SafeInput):
    """Up and down walk through what was sent before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "recall(-1)", "Earlier", show=False),
        Binding("down", "recall(1)", "Later", show=False),
    ]
    DEFAULT_CSS = """
    Prompt { border: none; height: 1; padding: 0; background: transparent; width: 1fr; }
    Prompt:focus { border: none; background-tint: transparent; }
    """

    @dataclass
    class Sent(Message):
        """Enter was pressed; `text` is stripped and may be empty."""

        text: str

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, select_on_focus=False)
        self.cursor_blink = False  # a blinking cursor paints for ever
        self._sent: list[str] = []
        self._place = 0

    async def action_submit(self) -> None:
        """Hand the text over and start anew."""
        text = self.value.strip()
        if text and text not in self._sent[-1:]:
            self._sent.append(text)
        self._place = len(self._sent)
        self.value = ""
        self.post_message(self.Sent(text))

    def action_recall(self, step: int) -> None:
        """Put an earlier or later prompt into the line."""
        place = min(max(0, self._place + step), len(self._sent))
        if place != self._place:
            self._place = place
            self.value = self._sent[place] if place < len(self._sent) else ""
            self.cursor_position = len(self.value)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.insert_text_at_cursor(" ".join(event.text.split()))
