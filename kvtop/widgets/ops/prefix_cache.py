"""Prefix cache: how much of the prompts was read instead of computed, and how full the hash table is.

Invariants: before the first look-up there is no rate, not 0 %. The rate is over first admissions only
(state.cache.hit_rate). Percentages are rounded down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtop.units import NONE, count, percent, rate
from kvtop.widgets.base.graph import Curve, Floats, Scale, graph, plot_width
from kvtop.widgets.base.lines import Row
from kvtop.widgets.base.panel import Panel

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

LONGEST = 600.0
"""Longest time that the graph shows, seconds."""


class PrefixCachePanel(Panel):
    """Hit rate with its history, look-ups, table, evictions."""

    TITLE = "prefix cache"
    FIGURES = (
        (
            "hit rate",
            "Tokens read from the cache / prompt tokens, over first admissions; percent, floored.",
        ),
        (
            "look-ups",
            "Requests that asked the hash table for their prompt, once each (not after a preemption).",
        ),
        ("table", "Blocks whose content can be found by its hash, of the usable blocks."),
        ("contents", "Different contents among them."),
        (
            "duplicates",
            "Blocks that were stored although another block in the table has the same content.",
        ),
        (
            "evicted",
            "Blocks whose content was replaced by other content; now: blocks a second.",
        ),
        ("until next", "Blocks that can be handed out before the next eviction."),
    )

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """Three lines of figures, then the graph."""
        hit = self.ink("graph-hit")
        assert state.started is not None
        if not state.started.knobs.enable_prefix_caching:
            return [self.say("prefix caching is off")]
        if state.cache.lookups:
            share = percent(state.cache.hit_tokens, state.cache.query_tokens)
            value = f"{share} · {count(state.cache.hit_tokens)} of {count(state.cache.query_tokens)} tokens"
        else:
            value = f"{NONE} no look-up yet"
        hashed = int(state.pool.hashed.sum())
        rows = [
            self.figures(
                width,
                ("hit rate", value, hit if state.cache.lookups else None),
                ("look-ups", count(state.cache.lookups), None),
            ),
            self.figures(
                width,
                ("table", f"{count(hashed)} of {count(state.num_blocks - 1)} blocks", self.ink("cached")),
                ("contents", count(state.pool.num_hashes), None),
                ("duplicates", count(state.pool.duplicates), None),
            ),
            self.figures(
                width,
                (
                    "evicted",
                    count(state.pool.evictions),
                    self.ink("evicted") if state.pool.evictions else None,
                ),
                ("now", rate(state.series.evictions.now(now), "/s"), None),
                ("until next", f"{count(state.pool.blocks_until_eviction)} blocks", None),
            ),
        ]
        left = height - len(rows)
        points = state.series.hit_rate.rows()
        if left >= 3 and len(points):
            values = steps_in_time(points[:, 0], points[:, 1] * 100, now, 2 * plot_width(width))
            axis = Scale(0.0, 100.0)
            rows += graph(
                width,
                min(left, 8),
                [Curve(values, hit, "line")],
                axis,
                lambda v: f"{v:.0f} %",
                self.ink("muted"),
            )
        return rows


def steps_in_time(times: Floats, values: Floats, now: float, columns: int) -> Floats:
    """The value at each of `columns` instants up to `now`, at most LONGEST back. NaN before the first."""
    if columns < 1:
        return np.zeros(0)
    start = max(0.0, now - LONGEST)
    at = start + (now - start) * np.arange(1, columns + 1) / columns
    place = np.searchsorted(times, at, side="right") - 1
    return np.where(place >= 0, values[np.maximum(place, 0)], np.nan)
