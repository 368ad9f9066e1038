"""Event log: what happened, one line for each moment, the newest at the bottom.

Follows its end unless the user scrolled back. Words come from kvtop.widgets.base.moment_text.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.moment_text import describe, fold
from kvtop.widgets.base.panel import Scrolling
from kvtop.widgets.base.table import cut

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

MOST = 1000
"""Moments that can be shown; the recording has the older ones."""

_LOOKS = {
    "evicted": "evicted",
    "hit": "hit",
    "admitted": "active",
    "copied": "copy",
    "preempted": "warning",
    "blocked": "warning",
    "error": "error",
    "lost": "error",
    "stored": "muted",
    "released": "muted",
    "queued": "muted",
    "profiled": "muted",
    "graph": "muted",
}


class EventLogPanel(Scrolling):
    """One line for each moment: time since the start, then what happened."""

    TITLE = "events"
    FIGURES = (
        ("time", "Seconds since the start of the run."),
        ("◆ hit", "Blocks read from the cache at an admission."),
        ("× evicted", "What a block held, how long, how often it was read, and who took its memory."),
        ("stored", "Full blocks that entered the hash table: from now on they can be hit."),
        ("profiled", "A step whose kernels were timed one by one; see the panel of kernels."),
        ("graph", "CUDA graph: decode steps of up to this number of sequences are one launch from now on."),
        ("gave back", "References dropped; hashed blocks stay cached until their memory is taken."),
    )

    _back = 0
    """Lines between the newest and the last one shown."""

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """The last lines that fit."""
        # Text is made only for the lines on the screen.
        lines = fold(islice(reversed(state.moments), MOST), self._back + height)
        if not lines:
            return [self.say("nothing happened yet")]
        self._back = max(0, min(self._back, len(lines) - height))
        muted = self.ink("muted")
        rows: list[Row] = []
        for line in reversed(lines[self._back : self._back + height]):
            name = _LOOKS.get(line.kind, "text")
            text = describe(state, line, width - 9)
            if name == "active" and text.startswith("◆"):
                name = "hit"
            rows.append(tuple(cut(((f"{line.t:8.2f} ", muted), (text, self.ink(name))), width)))
        return rows

    def action_scroll_by(self, lines: int) -> None:
        """Move down by `lines`; up if it is negative."""
        back = max(0, min(MOST, self._back - lines))
        if back != self._back:
            self._back = back
            self.changed()
