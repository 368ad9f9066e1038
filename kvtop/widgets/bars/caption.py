"""Caption: the text of a demo, and the key that continues it.

Owns only the words. It has the rows that it gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style

from kvtop.text import safe_text
from kvtop.widgets.base.lines import Lines, Part
from kvtop.wrap import wrap

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class Caption(Lines):
    """`says` is the text, `then` what the reader may do."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.says = ""
        self.then = ""

    def paint(self, state: DashboardState, now: float) -> None:
        """The text, wrapped; then the key."""
        width = self.size.width
        text = safe_text(self.says)
        rows: list[list[Part]] = [
            [(" ", Style.null()), (text[a:b], self.ink("text") + Style(bold=True))]
            for a, b in wrap(text, max(1, width - 2))
        ]
        if rows and self.then:
            used = 1 + len(rows[-1][1][0])
            if used + len(self.then) + 3 <= width:
                rows[-1].append((f"   {self.then}", self.ink("accent")))
        self.set_rows(rows)
