"""Panel: the base of the figures around the map, one subject a panel.

A panel is a pure function from DashboardState to Rows. It owns its title, the definition of every figure (F1 shows
them) and the capability of the source that they need. Invariants: it is painted again only if the state, the size, the
theme or its settings changed. A figure that the source cannot know is NOT_HERE, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from textual.binding import Binding, BindingType

from kvtop.units import NOT_HERE
from kvtop.widgets.base.lines import Lines, Part, Row
from kvtop.widgets.base.table import cut

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

REFRESH = 0.25
"""Seconds after which ages are painted again, also without a batch."""


class Panel(Lines, can_focus=True):
    """A subclass implements `rows`."""

    TITLE: ClassVar[str] = ""
    """Title of the frame."""
    FIGURES: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(name, definition with its unit) of each figure, in the order of the screen."""
    NEEDS: ClassVar[str | None] = None
    """Capability without which the panel has nothing to show."""

    _seen: tuple[object, ...] | None = None

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """At most `height` rows for a panel of width x height cells, both over 0."""
        raise NotImplementedError

    def paint(self, state: DashboardState, now: float) -> None:
        """Show `state`, if it is not on the screen yet."""
        width, height = self.size
        if not width or not height:
            return
        seen = (id(state), state.seq, int(now / REFRESH), width, height)
        if seen == self._seen:
            return
        self._seen = seen
        if state.started is None:
            rows = [self.say("waiting for the engine")]
        elif self.NEEDS is not None and self.NEEDS not in state.started.capabilities:
            rows = [self.say(NOT_HERE)]
        else:
            rows = self.rows(state, now, width, height)
        self.set_rows(rows[:height])

    def forget(self) -> None:
        """Theme or size changed."""
        self._seen = None
        super().forget()

    def changed(self) -> None:
        """A setting of the panel changed: the next frame paints it."""
        self._seen = None
        self.wake()

    # --------------------------------------------------------------------------- shared looks

    def say(self, text: str) -> Row:
        """A line instead of figures that do not exist."""
        return ((text, self.ink("muted")),)

    def figures(self, width: int, *pairs: tuple[str, str, Style | None]) -> Row:
        """`name value` pairs in one row, as many as fit. If not even the first fits, it is cut."""
        muted, plain = self.ink("muted"), Style.null()
        parts: list[Part] = []
        used = 0
        for name, value, style in pairs:
            text = f"{name} " if name else ""
            gap = "   " if parts else ""
            cells = len(gap) + len(text) + len(value)
            if parts and used + cells > width:
                break
            parts += [(gap + text, muted), (value, plain if style is None else style)]
            used += cells
        return tuple(cut(parts, width))


class Scrolling(Panel):
    """A panel whose list is longer than the panel: arrows, page keys, home, end and the wheel move it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_by(-1)", "Scroll", show=False),
        Binding("down,j", "scroll_by(1)", "Scroll", show=False),
        Binding("pageup", "scroll_by(-10)", "Scroll", show=False),
        Binding("pagedown", "scroll_by(10)", "Scroll", show=False),
        Binding("home", "scroll_by(-1000000)", "Top", show=False),
        Binding("end", "scroll_by(1000000)", "End", show=False),
    ]

    first = 0
    """Place of the first entry shown."""
    _most = 0

    def window(self, count: int, shown: int) -> range:
        """Places of the entries to show, if `count` exist and `shown` fit."""
        self._most = max(0, count - shown)
        self.first = min(self.first, self._most)
        return range(self.first, min(count, self.first + shown))

    def action_scroll_by(self, lines: int) -> None:
        """Move down by `lines` entries."""
        first = max(0, min(self._most, self.first + lines))
        if first != self.first:
            self.first = first
            self.changed()

    def on_mouse_scroll_up(self) -> None:
        """One notch of the wheel."""
        self.action_scroll_by(-3)

    def on_mouse_scroll_down(self) -> None:
        """One notch of the wheel."""
        self.action_scroll_by(3)
