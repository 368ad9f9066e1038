"""Lines: the base of every painted widget, a list of finished rows with the Line API.

Owns the strips. Invariants: a row that did not change keeps its Strip object, which caches its ANSI text. Only changed
rows are refreshed. Every Segment has a Style (the NO_COLOR filter fails on None) with the background of the widget. A
size of 0 x 0 is allowed. Borders and padding belong to the parent, because `render_lines` does not use Textual's cache
of styles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.color import Color
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from kvtop.paint.palette import Palette
    from kvtop.state.dashboard import DashboardState

Part = tuple[str, Style]
"""Text without control characters (foreign text goes through `safe_text` first) and its style."""

_MOST_INKS = 512
"""Styles of one widget that are remembered."""

Row = tuple[Part, ...]
"""One line of a widget from left to right. A short row is padded, a long one is cut at the width."""


if TYPE_CHECKING:
    _Base = Widget
else:
    _Base = object  # not a widget: Textual inherits styles from the first base that is one


class KeepsLines(_Base):
    """Mixin for containers: keeps the rendered lines until the container is refreshed.

    After any change Textual renders all rows of all visible widgets. For frames and plain containers, which rarely
    change, that would be most of the cost of a frame.
    """

    _last: tuple[Region, list[Strip]] | None = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines of the other base class, rendered again only if something changed."""
        if self._last is None or self._last[0] != crop:
            self._last = crop, super().render_lines(crop)
        return self._last[1]

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        """Every change of the looks calls this."""
        self._last = None
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def notify_style_update(self) -> None:
        """Styles changed."""
        self._last = None
        super().notify_style_update()


