"""MainScreen: the dashboard. Where each widget is at which size, and how pointing at one lights the others.

Owns the view (chat, ops, all), the selected block and the focus rule: a live run starts with the prompt
focused, Esc enters key mode, i or Enter returns. Invariant: at any size, down to 1 x 1, something
useful is shown and nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Self

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Label

from kvtop.app.screens.arrange import PLACED, Asked, arrange, is_tiny
from kvtop.options import View
from kvtop.paint.motion import Motion
from kvtop.terminal.textual_door import draw_frames, draw_regions
from kvtop.text import cut
from kvtop.widgets.bars.caption import Caption
from kvtop.widgets.bars.header import Header
from kvtop.widgets.bars.hint import Hint, KeyLine
from kvtop.widgets.bars.step_line import StepLine
from kvtop.widgets.base import moment_text
from kvtop.widgets.base.lines import KeepsLines, Lines
from kvtop.widgets.base.panel import REFRESH
from kvtop.widgets.chat import lookup
from kvtop.widgets.chat.chat import Chat
from kvtop.widgets.chat.lookup_strip import LookupStrip
from kvtop.widgets.chat.prompt import Prompt
from kvtop.widgets.map.block_detail import BlockDetail
from kvtop.widgets.map.block_map import BlockMap
from kvtop.widgets.ops.budget import BudgetPanel
from kvtop.widgets.ops.device import DevicePanel
from kvtop.widgets.ops.event_log import EventLogPanel
from kvtop.widgets.ops.evictions import EvictionsPanel
from kvtop.widgets.ops.hash_table import HashTablePanel
from kvtop.widgets.ops.kernels import KernelsPanel
from kvtop.widgets.ops.latency import ItlPanel, TtftPanel
from kvtop.widgets.ops.log_panel import LogPanel
from kvtop.widgets.ops.memory import MemoryPanel
from kvtop.widgets.ops.prefix_cache import PrefixCachePanel
from kvtop.widgets.ops.queues import QueuesPanel
from kvtop.widgets.ops.throughput import ThroughputPanel

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


ROUND = 0.25
"""Least seconds between two rounds while figures change. On a CPU each round takes time from the engine."""

EVICTION_SHOWN = 2.5
"""Seconds for which the line under the map shows an eviction."""


class Row(KeepsLines, Horizontal):
    """Widgets next to each other."""


class Column(KeepsLines, Vertical):
    """Widgets one above the other."""


class Box(Column):
    """A frame around one widget; the frame's title is the widget's."""

    def __init__(self, widget: Lines, *, id: str) -> None:
        super().__init__(widget, id=id, classes="box")
        self.widget = widget
        self._title = self._below = ""
        self._row: int | None = None
        """While a title changes: the only row of the frame that differs."""

    def retitle(self, below: str = "") -> list[Region]:
        """Show the widget's title, and `below` in the lower edge. Returns the rows of the frame that differ, in
        coordinates of the screen."""
        title = str(getattr(self.widget, "title", None) or getattr(self.widget, "TITLE", ""))
        if title == self._title and below == self._below:
            return []
        x, y, width, height = self.region
        rows = []
        # As Text, since a string would be read as markup, and titles hold foreign names.
        if title != self._title:
            self._title, self._row = title, 0
            self.border_title = Text(title)
            rows.append(Region(x, y, width, 1))
        if below != self._below:
            self._below, self._row = below, max(0, height - 1)
            self.border_subtitle = Text(below)
            rows.append(Region(x, y + self._row, width, 1))
        self._row = None
        return [row for row in rows if row]

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        """A new title does not change what is in the frame."""
        if self._row is not None:
            regions = (Region(0, self._row, self.outer_size.width, 1).translate(-self.content_offset),)
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class MainScreen(KeepsLines, Screen[None]):
    """`paint` shows a state; `selected` is the block whose details are shown."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Key mode, then nothing selected", id="back", priority=True),
        Binding("i,enter", "app.ask", "Type a prompt", id="ask"),
    ]

    def __init__(self, state: DashboardState, motion: Motion, captured: Sequence[str], *, live: bool) -> None:
        super().__init__()
        draw_frames(self)
        self.state = state
        self.motion = motion
        self.live = live
        """There is an engine that takes prompts."""
        self.view: View = "chat"
        self.selected: int | None = None
        self.logs = self.profiled = False
        """What was printed is shown; there are figures of kernels."""
        self.caption_rows = 0
        """Rows of a demo's caption."""
        self._arranged: Asked | None = None
        self._placed: list[Widget] = []
        self.header, self.step_line = Header(id="header"), StepLine(id="step")
        self.chat, self.map = Chat(id="chat"), BlockMap(motion, id="map")
        self.chat_box = Box(self.chat, id="chat-box")
        self.map_box = Box(self.map, id="map-box")
        self.strip, self.detail = LookupStrip(motion, id="strip"), BlockDetail(id="detail")
        self.caption, self.prompt = Caption(id="caption"), Prompt(id="prompt")
        self.queues = QueuesPanel()
        self.hint, self.key_line = Hint(id="hint"), KeyLine(id="keys")
        self.log_panel = LogPanel(captured, id="log")
        self._hovered: frozenset[int] = frozenset()
        self._pointed: list[int] = []
        """Blocks under the mouse, in order."""
        self._lines: list[Lines] = []
        self._boxes: list[Box] = []
        self._in_view: list[Lines] | None = None
        """Those of `_lines` that the layout shows; None until it is asked."""
        self._moved_at = float("-inf")
        """Wall clock of the first frame that showed the present state."""
        self._seen: tuple[object, ...] = ()
        self._round_of: tuple[object, ...] = (0, -1, -1)
        self._round_at = self._early_at = self._now = float("-inf")
        """Wall clock of the last round, and the display's clock that its figures show."""
        self._turns = (0, 0, 0)

    # ------------------------------------------------------------------------------- structure

    def compose(self) -> ComposeResult:
        """All widgets of all views. `place_panels` shows those that fit."""
        yield self.header
        with Row(id="top"):
            with Column(id="left"):
                yield self.chat_box
                yield Box(self.detail, id="detail-box")
            with Row(id="pool"):
                yield self.map_box
                with Column(id="side"):
                    yield Box(self.queues, id="queues-box")
                    yield Box(MemoryPanel(), id="memory-box")
                    yield Box(BudgetPanel(), id="budget-box")
                    yield Box(KernelsPanel(), id="kernels-box")
        yield Box(self.strip, id="strip-box")
        with Row(id="graphs"):
            for panel, name in ((TtftPanel, "ttft"), (ItlPanel, "itl"), (ThroughputPanel, "throughput")):
                yield Box(panel(), id=f"{name}-box")
            # instead of the one next to the map, if there are too few rows
            yield Box(MemoryPanel(), id="memory-low-box")
            yield Box(DevicePanel(), id="device-box")
        with Row(id="tables"):
            yield Box(PrefixCachePanel(), id="cache-box")
            yield Box(HashTablePanel(), id="table-box")
            yield Box(EvictionsPanel(), id="evictions-box")
            yield Box(EventLogPanel(), id="events-box")
        yield Box(self.log_panel, id="log-box")
        yield self.caption
        yield self.step_line
        with Row(id="ask"):
            yield Label("›", id="mark")
            yield self.prompt
        yield self.hint
        yield self.key_line

    def on_mount(self) -> None:
        """Start in the mode that fits the source."""
        self._lines, self._boxes = list(self.query(Lines)), list(self.query(Box))
        self.screen_layout_refresh_signal.subscribe(self, self._forget_view, immediate=True)
        self._placed = [w for w in self.walk_children(Widget) if w.id in PLACED]
        self.place_panels()
        if self.live:
            self.prompt.focus()
        else:
            self.prompt.disabled = True
            self.map.focus()

    # --------------------------------------------------------------------------------- layout

    def on_resize(self, _event: events.Resize) -> None:
        """The terminal's size decides what is shown where."""
        self.place_panels()

    def place_panels(self) -> None:
        """Show what fits, each as large as the arrangement says."""
        width, height = self.app.size
        asked = Asked(
            width,
            height,
            self.view,
            live=self.live,
            selected=self.selected is not None,
            logs=self.logs,
            profiled=self.profiled,
            caption=self.caption_rows,
        )
        if asked == self._arranged or not self._placed:
            return
        self._arranged = asked
        plan = arrange(asked)
        self.set_class(plan.tiny, "-tiny")
        for widget in self._placed:
            size = plan.sizes.get(widget.id or "")
            widget.display = size is not None
            if size is not None:
                widget.styles.width, widget.styles.height = size
                if isinstance(widget, (Row, Column)) and not isinstance(widget, Box):
                    vertical = isinstance(widget, Column) or widget.id in plan.stacked
                    widget.styles.layout = "vertical" if vertical else "horizontal"

    def has_room_for(self, view: View) -> bool:
        """The terminal is large enough for the panels of this view."""
        return not is_tiny(*self.app.size, view)

    def show_view(self, view: View) -> None:
        """Switch between chat, ops and all."""
        self.view = view
        self.place_panels()

    def toggle_logs(self) -> None:
        """Show or hide what was printed."""
        self.logs = not self.logs
        self.place_panels()

    # ------------------------------------------------------------------------------- painting

    def paint(self, state: DashboardState, now: float, wall: float, every: bool) -> bool:
        """Paint a round or, between two rounds, what moves. Returns True if a round is owed.

        A round paints every widget in view, so that all figures on the screen are of one moment.
        """
        self.profiled = state.engine.profile is not None
        self.place_panels()
        seen = (id(state), state.generation, state.seq)
        if seen != self._seen:
            self._seen, self._moved_at = seen, wall
        in_view = self.in_view
        changed: list[Region] = []
        if every or self._round_is_due(state, wall):
            if seen != self._round_of or now - self._now >= REFRESH or now < self._now:
                self._now = now  # else ages and rates stay those of the round before
            self._round_of, self._round_at, self._turns = seen, wall, _turns(state)
            for widget in in_view:
                changed += widget.paint_into(state, self._now)
                widget.stale = False
            below = self._pointed_at(state) or self._just_happened(state, self._now)
            for box in self._boxes:
                changed += box.retitle(below if box is self.map_box else "")
        else:
            for widget in in_view:
                if widget.MOVES:
                    changed += widget.paint_into(state, now, between=True)
        if changed:
            draw_regions(self, changed)
        return self._round_at < self._moved_at

    def paint_loading(self, state: DashboardState, now: float) -> None:
        """Paint only how far a recording is with a long seek; all else waits until the state is whole again."""
        changed: list[Region] = []
        telling: list[Lines] = [self.header, self.key_line]
        if self.chat.is_empty:
            telling.append(self.chat)
        for widget in self.in_view:
            if widget in telling:
                changed += widget.paint_into(state, now)
                widget.stale = False
        if changed:
            draw_regions(self, changed)

    def _round_is_due(self, state: DashboardState, wall: float) -> bool:
        """Figures that change faster than ROUND cannot be read. A request that comes or ends is shown at once, if the
        last round that came early for one is long enough ago."""
        if wall - self._round_at >= ROUND or self.stale or state.generation != self._round_of[1]:
            return True
        early = _turns(state) != self._turns and wall - self._early_at >= ROUND
        if early:
            self._early_at = wall
        return early

    @property
    def in_view(self) -> list[Lines]:
        """The painted widgets that the layout shows."""
        if self._in_view is None:
            self._in_view = [widget for widget in self._lines if _shown(widget)]
        return self._in_view

    def _forget_view(self, _screen: Screen[None]) -> None:
        self._in_view = None

    @property
    def stale(self) -> bool:
        """Some widget asked for a frame."""
        return any(widget.stale for widget in self.in_view)

    # ----------------------------------------------------------------------- focus and key mode

    @property
    def typing(self) -> bool:
        """Letters go into the prompt."""
        return self.focused is self.prompt

    def on_descendant_focus(self) -> None:
        """The last line shows the keys of the mode, also while nothing else changes."""
        self.key_line.wake()

    def on_descendant_blur(self) -> None:
        """As above: nothing may be focused next."""
        self.key_line.wake()

    def action_back(self) -> None:
        """Out of the prompt; then out of the selection."""
        if self.typing:
            target = next((w for w in (self.map, self.strip, self.chat) if _shown(w)), None)
            self.set_focus(target)
        elif self.selected is not None:
            self.select(None)

    # ------------------------------------------------------------------------------------ link

    def select(self, block: int | None) -> None:
        """Show this block's details and light it up everywhere."""
        self.selected = self.map.selected = self.detail.block = block
        self.place_panels()
        self._hovered = frozenset()
        self._relink()

    def _relink(self) -> None:
        ids = self._hovered or (frozenset() if self.selected is None else frozenset({self.selected}))
        for widget in (self.map, self.strip, self.chat):
            if widget.link != ids:
                widget.set_link(ids)
                widget.wake()
        self.detail.wake()

    def _point(self, ids: Iterable[int], clicked: bool) -> None:
        blocks = [b for b in ids if 0 < b < self.state.num_blocks]
        if clicked and blocks:
            self.select(blocks[0])
        hovered = frozenset() if clicked else frozenset(blocks)
        if hovered != self._hovered or clicked:
            self._hovered = hovered
            self._relink()
        if blocks != self._pointed:
            self._pointed = blocks
            self.map.wake()

    def _pointed_at(self, state: DashboardState) -> str:
        """For the line under the map: what is pointed at."""
        blocks = [b for b in (self._pointed or ()) if b < state.num_blocks]
        if not blocks and self.selected is not None and self.selected < state.num_blocks:
            blocks = [self.selected]
        if not blocks:
            return ""
        if len(blocks) > 1:
            return f"blocks {blocks[0]:,} to {blocks[-1]:,}"
        info = state.block(blocks[0])
        refs = f"{info.ref} ref{'s' * (info.ref != 1)}"
        return f"block {info.id:,} · {info.state.name.lower()} · {refs} · read {info.hits}×"

    def _just_happened(self, state: DashboardState, now: float) -> str:
        """For the same line: what was just copied or evicted."""
        copies = self.motion.copies
        if copies:
            return "copied " + ", ".join(f"{src}→{dst}" for src, dst in copies[-3:])
        for moment in islice(reversed(state.moments), 64):
            if now - moment.t > EVICTION_SHOWN:
                break
            if moment.kind == "evicted":
                room = max(20, self.map_box.size.width - 6)
                return cut(moment_text.describe(state, moment_text.fold([moment])[0], room), room)
        return ""

    @on(BlockMap.Pointed)
    def _map_pointed(self, event: BlockMap.Pointed) -> None:
        self._point(event.ids, event.clicked)

    @on(LookupStrip.Pointed)
    @on(Chat.Pointed)
    def _text_pointed(self, event: LookupStrip.Pointed | Chat.Pointed) -> None:
        view = self.state.requests.get(event.request_id)
        if view is not None:
            self._point(lookup.physical(lookup.table_of(self.state, view), event.indices), event.clicked)
            if event.clicked and isinstance(event, Chat.Pointed):
                self.strip.picked = event.request_id


def _turns(state: DashboardState) -> tuple[int, int, int]:
    """Differs when a request came, started or ended."""
    return len(state.requests), len(state.requests.running), len(state.requests.waiting)


def _shown(widget: Widget) -> bool:
    return all(node.display for node in widget.ancestors_with_self if isinstance(node, Widget))
