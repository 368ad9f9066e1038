"""Hint: the line under the prompt. What the next Enter will do and why, and how far the first eviction is.

One row, or two with the reason in the second. KeyLine below it lists the keys that work now; a click on one presses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.message import Message

from kvtop.text import cut
from kvtop.units import count
from kvtop.widgets.base.lines import Lines, Part

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class Hint(Lines):
    """The application sets `says` and `why`. `warns`: in the colour of warnings."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.says = ""
        self.why = ""
        self.warns = False

    def paint(self, state: DashboardState, now: float) -> None:
        """The sentence, the reason where it fits, and the distance to the first eviction at the right."""
        width, height = self.size
        right = self._left(state)
        room = width - 3 - (cell_len(right) + 3 if right else 0)
        below = ""
        if height > 1 and cell_len(self.says) > room:  # the sentence whole, the figure after its reason
            right, below, room = "", right, width - 3
        if room < 24 or (
            height == 1 and cell_len(self.says) > room
        ):  # the end of the sentence is the important part
            right, room = "", width - 3
        muted = self.ink("muted")
        parts: list[Part] = [
            ("  ", muted),
            (cut(self.says, room), self.ink("warning" if self.warns else "text")),
        ]
        spare = room - cell_len(self.says)
        if self.why and height == 1 and spare > 16:
            parts.append((cut(f" · {self.why}", spare), muted))
        used = sum(cell_len(t) for t, _ in parts)
        if right:
            parts += [(" " * max(0, width - used - cell_len(right) - 1), muted), (right, muted)]
        rows = [parts]
        if height > 1:
            spare = width - 3 - (cell_len(below) + 3 if below else 0)
            why = cut(self.why, max(0, spare))
            second: list[Part] = [("  ", muted), (why, muted)]
            if below and spare > 0:
                second += [(" " * (width - 3 - cell_len(why) - cell_len(below)), muted), (below, muted)]
            rows.append(second)
        self.set_rows(rows)

    def _left(self, state: DashboardState) -> str:
        if state.started is None:
            return ""
        if state.pool.evictions:
            return f"{count(state.pool.evictions)} evicted so far"
        return f"first eviction in {count(state.pool.blocks_until_eviction)} blocks"


@dataclass(frozen=True, slots=True)
class Key:
    """key: as it is shown; does: a word or two; press: Textual's name of the key."""

    key: str
    does: str
    press: str


class KeyLine(Lines):
    """The keys that work now, as many as fit."""

    @dataclass
    class Clicked(Message):
        """A key was clicked."""

        press: str

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.keys: Sequence[Key] = ()
        self._shown: tuple[object, ...] = ()
        self._spans: list[tuple[int, int, str]] = []

    def paint(self, state: DashboardState, now: float) -> None:
        """ "Esc keys   Enter send   F1 help" """
        width = self.size.width
        shown = (width, *self.keys)
        if shown == self._shown:
            return
        self._shown = shown
        parts: list[Part] = [(" ", Style.null())]
        used = 1
        self._spans = []
        for key in self.keys:
            size = cell_len(key.key) + 1 + cell_len(key.does)
            if used + size > width:
                break
            parts += [
                (key.key, self.ink("accent") + Style(bold=True)),
                (f" {key.does}", self.ink("muted")),
                ("   ", Style.null()),
            ]
            self._spans.append((used, used + size, key.press))
            used += size + 3
        self.set_rows([parts])

    def forget(self) -> None:
        """Theme or size changed."""
        self._shown = ()
        super().forget()

    def on_click(self, event: events.Click) -> None:
        """Press the key that was clicked."""
        for start, end, press in self._spans:
            if start <= event.x < end:
                self.post_message(self.Clicked(press))