class Lines(Widget):
    """A widget that is a list of rows.

    A subclass implements `paint(state, now)`, which gives its rows to `set_rows` or `set_row`. The application's clock
    calls it, also after a change of size or theme. Styles come from `self.palette`.
    """

    DEFAULT_CSS = "Lines { width: 1fr; height: 1fr; }"
    ALLOW_SELECT = False
    MOVES: ClassVar[bool] = False
    """`paint_between` also paints it in the frames between two rounds."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: list[Row | None] = []
        self._given: list[Iterable[Part] | None] = []
        """Each row as the subclass gave it. The same object again is the same row."""
        self._elsewhere: dict[int, Strip] = {}
        """While rows scroll: the strip of each row, by the identity of the row."""
        self._strips: list[Strip] = []
        self._finished: list[Strip] = []
        """What the compositor got last, after the filters."""
        self._finished_for: tuple[object, ...] = ()
        self._unfinished: set[int] = set()
        """Rows whose finished strip is out of date."""
        self.stale = True
        """Something other than the state changed (size, theme, selection): the next frame must paint it."""
        self._palette: Palette | None = None
        self._named: dict[str, Style] = {}
        self._inks: dict[int, tuple[Style, Style]] = {}
        """By the identity of a style: the style, and `base` + style."""
        self._collected: list[Region] | None = None
        self.base = Style.null()
        """The colours of the widget. Every style is added to them."""

    @property
    def size(self) -> Size:
        """Columns and rows. There is no border and no padding, so this is the outer size."""
        return self.outer_size

    # ------------------------------------------------------------------------- for subclasses

    def paint(self, state: DashboardState, now: float) -> None:
        """Show `state`. now: the display's clock in seconds (state.t, or later while something moves)."""

    @property
    def palette(self) -> Palette:
        """Styles of the current theme."""
        if self._palette is None:
            self._palette = self.app.palette  # type: ignore[attr-defined]
        return self._palette

    def ink(self, name: str) -> Style:
        """The palette's style for a block state, mark, graph or word ("free", "hit", "ttft", "muted")."""
        style = self._named.get(name)
        if style is None:
            style = self._named[name] = self.palette[name]
        return style

    @property
    def lines(self) -> list[str]:
        """The text of the rows. Each is as wide as the widget."""
        return [strip.text for strip in self._strips]

    def paint_between(self, state: DashboardState, now: float) -> None:
        """Paint what moves between two rounds, but no figure: figures are those of the last round. `paint` was called
        before."""

    def paint_into(self, state: DashboardState, now: float, between: bool = False) -> list[Region]:
        """Call `paint` or `paint_between` without a refresh. Returns the regions that changed, in coordinates of the
        screen: one refresh of the screen costs much less than one of every widget."""
        collected: list[Region] = []
        self._collected = collected
        try:
            (self.paint_between if between else self.paint)(state, now)
        finally:
            self._collected = None
        if not collected:
            return collected
        offset = self.region.offset
        return [region.translate(offset) for region in collected]

    def changed_at(self, *regions: Region) -> None:
        """Refresh these regions of the widget."""
        if self._collected is None:
            self.refresh(*regions)
        else:
            self._collected += regions

    def set_rows(self, rows: Sequence[Iterable[Part]], scrolls: bool = False) -> None:
        """Replace all rows; those below the height are dropped. scrolls: a row object may have moved to another place,
        and keeps its strip."""
        width, height = self.size
        self._elsewhere = dict(zip(map(id, self._given), self._strips, strict=True)) if scrolls else {}
        self.resize_rows(min(len(rows), height))
        regions = [self._put(y, row, width) for y, row in enumerate(rows[:height])] if width else []
        self._elsewhere = {}
        changed = [region for region in regions if region is not None]
        if changed:
            self.changed_at(*changed)

    def set_row(self, y: int, row: Iterable[Part]) -> None:
        """Replace row y, and refresh it from the first part that differs."""
        width, height = self.size
        if not width or not 0 <= y < height:
            return
        if y >= len(self._rows):
            self.resize_rows(y + 1)
        region = self._put(y, row, width)
        if region is not None:
            self.changed_at(region)

    def _put(self, y: int, row: Iterable[Part], width: int) -> Region | None:
        if row is self._given[y]:
            return None
        new = tuple([part for part in row if part[0]])
        old = self._rows[y]
        self._given[y] = row if isinstance(row, tuple) else None
        if new == old:
            return None
        self._rows[y] = new
        self.set_strip(y, self._elsewhere.get(id(row)) or self._finish(new, width))
        start = min(_common(old, new) if old else 0, width - 1)
        return Region(start, y, width - start, 1)

    def _finish(self, row: Row, width: int) -> Strip:
        segments = [Segment(text, self._over_base(style)) for text, style in row]
        cells = sum([cell_len(text) for text, _ in row])
        if cells < width:
            segments.append(Segment(" " * (width - cells), self.base))
        strip = Strip(segments, max(cells, width))
        return strip if cells <= width else strip.crop(0, width)

    def _over_base(self, style: Style) -> Style:
        """`base + style`, kept by the identity of the style, because its hash costs as much as the sum."""
        known = self._inks.get(id(style))
        if known is None:
            if len(self._inks) >= _MOST_INKS:
                self._inks.clear()
            known = self._inks[id(style)] = (
                style,
                self.base + style,
            )  # kept, so that no other style gets its id
        return known[1]

    def set_strip(self, y: int, strip: Strip) -> None:
        """Like `set_row`, with a finished strip of the width of the widget. The caller refreshes the region."""
        self._strips[y] = strip
        self._unfinished.add(y)

    def resize_rows(self, count: int) -> None:
        """Have exactly `count` rows; new ones are blank."""
        have = len(self._strips)
        if count < have:
            del self._rows[count:], self._given[count:], self._strips[count:]
            self._finished_for = ()
            self.changed_at(Region(0, count, self.size.width, have - count))
        elif count > have:
            self._finished_for = ()
            blank = Strip.blank(self.size.width, self.base)
            self._rows += [None] * (count - have)
            self._given += [None] * (count - have)
            self._strips += [blank] * (count - have)

    def forget(self) -> None:
        """Theme or size changed: the next paint makes every row again. Until then the old strips stay on the screen."""
        self._palette = None
        self._named.clear()
        self.base = self._current_base()
        self._inks.clear()
        self._rows = [None] * len(self._rows)
        self._given = [None] * len(self._rows)
        self.wake()

    def wake(self) -> None:
        """Ask for a frame soon, without waiting for the clock."""
        self.stale = True
        wake = getattr(self.app, "wake", None) if self.is_attached else None
        if wake is not None:
            wake()

    # ------------------------------------------------------------------------------ machinery

    def _current_base(self) -> Style:
        style = self.visual_style.rich_style
        return Style(color=style.color, bgcolor=style.bgcolor)

    def _on_mount(self, event: events.Mount) -> None:
        self.base = self._current_base()
        self._inks.clear()
        self.app.theme_changed_signal.subscribe(self, lambda _theme: self.forget(), immediate=True)

    def _on_resize(self, event: events.Resize) -> None:
        self.forget()
        self.refresh()

    def notify_style_update(self) -> None:
        """Textual calls this after any change of styles. Only colours matter here."""
        super().notify_style_update()
        if self.is_attached and self._current_base() != self.base:
            self.forget()

    def render_line(self, y: int) -> Strip:
        """Row y at full width. Textual calls it only while the mouse selects text, to find the character under it."""
        if not self.allow_select:
            return self._strip_at(y, self.size.width, None)
        return self._strip_at(y, self.size.width, self.text_selection).apply_offsets(0, y)

    def _strip_at(self, y: int, width: int, selection: Selection | None) -> Strip:
        strip = self._strips[y] if y < len(self._strips) else Strip.blank(width, self.base)
        if strip.cell_length != width:
            strip = strip.adjust_cell_length(width, self.base)
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = self._mark(strip, *span)
        return strip

    def render_lines(self, crop: Region) -> list[Strip]:
        """The strips after the application's filters (NO_COLOR, the terminal's own colours).

        After any change Textual asks every visible widget for all its rows. So the filtered list is kept too, and only
        changed rows are filtered again.
        """
        x, y, width, height = crop
        selection = self.text_selection if self.ALLOW_SELECT and self.allow_select else None
        filters = [f for f in self.get_line_filters() if not self._needless(f)]
        background = self.background_colors[1] if filters else None
        key = (crop, filters, background, selection, self.base)
        if key == self._finished_for and not self._unfinished:
            return self._finished
        if x or y or crop.size != self.size:
            full = max(self.size.width, x + width)
            lines = [self._strip_at(row, full, selection) for row in crop.line_range]
            return [_filtered(line, filters, background).crop(x, x + width) for line in lines]
        if key != self._finished_for:
            self._finished_for = key
            self._finished = [Strip.blank(0)] * height
            self._unfinished = set(range(height))
        for row in self._unfinished:
            if row < height:
                self._finished[row] = _filtered(self._strip_at(row, width, selection), filters, background)
        self._unfinished.clear()
        return self._finished

    def _needless(self, line_filter: LineFilter) -> bool:
        return isinstance(line_filter, ANSIToTruecolor) and not self.palette.native

    def _mark(self, strip: Strip, start: int, end: int) -> Strip:
        text = strip.text
        first = cell_len(text[:start])
        last = strip.cell_length if end == -1 else cell_len(text[:end])
        if last <= first:
            return strip
        style = self.palette.on("select")  # Textual's own may have no foreground
        left, middle, right = strip.crop(0, first), strip.crop(first, last), strip.crop(last)
        # The colours of the selection replace those of the segments.
        chosen = [Segment(s.text, (s.style or self.base) + style) for s in middle]
        return Strip.join([left, Strip(chosen, last - first), right])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text of the rows, without the padding on the right."""
        text = "\n".join(line.rstrip() for line in self.lines)
        return (selection.extract(text), "\n") if text.strip() else None

    def selection_updated(self, selection: Selection | None) -> None:
        """Repaint with the new selection."""
        self.refresh()


def _filtered(strip: Strip, filters: Iterable[LineFilter], background: Color | None) -> Strip:
    for line_filter in filters:
        assert background is not None
        strip = strip.apply_filter(line_filter, background)
    return strip


def _common(old: Row, new: Row) -> int:
    """Cells that the equal leading parts of two rows take."""
    cells = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        cells += cell_len(a[0])
    return cells
