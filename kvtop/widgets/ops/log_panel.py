"""Logs: what the engine and its libraries printed, kept off the terminal and shown here.

Reads a growing sequence of captured lines, the newest last, and follows its end unless the user scrolled back.
Invariant: every line goes through safe_text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.style import Style

from kvtop.text import safe_text
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.panel import Scrolling
from kvtop.widgets.base.table import cut

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_LEVEL = re.compile(r"\b(CRITICAL|ERROR|Error|Traceback|WARNING|Warning|WARN|DEBUG)\b")


class LogPanel(Scrolling):
    """The captured lines. Home goes to the oldest line, End to the newest, and follows it."""

    TITLE = "log"
    FIGURES = (("lines", "Standard output, standard error and logging of this process, oldest above."),)

    def __init__(self, captured: Sequence[str] = (), *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.captured = captured
        self._follow = True

    def paint(self, state: DashboardState, now: float) -> None:
        """Lines may come without a batch, also before the engine has started."""
        width, height = self.size
        if width and height:
            self.set_rows(self.rows(state, now, width, height))

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """The last lines that fit, or those that the user scrolled to."""
        lines = list(self.captured)
        if not lines:
            return [self.say("nothing was printed")]
        if self._follow:
            self.first = len(lines)
        shown = self.window(len(lines), height)
        return [tuple(cut([(safe_text(lines[i]), self._look(lines[i]))], width)) for i in shown]

    def action_scroll_by(self, lines: int) -> None:
        """Move. At the end the panel follows it again."""
        super().action_scroll_by(lines)
        self._follow = self.first >= self._most

    def _look(self, line: str) -> Style:
        found = _LEVEL.search(line)
        if found is None:
            return self.ink("text")
        word = found.group().upper()
        return self.ink("muted" if word == "DEBUG" else "warning" if word.startswith("WARN") else "error")
