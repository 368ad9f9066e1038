"""BlockMap: every physical block of the pool, one a cell while they fit, else half-block pixels.

Owns the looks of a cell. Invariant: the glyph of a cell is always the state of its block. Marks (hit, copied, link, a
moment after an eviction) change its colour; two have their own glyph, for one state only: ◆ is an
active block that was hit, × a block whose content was evicted and that nothing has been written to since. Only
cells that differ from the last frame are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from kvtop.paint.map_layout import STATES, Histogram, Layout
from kvtop.paint.motion import Motion
from kvtop.state.blocks import BlockState
from kvtop.units import NOT_HERE
from kvtop.widgets.base.lines import Lines, Part

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState

# Codes of a cell: 6 bits say which glyph, the bits above how it is coloured.
FREE, CACHED, FILLING, ACTIVE, SHARED = 0, 1, 2, 10, 11
HIT, EVICTED, VOID = 20, 21, 63
GLYPH = 63
COPY, LINK, HIT_GLOW, EVICTED_GLOW, FLASH = 64, 128, 256, 512, 1024

_SHARES = "23456789+"
GLYPHS: dict[int, str] = {
    FREE: "·",
    CACHED: "▒",
    ACTIVE: "█",
    HIT: "◆",
    EVICTED: "×",
    VOID: " ",
    **{FILLING + i: glyph for i, glyph in enumerate("▁▂▃▄▅▆▇█")},
    **{SHARED + i: glyph for i, glyph in enumerate(_SHARES)},
}
"""One glyph a code: the state can be read without colour."""

_INKS: dict[int, str] = {
    FREE: "free",
    CACHED: "cached",
    ACTIVE: "active",
    HIT: "hit",
    EVICTED: "evicted",
    **{FILLING + i: "filling" for i in range(8)},
    **{SHARED + i: "shared" for i in range(9)},
}
"""Palette entry of a glyph."""

_OF_STATE = np.array([FREE, CACHED, FILLING, ACTIVE, SHARED], np.int16)
_PIXELS = ("free", "cached", "filling", "active", "shared", "evicted", "hit", "copy", "select", "background")
"""Palette entry of a pixel: five states as in BlockState, then marks by rising rank."""
_K = len(_PIXELS)
_P_EVICTED, _P_HIT, _P_COPY, _P_SELECT, _P_VOID = 5, 6, 7, 8, 9
_GLYPH_CODES = np.array(
    [FREE, CACHED, FILLING + 4, ACTIVE, SHARED, EVICTED, HIT | HIT_GLOW, HIT | COPY, HIT | LINK, VOID],
    np.int16,
)
"""Cell code of a pixel where there is no colour."""

_SHORT = {"active": "act", "filling": "fill", "evicted": "evict"}
_LEGEND = {
    "hit": "◆",
    "active": "█",
    "shared": "2..9",
    "cached": "▒",
    "filling": "▅",
    "evicted": "×",
    "free": "·",
}
_NO_GRID = np.zeros((0, 0), np.int16)


class BlockMap(Lines):
    """The pool. Focus it to walk over the blocks with the arrow keys."""

    can_focus = True
    MOVES = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "walk(-1, 0)", "Walk over the blocks", show=False),
        Binding("right,l", "walk(1, 0)", "", show=False),
        Binding("up,k", "walk(0, -1)", "", show=False),
        Binding("down,j", "walk(0, 1)", "", show=False),
    ]

    @dataclass
    class Pointed(Message):
        """The mouse is over these blocks (none: it left); clicked: they were selected."""

        ids: range
        clicked: bool

    def __init__(self, motion: Motion, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.motion = motion
        self.projection: Layout | None = None
        """How blocks lie on cells; None before the first paint."""
        self.selected: int | None = None
        self.link: frozenset[int] = frozenset()
        self._block_size = 0
        self._generation = -1
        self._touched: list[NDArray[np.int64]] = []
        self._histogram: Histogram | None = None
        self._grid = _NO_GRID
        self._segments: dict[tuple[int, int], Segment] = {}

    # --------------------------------------------------------------------------------- inputs

    def touch(self, ids: NDArray[np.int64]) -> None:
        """These blocks changed (DashboardState.take_dirty); each call names a block once."""
        if len(ids) and self._histogram is not None:
            self._touched.append(ids)
            if len(self._touched) > 100:  # out of view: a new count is cheaper than a long list
                self.projection = None
                self._touched.clear()

    def set_link(self, ids: Iterable[int]) -> None:
        """Light up these blocks as belonging to what is pointed at elsewhere."""
        self.link = frozenset(ids)

    @property
    def title(self) -> str:
        """Name and scale, for the border of the box around it."""
        scale = f" · {self.projection.title(self._block_size)}" if self.projection is not None else ""
        return f"KV pool{scale}"

    def forget(self) -> None:
        """Theme or size changed: every row is drawn again."""
        super().forget()
        self._segments.clear()
        self.projection = None

    # ------------------------------------------------------------------------------- painting

    def paint(self, state: DashboardState, now: float) -> None:
        """Project the state and refresh the cells that differ."""
        width, height = self.size
        n = state.num_blocks - 1
        known = state.started is not None and "blocks" in state.started.capabilities
        if width < 1 or height < 1 or n < 1 or not known:
            self.projection = None
            self.set_rows([] if n < 1 else [[(NOT_HERE, self.ink("muted"))]])
            return
        rows = height - (height >= 3)
        layout = self.projection
        if layout is None or layout.n != n or state.generation != self._generation:
            layout = self._project(state, n, width, rows)
        self._draw_blocks(state, layout)
        if rows < height:
            self.set_row(rows, self._legend(state, layout))

    def paint_between(self, state: DashboardState, now: float) -> None:
        """The cells. The legend's counts wait for the next round."""
        layout = self.projection
        if layout is not None and state.generation == self._generation and layout.n == state.num_blocks - 1:
            self._draw_blocks(state, layout)

    def _draw_blocks(self, state: DashboardState, layout: Layout) -> None:
        cells = layout.mode == "cells"
        self._draw(self._cells(state, layout) if cells else self._pixels(state, layout), layout)

    def _project(self, state: DashboardState, n: int, width: int, rows: int) -> Layout:
        layout = Layout.fit(n, width, rows, colour=not self.palette.hueless)
        if layout != self.projection:
            self._grid = _NO_GRID
            self._segments.clear()
        self.projection, self._block_size, self._generation = layout, state.block_size, state.generation
        self._histogram = None if layout.mode == "cells" else Histogram(layout, state.pool.state[1:])
        self._touched.clear()
        return layout

    def _cells(self, state: DashboardState, layout: Layout) -> NDArray[np.int16]:
        """[height, columns] codes, one block a cell."""
        kinds = state.pool.state
        codes: NDArray[np.int16] = _OF_STATE[kinds]  # by block id, the null block included
        filling = np.flatnonzero(kinds == BlockState.FILLING)
        eighths = -(-state.pool.fill[filling].astype(np.int32) * 8 // self._block_size)
        codes[filling] = FILLING + np.clip(eighths, 1, 8) - 1
        shared = np.flatnonzero(kinds == BlockState.SHARED)
        codes[shared] = SHARED + np.clip(state.pool.ref[shared], 2, 10) - 2
        self._mark_cells(codes, state)
        grid = np.full(layout.pixels, VOID, np.int16)
        grid[: layout.n] = codes[1:]
        return grid.reshape(layout.rows, layout.columns)

    def _mark_cells(self, codes: NDArray[np.int16], state: DashboardState) -> None:
        """codes: by block id."""
        motion = self.motion
        hit, flash, evicted = motion.hit(), motion.flash(), motion.evicted()
        if len(hit):
            codes[hit[codes[hit] == ACTIVE]] = HIT
            codes[hit] |= HIT_GLOW
            codes[flash] |= FLASH
        if len(evicted):
            empty = _unwritten(state, evicted)
            codes[evicted[empty]] = EVICTED
            codes[evicted[~empty]] |= EVICTED_GLOW
        for pair in motion.copies:
            codes[list(pair)] |= COPY
        codes[self._lit(len(codes))] |= LINK

    def _lit(self, count: int) -> list[int]:
        """Ids below `count` of the linked and selected blocks."""
        ids = self.link if self.selected is None else self.link | {self.selected}
        return [block for block in ids if 0 < block < count]

    def _pixels(self, state: DashboardState, layout: Layout) -> NDArray[np.int16]:
        """[height, width] codes of pairs, top * _K + bottom; cell codes where there is no colour. A pixel has one
        colour only, so that marks show there for a moment and only where they still say what the block holds."""
        histogram = self._histogram
        assert histogram is not None
        for ids in self._touched:
            histogram.update(ids, state.pool.state[1:])
        self._touched.clear()
        pixels, motion = histogram.majority(), self.motion

        def at(ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
            return histogram.pixel_of[np.asarray(ids, np.int64) - 1]  # its first entry is block 1's

        hit = motion.fresh()
        if layout.mode == "halves":
            pixels[layout.n :] = _P_VOID
            hit = motion.hit()
        evicted = motion.evicted()
        pixels[at(hit[state.pool.state[hit] >= BlockState.ACTIVE])] = _P_HIT
        pixels[at(evicted[_unwritten(state, evicted)])] = _P_EVICTED
        for pair in motion.copies:
            pixels[at(pair)] = _P_COPY
        pixels[at(self._lit(layout.n + 1))] = _P_SELECT
        if layout.stack == 1:
            return _GLYPH_CODES[pixels].reshape(layout.height, layout.width)
        grid = pixels.reshape(2 * layout.height, layout.width)
        return grid[0::2] * np.int16(_K) + grid[1::2]

    def _draw(self, grid: NDArray[np.int16], layout: Layout) -> None:
        if self._grid.shape != grid.shape:
            # Also rows between blocks, which nothing draws: they may hold what another layout left there.
            self.resize_rows(0)
            self.resize_rows(layout.height)
            changed = np.ones(grid.shape, bool)
        else:
            changed = self._grid != grid
        regions = []
        pitch, spare = layout.pitch, layout.width - layout.columns * layout.pitch
        for y in np.flatnonzero(changed.any(1)).tolist():
            xs, line = np.flatnonzero(changed[y]), grid[y]
            starts = np.concatenate(([0], np.flatnonzero(line[1:] != line[:-1]) + 1))
            lengths = np.diff(starts, append=len(line))
            pairs = zip(line[starts].tolist(), lengths.tolist(), strict=True)
            segments = [self._segment(code, count, layout) for code, count in pairs]
            if spare:
                segments.append(Segment(" " * spare, self.base))
            strip = Strip(segments, layout.width)
            self.set_strip(y * layout.rise, strip)
            first, last = int(xs[0]), int(xs[-1])
            regions.append(Region(first * pitch, y * layout.rise, (last - first + 1) * pitch, 1))
        self._grid = grid
        if regions:
            self.changed_at(*regions)

    # --------------------------------------------------------------------------- how it looks

    def _segment(self, code: int, count: int, layout: Layout) -> Segment:
        segment = self._segments.get((code, count))
        if segment is None:
            if layout.stack == 2:
                top, bottom = divmod(code, _K)
                # The terminal's own background (theme ansi) is no ink: as one it would be the foreground.
                glyph = " " if top == bottom == _P_VOID else "▀"
                style = self.palette.pair(_PIXELS[top], _PIXELS[bottom])
            else:
                glyph, style = GLYPHS[code & GLYPH] + " " * (layout.pitch - 1), self._look(code)
            segment = self._segments[code, count] = Segment(glyph * count, self.base + style)
        return segment

    def _look(self, code: int) -> Style:
        glyph = code & GLYPH
        for mark, name in ((LINK, "select"), (COPY, "copy"), (FLASH, "hit")):
            if code & mark:
                return self.palette.on(name)
        if glyph == VOID:
            return Style.null()
        name = "evicted" if code & EVICTED_GLOW else "hit" if code & HIT_GLOW else _INKS[glyph]
        glows = bool(code & (EVICTED_GLOW | HIT_GLOW))
        return self.ink(name) + Style(bold=glows or glyph == EVICTED or GLYPHS[glyph] in _SHARES)

    def _legend(self, state: DashboardState, layout: Layout) -> list[Part]:
        """Glyphs (or swatches of pixels) with names, and counts where there is room."""
        counts: dict[str, Any] = {}
        if layout.width >= 92:
            kinds = np.bincount(state.pool.state[1:], minlength=STATES).tolist()
            counts = dict(zip(_PIXELS, kinds, strict=False))
        names = [(n, g, n) for n, g in _LEGEND.items()]
        if sum(len(g + n) + 1 for n, g, _ in names) - 1 > layout.width:
            names = [(n, g[0], _SHORT.get(n, n)) for n, g, _ in names]
        if sum(len(g + n) + 1 for _, g, n in names) - 1 > layout.width:  # a bar's height speaks for itself
            names = [(n, g, "shr" if n == "shared" else w) for n, g, w in names if n != "filling"]
        muted, parts, used = self.ink("muted"), list[Part](), 0
        for name, glyph, word in names:
            mark = "■" if layout.stack == 2 else glyph
            word = f" {word} {counts[name]:,}" if name in counts else f" {word}" if counts else word
            gap = "" if not parts else "   " if counts else " "
            used += len(gap + mark + word)
            if used > layout.width:
                break
            parts += [(gap, muted), (mark, self.ink(name)), (word, muted)]
        return parts

    # ------------------------------------------------------------------------------ selection

    def _under(self, event: events.MouseEvent) -> range:
        return self.projection.blocks_at(event.x, event.y) if self.projection is not None else range(0)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Point at what lies under the mouse."""
        self.post_message(self.Pointed(self._under(event), clicked=False))

    def on_leave(self, _event: events.Leave) -> None:
        """Point at nothing."""
        self.post_message(self.Pointed(range(0), clicked=False))

    def on_click(self, event: events.Click) -> None:
        """Select the block under the mouse."""
        if ids := self._under(event):
            self.post_message(self.Pointed(ids, clicked=True))

    def action_walk(self, dx: int, dy: int) -> None:
        """Move the selection by one block or one row."""
        if (layout := self.projection) is not None:
            at = 1 if self.selected is None else self.selected + dx + dy * layout.row
            if 1 <= at <= layout.n:
                self.post_message(self.Pointed(range(at, at + 1), clicked=True))


def _unwritten(state: DashboardState, ids: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which of these blocks hold nothing: no slot is written, no content can be found in them."""
    found: NDArray[np.bool_] = (state.pool.fill[ids] == 0) & ~state.pool.hashed[ids]
    return found
