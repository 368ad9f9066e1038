"""BlockMap: every physical block of the pool, one a cell while they fit, else half-block pixels.

Owns the projection of blocks to cells. Invariant: without its marks (hit, evicted, copied, link) a cell
shows exactly the state's glyph for its block; with more blocks than pixels each pixel shows the majority
of its blocks, from a histogram that is kept up by deltas, and the title says the scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from kvtop.motion import Motion
from kvtop.widgets.lines import Lines, Part

if TYPE_CHECKING:
    from kvtop.state import DashboardState

# Codes of a cell; the state's own come first. 6 bits, then two overlays.
FREE, CACHED, FILLING, ACTIVE, SHARED, HIT, FLASH, EVICTED, HIT_SHARED, VOID = 0, 1, 2, 10, 11, 20, 21, 22, 23, 63
COPY, LINK = 64, 128

_EIGHTHS = "▁▂▃▄▅▆▇█"
GLYPHS: dict[int, str] = {FREE: "·", CACHED: "▒", ACTIVE: "█", HIT: "◆", FLASH: "◆", EVICTED: "×", VOID: " "}
"""One glyph a code: the state is readable without colour."""
GLYPHS |= {FILLING + i: glyph for i, glyph in enumerate(_EIGHTHS)}
GLYPHS |= {SHARED + i: glyph for i, glyph in enumerate("23456789+")}
GLYPHS |= {HIT_SHARED + i: glyph for i, glyph in enumerate("23456789+")}

NAMES: dict[int, str] = {FREE: "free", CACHED: "cached", ACTIVE: "active", HIT: "hit", FLASH: "hit", EVICTED: "evicted"}
"""Palette entry of a code."""
NAMES |= {FILLING + i: "filling" for i in range(8)}
NAMES |= {SHARED + i: "shared" for i in range(9)} | {HIT_SHARED + i: "hit" for i in range(9)}

# Codes of a pixel. Five states as in BlockState, then marks by rising priority.
_PIXELS = ("free", "cached", "filling", "active", "shared", "evicted", "hit", "copy", "select", "")
_K = len(_PIXELS)
_P_EVICTED, _P_HIT, _P_COPY, _P_SELECT, _P_VOID = 5, 6, 7, 8, 9
_STATES = 5

Mode = Literal["cells", "halves", "majority"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How `n` blocks (ids 1..n) lie on width x height cells; pitch: cells a block takes across."""

    mode: Mode
    width: int
    height: int
    pitch: int
    n: int

    @classmethod
    def fit(cls, n: int, width: int, height: int) -> Layout:
        """The most legible mode in which all blocks are visible."""
        if n <= (width // 2) * height:
            return cls("cells", width, height, 2, n)
        if n <= width * height:
            return cls("cells", width, height, 1, n)
        return cls("halves" if n <= 2 * width * height else "majority", width, height, 1, n)

    @property
    def columns(self) -> int:
        """Blocks (or pixels) in a row."""
        return self.width // self.pitch

    def title(self, block_size: int) -> str:
        """The scale in words."""
        if self.mode == "cells":
            return f"1 cell = 1 physical block = {block_size} tokens"
        if self.mode == "halves":
            return f"2 blocks a cell, {block_size} tokens each"
        per_cell = self.n / max(1, self.width * self.height)
        return f"{per_cell:,.0f} blocks a cell, majority" if per_cell >= 10 else f"{per_cell:.1f} blocks a cell, majority"

    def blocks_at(self, x: int, y: int) -> range:
        """Ids under cell (x, y), lowest first."""
        if not (0 <= x < self.columns * self.pitch and 0 <= y < self.height):
            return range(0)
        if self.mode == "cells":
            first = y * self.columns + x // self.pitch + 1
            return range(first, min(first + 1, self.n + 1))
        pixels = 2 * self.width * self.height
        top, bottom = 2 * y * self.width + x, (2 * y + 1) * self.width + x
        if self.mode == "halves":
            return range(top + 1, min(top + 2, self.n + 1))
        ids = [range(-(-p * self.n // pixels) + 1, -(-(p + 1) * self.n // pixels) + 1) for p in (top, bottom)]
        return ids[0] or ids[1]


class BlockMap(Lines):
    """The pool. Focus it to walk over the blocks with the arrow keys."""

    can_focus = True
    BINDINGS: list[BindingType] = [
        Binding("left,h", "walk(-1, 0)", "Walk", show=False),
        Binding("right,l", "walk(1, 0)", "Walk", show=False),
        Binding("up,k", "walk(0, -1)", "Walk", show=False),
        Binding("down,j", "walk(0, 1)", "Walk", show=False),
    ]

    @dataclass
    class Pointed(Message):
        """The mouse is over these blocks (none: it left); clicked: they were selected."""

        ids: range
        clicked: bool

    @dataclass
    class Rescaled(Message):
        """The map draws blocks at another scale."""

        title: str

    def __init__(self, motion: Motion, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.motion = motion
        self.layout_: Layout | None = None
        self.selected: int | None = None
        self.link: frozenset[int] = frozenset()
        self._touched: list[NDArray[np.intp]] = []
        self._shown = np.zeros((0, 0), np.int16)
        self._counts = np.zeros((0, _STATES), np.int32)
        self._counted = np.zeros(0, np.uint8)
        self._pixel_of = np.zeros(0, np.int64)
        self._segments: dict[tuple[int, int], Segment] = {}
        self._styles: dict[int, Style] = {}
        self._known: tuple[int, int] | None = None

    # --------------------------------------------------------------------------------- inputs

    def touch(self, ids: NDArray[np.intp]) -> None:
        """These blocks changed since the last paint (DashboardState.take_dirty)."""
        if len(ids):
            self._touched.append(ids)

    def set_link(self, ids: Iterable[int]) -> None:
        """Light up these blocks as belonging to what is pointed at elsewhere."""
        self.link = frozenset(ids)

    def forget(self) -> None:
        """Theme or size changed: every row is drawn again."""
        super().forget()
        self._segments.clear()
        self._styles.clear()
        self._known = None
        self._shown = np.zeros((0, 0), np.int16)

    # ------------------------------------------------------------------------------- painting

    def paint(self, state: DashboardState, now: float) -> None:
        """Project the state and refresh the cells that differ."""
        width, height = self.size
        n = len(state.state) - 1
        if width < 1 or height < 1 or n < 1 or state.started is None:
            self.set_rows([])
            self._shown = np.zeros((0, 0), np.int16)
            return
        legend = height >= 3
        rows = height - legend
        key = (n, state.started.block_size)
        layout = self.layout_
        if layout is None or self._known != key or (layout.width, layout.height) != (width, rows):
            self.layout_ = layout = Layout.fit(n, width, rows)
            self._known = key
            self._counted = np.zeros(0, np.uint8)
            self._shown = np.zeros((0, 0), np.int16)
            self.post_message(self.Rescaled(layout.title(state.started.block_size)))
        if layout.mode == "cells":
            grid = self._cells(state, layout)
        else:
            grid = self._pixels(state, layout)
        self._touched.clear()
        self._draw(grid, layout)
        if legend:
            self.set_row(rows, self._legend(state, layout))

    def _cells(self, state: DashboardState, layout: Layout) -> NDArray[np.int16]:
        """Codes [height, columns] of one block a cell."""
        base = np.array([FREE, CACHED, FILLING, ACTIVE, SHARED], np.int16)
        assert state.started is not None
        kind, ref = state.state[1:], state.ref[1:]
        codes = base[kind]
        filling = np.flatnonzero(kind == 2)
        if len(filling):
            size = state.started.block_size
            eighths = -(-state.fill[1:][filling].astype(np.int32) * 8 // size)
            codes[filling] = FILLING + np.clip(eighths, 1, 8) - 1
        shared = np.flatnonzero(kind == 4)
        codes[shared] = SHARED + np.clip(ref[shared], 2, 10) - 2
        self._mark_cells(codes)
        grid = np.full(layout.columns * layout.height, VOID, np.int16)
        grid[: layout.n] = codes
        return grid.reshape(layout.height, layout.columns)

    def _mark_cells(self, codes: NDArray[np.int16]) -> None:
        motion = self.motion
        hit = motion.hit() - 1
        if len(hit):
            # A hit block given back meanwhile is cached again: then its true state shows.
            codes[hit[codes[hit] == ACTIVE]] = HIT
            shared = hit[(codes[hit] >= SHARED) & (codes[hit] < HIT)]
            codes[shared] += HIT_SHARED - SHARED
            fresh = motion.fresh() - 1
            codes[fresh[(codes[fresh] >= HIT_SHARED) & (codes[fresh] < VOID)]] = HIT
            codes[motion.flash() - 1] = FLASH
        codes[motion.evicted() - 1] = EVICTED
        for pair in motion.copies:
            for block in pair:
                codes[block - 1] |= COPY
        for block in self._lit():
            if 0 < block <= len(codes):
                codes[block - 1] |= LINK

    def _lit(self) -> Iterable[int]:
        return self.link | {self.selected} if self.selected is not None else self.link

    def _pixels(self, state: DashboardState, layout: Layout) -> NDArray[np.int16]:
        """Pairs [height, width] of top and bottom pixel codes, top * _K + bottom."""
        n, count = layout.n, 2 * layout.width * layout.height
        if len(self._counted) != n:
            self._pixel_of = np.arange(n, dtype=np.int64)
            if layout.mode == "majority":
                self._pixel_of = self._pixel_of * count // n
            self._counted = state.state[1:].copy()
            flat = np.bincount(self._pixel_of * _STATES + self._counted, minlength=count * _STATES)
            self._counts = flat.reshape(count, _STATES).astype(np.int32)
        elif self._touched:
            ids = np.unique(np.concatenate(self._touched)) - 1
            ids = ids[ids >= 0]
            pixels, old, new = self._pixel_of[ids], self._counted[ids], state.state[1:][ids]
            flat = self._counts.reshape(-1)
            np.subtract.at(flat, pixels * _STATES + old, 1)
            np.add.at(flat, pixels * _STATES + new, 1)
            self._counted[ids] = new
        # argmax takes the first of equals: reversed, so that the livelier state wins a tie.
        pixels = (_STATES - 1 - self._counts[:, ::-1].argmax(1)).astype(np.int16)
        if layout.mode == "halves":
            pixels[n:] = _P_VOID
        self._mark_pixels(pixels)
        grid = pixels.reshape(2 * layout.height, layout.width)
        return grid[0::2] * np.int16(_K) + grid[1::2]

    def _mark_pixels(self, pixels: NDArray[np.int16]) -> None:
        motion, at = self.motion, self._pixel_of
        if len(hit := motion.fresh()):
            pixels[at[hit - 1]] = _P_HIT
        if len(evicted := motion.evicted()):
            pixels[at[evicted - 1]] = _P_EVICTED
        for pair in motion.copies:
            pixels[at[np.array(pair) - 1]] = _P_COPY
        lit = [b - 1 for b in self._lit() if 0 < b <= len(at)]
        if lit:
            pixels[at[lit]] = _P_SELECT

    def _draw(self, grid: NDArray[np.int16], layout: Layout) -> None:
        height, width, pitch = layout.height, layout.width, layout.pitch
        if len(self._strips) < height or self._shown.shape != grid.shape:
            self._resize(height)
            changed = np.ones(grid.shape, bool)
        else:
            changed = self._shown != grid
        for y in np.flatnonzero(changed.any(1)).tolist():
            xs = np.flatnonzero(changed[y])
            line = grid[y]
            starts = np.concatenate(([0], np.flatnonzero(line[1:] != line[:-1]) + 1))
            lengths = np.diff(np.concatenate((starts, [len(line)])))
            segments = [self._segment(c, k) for c, k in zip(line[starts].tolist(), lengths.tolist(), strict=True)]
            spare = width - len(line) * pitch
            if spare:
                segments.append(Segment(" " * spare, self._base))
            self._rows[y] = None
            self.set_strip(y, Strip(segments, width), int(xs[0]) * pitch, (int(xs[-1]) + 1) * pitch)
        self._shown = grid

    # --------------------------------------------------------------------------- how it looks

    def _segment(self, code: int, count: int) -> Segment:
        segment = self._segments.get((code, count))
        if segment is None:
            layout = self.layout_
            assert layout is not None
            if layout.mode == "cells":
                glyph = GLYPHS[code & 63] + " " * (layout.pitch - 1)
            else:
                glyph = " " if code // _K == code % _K == _P_VOID else "▀"
            segment = self._segments[code, count] = Segment(glyph * count, self._style(code, layout.mode))
        return segment

    def _style(self, code: int, mode: Mode) -> Style:
        style = self._styles.get(code)
        if style is None:
            style = self._cell_style(code) if mode == "cells" else self._pixel_style(code)
            self._styles[code] = style
        return style

    def _cell_style(self, code: int) -> Style:
        if code & 63 == VOID:
            return self._base
        style = self._base + self.ink(NAMES[code & 63])
        if code & 63 == FLASH:
            style += Style(bold=True, reverse=True)
        elif code & 63 in (HIT, EVICTED):
            style += Style(bold=True)
        if code & COPY:
            style += Style(bgcolor=self.ink("copy").color)
        if code & LINK:
            style += Style(bgcolor=self.ink("select").color, color=self._base.bgcolor, bold=True)
        return style

    def _pixel_style(self, code: int) -> Style:
        top, bottom = divmod(code, _K)
        void = self._base.bgcolor
        return Style(
            color=void if top == _P_VOID else self.ink(_PIXELS[top]).color,
            bgcolor=void if bottom == _P_VOID else self.ink(_PIXELS[bottom]).color,
        )

    def _legend(self, state: DashboardState, layout: Layout) -> list[Part]:
        """Glyphs (cells) or swatches (pixels) with names, and counts where there is room."""
        kinds = np.bincount(state.state[1:], minlength=_STATES)
        counts = dict(zip(("free", "cached", "filling", "active", "shared"), kinds.tolist(), strict=True))
        glyphs = {"hit": "◆", "active": "█", "shared": "2", "cached": "▒", "filling": "▅", "evicted": "×", "free": "·"}
        wide = layout.width >= 92
        words = self._base + self.ink("muted")
        parts: list[Part] = []
        for name, glyph in glyphs.items():
            if name == "hit" and layout.mode != "cells" and not wide:
                continue
            text = name
            if layout.mode != "cells":
                glyph = "■"
            elif name == "shared":
                glyph, text = "2..9", "shared"
            if wide and name in counts:
                text = f"{name} {counts[name]:,}"
            gap = " " if wide else ""
            parts += [(glyph + gap, self._base + self.ink(name)), (text + ("   " if wide else " "), words)]
        return _fitting(parts, layout.width)

    # ------------------------------------------------------------------------------ selection

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Point at what lies under the mouse."""
        if self.layout_ is not None:
            self.post_message(self.Pointed(self.layout_.blocks_at(event.x, event.y), clicked=False))

    def on_leave(self, _event: events.Leave) -> None:
        """Point at nothing."""
        self.post_message(self.Pointed(range(0), clicked=False))

    def on_click(self, event: events.Click) -> None:
        """Select the block under the mouse."""
        if self.layout_ is not None and (ids := self.layout_.blocks_at(event.x, event.y)):
            self.post_message(self.Pointed(ids, clicked=True))

    def action_walk(self, dx: int, dy: int) -> None:
        """Move the selection by one block or one row."""
        layout = self.layout_
        if layout is None:
            return
        row = layout.columns if layout.mode != "majority" else max(1, layout.n // (2 * layout.height))
        at = 1 if self.selected is None else self.selected + dx + dy * row
        if 1 <= at <= layout.n:
            self.post_message(self.Pointed(range(at, at + 1), clicked=True))



def _fitting(parts: list[Part], width: int) -> list[Part]:
    """Whole pairs (glyph, word) as far as they fit."""
    used, kept = 0, list[Part]()
    for i in range(0, len(parts), 2):
        pair = parts[i : i + 2]
        cells = sum(len(text) for text, _ in pair)
        if used + len("".join(t for t, _ in pair).rstrip()) > width:
            break
        used += cells
        kept += pair
    return kept
