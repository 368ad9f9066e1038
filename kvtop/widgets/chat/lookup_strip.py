"""LookupStrip: one prompt as blocks, first to last; which were read, which were computed, and why.

Owns the choice of the request it shows (the latest look-up, or the one that was picked) and THE sentence.
Invariant: a cell is lit only for a block that the look-up read; the sweep changes when, never whether.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from kvtop.paint.motion import Motion
from kvtop.text import cut
from kvtop.units import count
from kvtop.widgets.base.lines import Lines, Part
from kvtop.widgets.chat import lookup

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import RequestView

_EIGHTHS = "▁▂▃▄▅▆▇█"


class LookupStrip(Lines):
    """Focus it to walk along the prompt with the arrow keys."""

    can_focus = True
    MOVES = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "walk(-1)", "Walk along the prompt", show=False),
        Binding("right,l", "walk(1)", "", show=False),
    ]

    @dataclass
    class Pointed(Message):
        """Logical blocks of a request under the mouse (none: it left); clicked: they were selected."""

        request_id: int
        indices: range
        clicked: bool

    def __init__(self, motion: Motion, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.motion = motion
        self.picked: int | None = None
        """The request to show; None follows the latest look-up."""
        self.shown: int | None = None
        self.link: frozenset[int] = frozenset()
        """Physical blocks that are pointed at."""
        self._at = 0
        self._scale = 1
        self._cells: list[range] = []
        """Logical blocks under each cell from column 1 on; empty for the marker between them."""

    def set_link(self, ids: Iterable[int]) -> None:
        """Light up the cells of these physical blocks."""
        self.link = frozenset(ids)

    @property
    def title(self) -> str:
        """For the border of the box around it."""
        if self.shown is None:
            return "lookup"
        scale = f" · {self._scale} blocks a cell" if self._scale > 1 else ""
        return f"lookup #{self.shown} · the prompt as blocks, first to last{scale}"

    # ------------------------------------------------------------------------------- painting

    def choose(self, state: DashboardState) -> RequestView | None:
        """The request to show now."""
        if self.picked is not None and (view := state.requests.get(self.picked)) is not None:
            return view
        latest = state.cache.latest_lookup
        return None if latest is None else state.requests.get(latest)

    def paint(self, state: DashboardState, now: float) -> None:
        """Strip, origin and sentence, as many of them as there are rows."""
        width, height = self.size
        view = self.choose(state)
        self.shown = None if view is None else view.request_id
        if width < 1 or height < 1:
            return
        if view is None or state.started is None:
            hint = "Nothing was looked up yet: a prompt's full blocks are searched in the cache first."
            self._cells = []
            self.set_rows([[(" " + cut(hint, width - 1), self.ink("muted"))]])
            return
        size = state.started.block_size
        sentence = self._sentence(state, view, width - 1, with_miss=height == 2)
        if height == 1:
            self._cells = []
            self.set_rows([sentence])
            return
        rows = [self._strip(state, view, size, width), sentence]
        if height > 2:
            rows.insert(1, self._origin(state, view, width))
        self.set_rows(rows)

    def paint_between(self, state: DashboardState, now: float) -> None:
        """A hit that sweeps over the strip."""
        view = None if self.shown is None else state.requests.get(self.shown)
        if view is None or state.started is None or self.size.height < 2 or not self._cells:
            return
        if self.motion.lit(view.request_id) is not None:
            self.set_row(0, self._strip(state, view, state.started.block_size, self.size.width))

    def _sentence(self, state: DashboardState, view: RequestView, width: int, with_miss: bool) -> list[Part]:
        """The longest form that fits; behind a cold one why it was cold, if there is no other row for it."""
        hit = view.cached_tokens > 0
        looks = {
            "verb": self.ink("hit" if hit else "active") + Style(bold=True),
            "figure": self.ink("text") + Style(bold=True),
            "words": self.ink("text"),
            "time": self.ink("hit" if hit else "text") + Style(bold=True),
            "cold": self.ink("muted"),
        }
        forms = lookup.sentence(state, view)
        why = lookup.miss(view)
        if with_miss and not hit and view.ttft is not None and why:
            forms = [[*forms[0], (f" · {why}", "cold")], [*forms[2], (f" · {why}", "cold")], *forms]
        chosen = next((f for f in forms if sum(cell_len(t) for t, _ in f) <= width), forms[-1])
        return [(" ", self.ink("text")), *((text, looks[role]) for text, role in chosen)]

    def _strip(self, state: DashboardState, view: RequestView, size: int, width: int) -> list[Part]:
        blocks = lookup.blocks_of(view, size)
        hits = min(view.hit_blocks, blocks)
        read, computed = f"{count(hits)} read", f"{count(blocks - hits)} computed"
        tail = f"   {read} ╎ {computed}"
        room = width - 3 - (len(tail) if width >= 70 else 0)
        self._scale = scale = max(1, -(-blocks // max(1, room)))
        table = lookup.table_of(state, view)
        lit = self.motion.lit(view.request_id)
        flash = frozenset(self.motion.flash().tolist())
        parts: list[Part] = [(" ", self.ink("text"))]
        cells: list[range] = []
        self._at = hits
        for first in range(0, hits, scale):
            group = range(first, min(first + scale, hits))
            cells.append(group)
            parts.append(self._hit_cell(view, group, table, lit, flash))
        if lit is None:
            parts.append(("╎", self.ink("muted")))
            cells.append(range(0))
        else:
            parts.append((" ", self.ink("muted")))
            cells.append(range(0))
        for first in range(hits, blocks, scale):
            group = range(first, min(first + scale, blocks))
            cells.append(group)
            parts.append(self._miss_cell(view, group, table, size))
        self._cells = cells
        if width >= 70:
            used = 1 + len(cells)
            gap = " " * max(3, width - used - len(tail) + 2)
            mark = self.ink("hit") if hits else self.ink("muted")
            parts += [
                (gap, self.ink("text")),
                (read, mark),
                (" ╎ ", self.ink("muted")),
                (computed, self.ink("active")),
            ]
        return _merged(parts)

    def _hit_cell(
        self, view: RequestView, group: range, table: list[int], lit: int | None, flash: frozenset[int]
    ) -> Part:
        if lit is not None and group.start >= lit:
            glyph, style = "▒", self.ink("cached")
        elif any(view.hit_ids[i] in flash for i in group if i < len(view.hit_ids)):
            glyph, style = "◆", self.palette.on("hit")
        else:
            glyph, style = "◆", self.ink("hit") + Style(bold=True)
        return glyph, self._linked(style, lookup.physical(table, group))

    def _miss_cell(self, view: RequestView, group: range, table: list[int], size: int) -> Part:
        start, end = group.start * size, min(group.stop * size, view.prompt_tokens)
        done = min(max(0, view.num_computed - start), end - start)
        if view.phase == "finished" and view.t_first is not None:
            done = end - start
        if done <= 0:
            glyph, style = "░", self.ink("muted")
        elif done >= len(group) * size:
            glyph, style = "█", self.ink("active")
        else:
            glyph = _EIGHTHS[max(0, -(-done * 8 // (len(group) * size)) - 1)]
            style = self.ink("filling")
        return glyph, self._linked(style, lookup.physical(table, group))

    def _linked(self, style: Style, blocks: list[int]) -> Style:
        if self.link and not self.link.isdisjoint(blocks):
            return self.palette.on("select")
        return style

    def _origin(self, state: DashboardState, view: RequestView, width: int) -> list[Part]:
        left, right = lookup.whence(state, view), lookup.miss(view)
        if not left:
            return [(" " + cut(right, width - 1), self.ink("muted"))]
        column = 1 + self._cells.index(range(0)) if range(0) in self._cells else 0
        right = f"╎ {right}" if right else ""
        muted = self.ink("muted")
        at = max(len(left) + 3, column)
        if at + len(right) > width:
            at = max(len(left) + 3, width - len(right) - 1)
        return [(" " + left.ljust(at - 1), self.ink("text")), (cut(right, max(0, width - at)), muted)]

    # ------------------------------------------------------------------------------ selection

    def _under(self, x: int, y: int) -> range:
        return self._cells[x - 1] if y == 0 and 0 <= x - 1 < len(self._cells) else range(0)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Point at the block under the mouse."""
        if self.shown is not None:
            self.post_message(self.Pointed(self.shown, self._under(event.x, event.y), clicked=False))

    def on_leave(self, _event: events.Leave) -> None:
        """Point at nothing."""
        if self.shown is not None:
            self.post_message(self.Pointed(self.shown, range(0), clicked=False))

    def on_click(self, event: events.Click) -> None:
        """Select the block under the mouse."""
        if self.shown is not None and (group := self._under(event.x, event.y)):
            self._at = group.start
            self.post_message(self.Pointed(self.shown, group, clicked=True))

    def action_walk(self, step: int) -> None:
        """Select the next block of the prompt."""
        at = self._at + step * self._scale
        last = max((g.stop for g in self._cells), default=0)
        if self.shown is not None and 0 <= at < last:
            self._at = at
            self.post_message(self.Pointed(self.shown, range(at, min(at + self._scale, last)), clicked=True))


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one style as one part."""
    out: list[Part] = []
    for text, style in parts:
        if (out and out[-1][1] is style) or (out and out[-1][1] == style):
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out
