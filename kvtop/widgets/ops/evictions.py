"""Evictions: which content was evicted for which request, one row a block, the latest first.

Invariant: a row is one block whose content lost its memory to new content. If the content was stored again since, or is
no longer remembered, the row stays, without the figures of that content.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from kvtop.units import NONE, count, rate, span
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.moment_text import loss, who
from kvtop.widgets.base.panel import Scrolling
from kvtop.widgets.base.table import Cell, Column, table

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_COLUMNS = (
    Column("×", 5, right=True, keep=7),
    Column("ago", 7, right=True, keep=2),
    Column("age", 7, right=True, keep=3),
    Column("hits", 4, right=True, keep=4),
    Column("taken by", 8, keep=6),
    Column("what it held", 12, grow=1, keep=5),
)


class EvictionsPanel(Scrolling):
    """One row for each evicted block."""

    TITLE = "evictions"
    FIGURES = (
        ("×", "Physical block."),
        ("ago", "Time since it was evicted."),
        ("age", "How long its content had been there."),
        ("hits", "Look-ups that had read it."),
        ("taken by", "Request that needed the memory."),
        ("what it held", "The tokens as text."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """One line of figures, then the latest evictions."""
        head = self.figures(
            width,
            (
                "evicted",
                f"{count(state.pool.evictions)} blocks",
                self.ink("evicted") if state.pool.evictions else None,
            ),
            ("now", rate(state.series.evictions.now(now), "/s"), None),
            ("next out", " ".join(map(str, state.pool.next_out(3))) or NONE, None),
        )
        if not state.pool.evictions:
            return [head, self.say("nothing was evicted yet")]
        room = max(0, height - 2)
        shown = self.window(state.pool.evictions, room)
        latest = list(islice(_latest(state), shown.start, shown.stop))
        if not latest and shown.start:  # the state no longer keeps what the user scrolled to
            known = list(_latest(state))
            self.first = max(0, len(known) - room)
            latest = known[self.first :]
        cells = [self._row(state, now, *entry) for entry in latest]
        return [head, *table(_COLUMNS, cells, width, self.ink("muted"))]

    def _row(
        self, state: DashboardState, now: float, t: float, block: int, hash_: str, by: int | None
    ) -> list[Cell]:
        lost = loss(state, hash_, t)
        muted, text = self.ink("muted"), self.ink("text")
        taker = by if by is not None else lost.by
        return [
            (count(block), self.ink("evicted")),
            (span(max(0.0, now - t)), muted),
            (span(lost.age) if lost.age is not None else NONE, text),
            (str(lost.hits) if lost.hits is not None else NONE, self.ink("hit") if lost.hits else muted),
            (who(taker) if taker is not None else NONE, self.ink("active")),
            (lost.text or NONE, text),
        ]


def _latest(state: DashboardState) -> Iterator[tuple[float, int, str, int | None]]:
    """(t, block, hash, request) of each eviction, the latest first."""
    for moment in reversed(state.moments):
        if moment.kind == "evicted" and moment.detail == "reallocated":
            for block, hash_ in zip(reversed(moment.ids), reversed(moment.hashes), strict=True):
                yield moment.t, block, hash_, moment.request_id
