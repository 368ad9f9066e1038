"""Header: one line that says which engine this is and how it is doing.

Owns the order in which figures are left out if the line is narrow. Figures that the source cannot know are left out.
Badges (LIVE, REPLAY, SLOW, …) always stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style

from kvtop.text import cut, safe_text
from kvtop.units import NONE, count, percent, rate
from kvtop.widgets.base.counts import queue_counts
from kvtop.widgets.base.lines import Lines, Part

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Badge:
    """A word at the right end; `name` is its colour in the palette."""

    text: str
    name: str


class Header(Lines):
    """The application sets `badges`."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.badges: Sequence[Badge] = ()
        self.held = 0
        """Prompts that were sent and have not arrived at the engine."""
        self.without_figures = False
        """The state is on its way to another moment: no figures, which would not agree with the panels."""

    def paint(self, state: DashboardState, now: float) -> None:
        """Name, engine, counts; badges at the right end."""
        width = self.size.width
        right: list[Part] = []
        for badge in self.badges:
            right += [
                (" ", Style.null()),
                (f" {badge.text} ", self.palette.on(badge.name) + Style(bold=True)),
            ]
        room = width - sum(cell_len(t) for t, _ in right)
        left: list[Part] = [(" kvtop", self.ink("accent") + Style(bold=True))]
        used = 6
        # The least important field goes first when the line is too short for all.
        fields = self._fields(state, now)
        chosen = sorted(fields, key=lambda f: f[0])
        kept: set[str] = set()
        for _, parts in chosen:
            size = 2 + sum(cell_len(t) for t, _ in parts)
            if used + size <= room:
                used += size
                kept.add(parts[0][0])
        for _, parts in fields:
            if parts[0][0] in kept:
                left += [("  ", Style.null()), *parts]
        gap = max(0, width - sum(cell_len(t) for t, _ in left + right))
        self.set_rows([[*left, (" " * gap, Style.null()), *right]])

    def _fields(self, state: DashboardState, now: float) -> list[tuple[int, list[Part]]]:
        """(rank, parts) in the order of the line; rank 0 stays longest."""
        text, muted = self.ink("text"), self.ink("muted")
        started = state.started
        if started is None or self.without_figures:
            return []
        model = cut(safe_text(started.model.rstrip("/").rsplit("/", 1)[-1]), 32)
        if self.size.width < 120:
            model = model.removesuffix("-Instruct")
        kind = f" {safe_text(started.device)}·{_DTYPES.get(started.dtype, started.dtype)}"
        if started.knobs.kv_cache_dtype == "fp8":
            kind += "·kv fp8"
        running, waiting, preempted = queue_counts(state, self.held)
        fields: list[tuple[int, list[Part]]] = [
            (2, [(model, text + Style(bold=True)), (kind, muted)]),
            (4, [(f"{count(started.num_blocks - 1)} blocks", text)]),
            (1, [(count(running), text), (" running ", muted), (count(waiting), text), (" waiting", muted)]),
        ]
        if preempted:
            fields.append((3, [(f"{count(preempted)} preempted", self.ink("warning"))]))
        hit = state.cache.hit_rate()
        style = self.ink("hit") if hit else text
        fields.append((0, [("hit ", muted), (NONE if hit is None else percent(hit), style)]))
        fields.append((3, [(rate(state.series.output.now(now), "tok/s"), text)]))
        return fields
