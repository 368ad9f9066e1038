"""Memory: what the sequences hold in blocks, and what they would hold if each reserved max_model_len tokens.

Invariants: both bars have one scale, over the same memory. Referenced blocks, cached blocks and filled slots are
three different figures. The name of a row says which memory it is about, whatever rows are left out. Waste of nothing
is NONE. Waste has one decimal, because 0 % and 0.6 % must differ here; other percentages are rounded down.
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

_LABEL = 12
_PRIORITY = (2, 4, 5, 7, 1, 0, 6, 8, 3)
"""Rows in the order in which they get room: the peak and the filled slots first. They are shown in their own order."""


class MemoryPanel(Panel):
    """Both memories, each as a bar and in figures."""

    TITLE = "memory · paged and naive"
    NEEDS = "blocks"
    FIGURES = (
        ("paged", "The pool: slots filled █, held but empty ░, blocks cached ▒ and free ·, to scale."),
        ("referenced", "Blocks that a sequence refers to, of the usable ones. A shared block counts once."),
        (
            "peak",
            "Most blocks that were referenced after one step since the start, and their filled slots then.",
        ),
        (
            "cached",
            "Blocks without a reference whose content can still be read. They can be taken at any time.",
        ),
        ("filled", "Token slots of referenced blocks whose keys and values are written, of all slots."),
        ("paged waste", "Slots of referenced blocks that hold no token, of all their slots. One decimal."),
        (
            "naive",
            "The same memory without paging: each sequence reserves max_model_len tokens in one piece at the first "
            "gap. Filled █, reserved but empty ░, free ·, a gap too short for one more ╱.",
        ),
        ("naive waste", "Slots of reservations that hold no token, of all reserved slots. One decimal."),
        (
            "naive fit",
            "Sequences that would have a reservation, of those that run here. Without paging nothing is shared and "
            "no sequence is preempted.",
        ),
        (
            "wait",
            "Sequences that run here and would wait there for an earlier one to end. Ever: since the start.",
        ),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Two bars with their figures. Where rows are few, the most important ones."""
        rows = [*self._paged(state, width), *self._naive(state, width)]
        return [tuple(cut(rows[i], width)) for i in sorted(_PRIORITY[:height])]

    def _paged(self, state: DashboardState, width: int) -> list[Row]:
        usable, size = state.num_blocks - 1, state.block_size
        pool = state.pool
        filled, held, slots = pool.filled, pool.held, usable * size
        parts = (
            (filled, "█", self.ink("active")),
            (held - filled, "░", self.ink("evicted")),
            (pool.cached * size, "▒", self.ink("cached")),
            (pool.free * size, "·", self.ink("free")),
        )

        def of(blocks: int) -> tuple[str, ...]:
            short = f"{count(blocks)} of {count(usable)}"
            return f"{short} blocks", short, count(blocks)

        peak = (f"{of(pool.peak_blocks)[0]}, {count(pool.peak_filled)} slots filled", *of(pool.peak_blocks))
        of_slots = f"{count(filled)} of {count(slots)}"
        lines = (
            ("referenced", _share(pool.active, usable), of(pool.active), "text"),
            ("peak", _share(pool.peak_blocks, usable), peak, "text"),
            ("cached", _share(pool.cached, usable), of(pool.cached), "cached"),
            ("filled", _share(filled, slots), (f"{of_slots} slots", of_slots, count(filled)), "active"),
            ("paged waste", _waste(filled, held), _held(held), "text"),
        )
        return [self._bar("paged", parts, width), *(self._line(width, *line) for line in lines)]

    def _naive(self, state: DashboardState, width: int) -> list[Row]:
        twin = state.twin
        parts = (
            (twin.filled, "█", self.ink("active")),
            (twin.inside, "░", self.ink("evicted")),
            (twin.idle, "·", self.ink("free")),
            (twin.between, "╱", self.ink("muted")),
        )
        fit, wait = f"{count(len(twin.place))} of {count(twin.running)}", f"{count(len(twin.waiting))} wait"
        more = (f"{wait}, {count(twin.waited)} ever", wait)
        if not twin.running:
            fit, more = NONE, (f"nothing runs; {count(twin.waited)} had to wait so far", "nothing runs")
        if not twin.places:
            fit, more = (
                "none",
                (f"{count(twin.length)} tokens in one piece are more than there are", "too long"),
            )
        waste = _waste(twin.filled, twin.reserved), _held(twin.reserved)
        return [
            self._bar("naive", parts, width),
            self._line(width, "naive waste", *waste, "evicted" if twin.reserved else "text"),
            self._line(width, "naive fit", fit, more, "evicted" if twin.waiting else "text"),
        ]

    def _line(self, width: int, name: str, value: str, details: Sequence[str], ink: str) -> Row:
        """details: the same from long to short. The longest that fits is shown, or none."""
        muted = self.ink("muted")
        head = name.ljust(_LABEL), value.rjust(7)
        room = width - sum(map(len, head)) - 1
        detail = next((f" {text}" for text in details if len(text) <= room), "")
        return ((head[0], muted), (head[1], self.ink(ink)), (detail, muted))

    def _bar(self, name: str, parts: Sequence[tuple[int, str, Style]], width: int) -> Row:
        """The parts of one memory next to each other in `width` cells, the label included."""
        label = name.ljust(_LABEL) if width >= 2 * _LABEL else ""
        room, total = width - len(label), sum(n for n, _, _ in parts)
        edges = [0, *(round(room * n / max(1, total)) for n in accumulate(n for n, _, _ in parts))]
        cells: list[Part] = [
            (glyph * (stop - start), style)
            for (_, glyph, style), start, stop in zip(parts, edges, edges[1:], strict=False)
        ]
        return ((label, self.ink("muted")), *cells)


def _share(part: int, whole: int) -> str:
    return "<1 %" if 0 < part * 100 < whole else percent(part, whole) if part else "none"


def _held(slots: int) -> tuple[str, ...]:
    return (f"of {count(slots)} held", f"of {count(slots)}") if slots else ("nothing held",)


def _waste(filled: int, held: int) -> str:
    return f"{100 * (held - filled) / held:.1f} %" if held else NONE
