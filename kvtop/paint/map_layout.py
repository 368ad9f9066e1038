"""Where blocks are on the map: its layouts, and the histogram that reduces many blocks to one pixel.

Pure numpy, no textual. Invariants: every block has exactly one pixel. `Histogram.counts[p]` is always the number of
blocks of each state under pixel p; it is updated with the (old, new) states of the blocks that changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

STATES = 5
"""Values of BlockState."""

Mode = Literal["cells", "halves", "majority", "glyphs"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How `n` blocks (ids 1..n) are placed on width x height cells, row by row.

    mode: cells (one block a cell), halves (two blocks a cell, one above the other), majority (each half cell stands for
    many blocks), glyphs (each cell stands for many blocks; used without colour). pitch, rise: cells that a block takes
    across and down, more than 1 if there is room for gaps.
    """

    mode: Mode
    width: int
    height: int
    pitch: int
    rise: int
    n: int

    @classmethod
    def fit(cls, n: int, width: int, height: int, colour: bool = True) -> Layout:
        """The most readable mode in which all blocks are visible. Without colour a cell has one glyph."""
        if n <= (width // 2) * ((height + 1) // 2):
            return cls("cells", width, height, 2, 2, n)
        if n <= width * height:
            return cls("cells", width, height, 1, 1, n)
        if not colour:
            return cls("glyphs", width, height, 1, 1, n)
        return cls("halves" if n <= 2 * width * height else "majority", width, height, 1, 1, n)

    @property
    def columns(self) -> int:
        """Blocks (or pixels) of a row."""
        return self.width // self.pitch

    @property
    def rows(self) -> int:
        """Rows of blocks, without the gaps between them."""
        return (self.height + self.rise - 1) // self.rise

    @property
    def stack(self) -> int:
        """Pixels of a cell, one above the other."""
        return 2 if self.mode in ("halves", "majority") else 1

    @property
    def pixels(self) -> int:
        """How many blocks have a place."""
        return self.columns * self.rows * self.stack

    @property
    def row(self) -> int:
        """Blocks of a row of cells: how far the keys up and down move."""
        if self.mode in ("cells", "halves"):
            return self.columns
        return max(1, self.n // (self.height * self.stack))

    def title(self, block_size: int) -> str:
        """The scale in words, not wider than the map."""
        if self.mode == "cells" and self.width < 44:
            return "1 cell = 1 block"
        if self.mode == "cells":
            block = "physical block" if self.width >= 54 else "block"
            return f"1 cell = 1 {block} = {block_size} tokens"
        if self.mode == "halves":
            return f"2 blocks a cell = {2 * block_size} tokens"
        per_cell = self.n / (self.columns * self.height)
        low = int(per_cell)
        mixed = per_cell < 10 and per_cell != low
        scale = f"{low} or {low + 1}" if mixed else f"{per_cell:,.0f}"
        text = f"{scale} blocks a cell"
        return f"{text}, majority" if self.width >= 46 else text

    def pixel_of(self) -> NDArray[np.int64]:
        """[n] pixel of each block, block id - 1 as the index."""
        ids = np.arange(self.n, dtype=np.int64)
        return ids * self.pixels // self.n if self.mode in ("majority", "glyphs") else ids

    def blocks_at(self, x: int, y: int) -> range:
        """The block ids under cell (x, y), the first one first."""
        column = x // self.pitch
        row, gap = divmod(y, self.rise)
        if gap or not (0 <= column < self.columns and 0 <= row < self.rows):
            return range(0)
        pixel = row * self.stack * self.columns + column
        if self.mode in ("cells", "halves"):
            return range(pixel + 1, min(pixel + 2, self.n + 1))
        # Block i (from 0) is on pixel i * pixels // n, so pixel p starts at ceil(p * n / pixels).
        first, stop = (-(-p * self.n // self.pixels) + 1 for p in (pixel, pixel + 1))
        return range(first, stop)


class Histogram:
    """How many blocks of each state are under each pixel, updated by deltas."""

    def __init__(self, layout: Layout, state: NDArray[Any]) -> None:
        """state: [n] uint8 of blocks 1..n."""
        self.pixel_of = layout.pixel_of()
        self._counted = state.copy()
        flat = np.bincount(self.pixel_of * STATES + state, minlength=layout.pixels * STATES)
        self.counts = flat.reshape(layout.pixels, STATES)

    def update(self, ids: NDArray[np.int64], state: NDArray[Any]) -> None:
        """ids: unique ids of the blocks that changed; state: [n] as it is now."""
        at = ids[ids > 0] - 1
        pixels, old, new = self.pixel_of[at], self._counted[at], state[at]
        flat = self.counts.reshape(-1)
        np.subtract.at(flat, pixels * STATES + old, 1)
        np.add.at(flat, pixels * STATES + new, 1)
        self._counted[at] = new

    def majority(self) -> NDArray[np.int16]:
        """[pixels] the most frequent state. Of two equally frequent ones, the more active one."""
        # argmax takes the first of equal values, hence the reversed columns.
        return (STATES - 1 - self.counts[:, ::-1].argmax(1)).astype(np.int16)
