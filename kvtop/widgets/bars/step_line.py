"""StepLine: the last step's token budget as a bar, the time between tokens, and the blocks that go next.

One row. Invariant: decode + prefill + unused of the bar is the budget; the sparkline leaves steps of slow
motion out, as the series does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
from rich.style import Style

from kvtop.units import count, duration
from kvtop.widgets.base.graph import quantile
from kvtop.widgets.base.lines import Lines, Part
from kvtop.widgets.map.block_map import GLYPHS

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 8
"""Newest gaps between tokens in the sparkline."""
_LEAST = 40
"""Cells of the budget's words and its shortest bar, without the figures."""


class StepLine(Lines):
    """step decode 1 ▏prefill – ▏unused ··· of 512   ITL ▁▂▁ p50 16 ms   next out ·82 ·83 ·84"""

    def paint(self, state: DashboardState, now: float) -> None:
        """The parts that fit, the bar as wide as it may be."""
        width = self.size.width
        if state.started is None:
            self.set_rows([])
            return
        itl, out = self._itl(state), self._next_out(state, 3 if width < 110 else 6)
        tails = [t for t in (itl, self._drafts(state), out) if t]
        head = _LEAST + 2 * len(
            count(state.steps.completed.budget if state.steps.completed is not None else 0)
        )
        while tails and head + sum(3 + _cells(t) for t in tails) > width:
            tails.pop()
        bar = self._budget(state, width - sum(3 + _cells(t) for t in tails) - 1)
        row = list(bar)
        for tail in tails:
            row += [("   ", Style.null()), *tail]
        self.set_rows([row])

    def _budget(self, state: DashboardState, width: int) -> list[Part]:
        muted = self.ink("muted")
        done = state.steps.completed
        if done is None:
            return [(" step ", muted), ("no step has run yet".ljust(max(0, width - 6)), muted)]
        decode, prefill = done.decode_tokens, done.prefill_tokens
        parts: list[Part] = [
            (" step decode " if state.requests.running else " last step decode ", muted),
            (f"{decode or '–'} ", self.ink("decode")),
            ("▏prefill ", muted),
            (f"{count(prefill) if prefill else '–'} ", self.ink("prefill")),
            ("▏unused ", muted),
        ]
        budget = max(1, done.budget)
        total = f" of {count(done.budget)}"
        room = min(24, width - _cells(parts) - len(total))
        if room < 3:
            return parts[:4]
        taken = min(room, -(-(decode + prefill) * room // budget))
        first = min(taken, -(-decode * room // budget)) if decode else 0
        parts += [
            ("█" * first, self.ink("decode")),
            ("█" * (taken - first), self.ink("prefill")),
            ("·" * (room - taken), self.ink("free")),
            (total, muted),
        ]
        return parts

    def _itl(self, state: DashboardState) -> list[Part]:
        ring = state.series.itl
        if not len(ring):
            return []
        newest = ring.latest(_POINTS)
        # Three times the middle at least, so that steady steps lie low and a late one stands out.
        top = max(float(newest.max()), 3 * (quantile(np.sort(newest), 0.5) or 0.0)) or 1.0
        text = "".join([_BARS[min(7, int(v / top * 7.999))] for v in newest.tolist()])
        p50 = quantile(np.sort(ring.latest()), 0.5)
        muted = self.ink("muted")
        return [
            ("ITL ", muted),
            (text.rjust(_POINTS), self.ink("itl")),
            (" p50 ", muted),
            (duration(p50), Style.null()),
        ]

    def _drafts(self, state: DashboardState) -> list[Part]:
        """How many of the speculative tokens were right."""
        if not state.steps.drafts:
            return []
        muted = self.ink("muted")
        rate = f"{100 * state.steps.drafts_accepted // state.steps.drafts} %"
        return [("drafts ", muted), (rate, self.ink("hit")), (f" of {count(state.steps.drafts)}", muted)]

    def _next_out(self, state: DashboardState, k: int) -> list[Part]:
        parts: list[Part] = [("next out", self.ink("muted"))]
        for block in state.pool.next_out(k):
            cached = bool(state.pool.hashed[block])
            name = "cached" if cached else "free"
            parts += [
                (" " + GLYPHS[int(cached)], self.ink(name)),
                (str(block), self.ink("text" if cached else "muted")),
            ]
        if len(parts) == 1:
            parts.append((" none: every block is in use", self.ink("warning")))
        return parts


def _cells(parts: list[Part]) -> int:
    return sum(cell_len(text) for text, _ in parts)
