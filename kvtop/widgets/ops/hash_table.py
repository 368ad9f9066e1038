"""Hash table: which content is in which block, with its tokens as text, the last used first.

Invariants: a row is an entry of the pool's hash table (a hash and a block that has it). Text is made only for the rows
on the screen, however large the table is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtop.units import NOT_HERE, count, span
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.moment_text import spell
from kvtop.widgets.base.panel import Scrolling
from kvtop.widgets.base.table import Cell, Column, table

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_COLUMNS = (
    Column("hash", 8, keep=6),
    Column("block", 6, right=True, keep=7),
    Column("refs", 4, right=True, keep=4),
    Column("hits", 4, right=True, keep=3),
    Column("used", 7, right=True, keep=2),
    Column("text", 12, grow=1, keep=5),
)


class HashTablePanel(Scrolling):
    """One row for each hashed block."""

    TITLE = "hash table · hash → block"
    FIGURES = (
        ("hash", "First 8 of 32 hex digits; it covers this block's tokens and all before them."),
        ("block", "Physical block that holds the keys and values."),
        ("refs", "Requests or branches that refer to it now; at 0 it may be evicted."),
        ("hits", "Look-ups that read its present content."),
        ("used", "Time since it was last written, read or given back."),
        ("text", "What its tokens spell."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Titles, then the entries used last."""
        ids = np.flatnonzero(state.pool.hashed)
        if not len(ids):
            return [self.say("no full block yet")]
        shown = self.window(len(ids), max(0, height - 1))
        if not shown:
            return [self.say(f"{count(len(ids))} entries")]
        # Only the first blocks of the order are needed; sorting 100,000 blocks takes longer than a frame. Blocks of one
        # release have equal times and stay in the order of their ids.
        rank = -state.pool.touched[ids] + ids * 1e-12
        most = min(len(ids), shown.stop)
        head = np.argpartition(rank, most - 1)[:most]
        order = ids[head[np.argsort(rank[head], kind="stable")]]
        cells = [self._row(state, int(order[i]), now) for i in shown]
        return table(_COLUMNS, cells, width, self.ink("muted"))

    def _row(self, state: DashboardState, block: int, now: float) -> list[Cell]:
        mirror = state.pool.mirror
        hash_, refs, hits = mirror.hash[block] or "", mirror.ref[block], state.pool.columns.hits[block]
        record = state.history.get(hash_)
        muted, text = self.ink("muted"), self.ink("text")
        look = self.ink("shared" if refs > 1 else "active" if refs else "cached")
        if record is not None and record.token_ids:
            words: Cell = (spell(state, record.token_ids), text)
        else:
            words = (NOT_HERE, muted)
        return [
            (hash_[:8], look),
            (count(block), look),
            (str(refs), text if refs else muted),
            (str(hits), self.ink("hit") if hits else muted),
            (span(max(0.0, now - float(state.pool.touched[block]))), muted),
            words,
        ]
