"""Memory: what the sequences take in blocks, and what they would take if each reserved its longest length whole.

Invariants: both bars are to scale over the same memory; every usage has one definition (referenced blocks,
cached blocks and written slots are three different things); a share of nothing reads NONE. Waste is rounded
to a tenth of a percent, since 0 % and 0.6 % are the point here; other percentages are floored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.style import Style

from kvtop.units import NONE, count, percent
from kvtop.widgets.base.lines import Part, Row
from kvtop.widgets.base.panel import Panel
from kvtop.widgets.base.table import cut

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_LABEL = 10
_PRIORITY = (1, 3, 4, 6, 0, 5, 7, 2)
"""Rows in the order in which they get room: what sequences hold and fill first. They are shown in their own order."""


class MemoryPanel(Panel):
    """Both memories, each as a bar and in figures."""

    TITLE = "memory · paged and naive"
    NEEDS = "blocks"
    FIGURES = (
        ("paged", "The pool: slots filled █, held but empty ░, blocks cached ▒ and free ·, to scale."),
        ("referenced", "Blocks that a sequence refers to, of the usable ones; a shared block counts once."),
        (
            "cached",
            "Blocks that nobody refers to but whose content can still be read: free to take all the same.",
        ),
        ("filled", "Token slots of referenced blocks whose keys and values are written, of all slots."),
        ("wasted", "Slots that a block or a reservation holds without a token, of those held; to a tenth."),
        (
            "naive",
            "The same memory without paging: each sequence reserves max_model_len tokens in one piece at the first "
            "gap. Filled █, reserved but empty ░, free ·, a gap too short for one more ╱.",
        ),
        (
            "fit",
            "Sequences that would have a reservation, of those that run here. Nothing is shared there, and nobody is "
            "preempted.",
        ),
        (
            "wait",
            "Sequences that run here and would wait there for an earlier one to end; ever: since the start.",
        ),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Two bars with their figures; the most telling ones where there is room for fewer."""
        rows = [*self._paged(state, width), *self._naive(state, width)]
        return [tuple(cut(_shortened(rows[i], width), width)) for i in sorted(_PRIORITY[:height])]

    def _paged(self, state: DashboardState, width: int) -> list[Row]:
        usable, size = state.num_blocks - 1, state.block_size
        filled, held, slots = state.pool.filled, state.pool.held, usable * size
        parts = (
            (filled, "█", self.ink("active")),
            (held - filled, "░", self.ink("evicted")),
            (state.pool.cached * size, "▒", self.ink("cached")),
            (state.pool.free * size, "·", self.ink("free")),
        )
        active, cached, of = state.pool.active, state.pool.cached, f"of {count(usable)} blocks"
        return [
            self._bar("paged", parts, width),
            self._line("referenced", _share(active, usable), f"{count(active)} {of}", "text"),
            self._line("cached", _share(cached, usable), f"{count(cached)} {of}", "cached"),
            self._line("filled", _share(filled, slots), f"{count(filled)} of {count(slots)} slots", "active"),
            self._line("wasted", _waste(filled, held), _held(held), "text"),
        ]

    def _naive(self, state: DashboardState, width: int) -> list[Row]:
        twin = state.twin
        parts = (
            (twin.filled, "█", self.ink("active")),
            (twin.inside, "░", self.ink("evicted")),
            (twin.idle, "·", self.ink("free")),
            (twin.between, "╱", self.ink("muted")),
        )
        bad = "evicted" if twin.reserved else "text"
        fit, wait = f"{count(len(twin.place))} of {count(twin.running)}", f"{count(len(twin.waiting))} wait"
        ink = "evicted" if twin.waiting else "text"
        more = f"{wait}, {count(twin.waited)} ever"
        if not twin.running:
            fit, more = NONE, f"nothing runs; {count(twin.waited)} had to wait so far"
        if not twin.places:
            fit, more = "none", f"{count(twin.length)} tokens in one piece are more than there are"
        return [
            self._bar("naive", parts, width),
            self._line("wasted", _waste(twin.filled, twin.reserved), _held(twin.reserved), bad),
            self._line("fit", fit, more, ink),
        ]

    def _line(self, name: str, value: str, more: str, ink: str) -> Row:
        muted = self.ink("muted")
        return ((name.ljust(_LABEL), muted), (value.rjust(7), self.ink(ink)), (f" {more}", muted))

    def _bar(self, name: str, parts: Sequence[tuple[int, str, Style]], width: int) -> Row:
        """The parts of one memory side by side in `width` cells, the label included."""
        label = name.ljust(_LABEL) if width >= 2 * _LABEL else ""
        room, total = width - len(label), sum(n for n, _, _ in parts)
        edges = [0, *(round(room * n / max(1, total)) for n in accumulate(n for n, _, _ in parts))]
        cells: list[Part] = [
            (glyph * (stop - start), style)
            for (_, glyph, style), start, stop in zip(parts, edges, edges[1:], strict=False)
        ]
        return ((label, self.ink("muted")), *cells)


def _shortened(row: Row, width: int) -> Row:
    """Without its last word, the unit, where the row is too long for it."""
    *head, (text, style) = row
    return (*head, (text.rpartition(" ")[0], style)) if sum(len(t) for t, _ in row) > width else row


def _share(part: int, whole: int) -> str:
    return percent(part, whole) if part else "none"


def _held(slots: int) -> str:
    return f"of {count(slots)} held" if slots else "nothing held"


def _waste(filled: int, held: int) -> str:
    return f"{100 * (held - filled) / held:.1f} %" if held else NONE
