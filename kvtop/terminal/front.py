"""Which widget is in front of each cell of a line.

Textual renders every widget that a frame touches, cuts all their lines at every widget's edge and lets the
frontmost piece win. Who is in front changes only with the layout, so it is found once a layout here, and a frame
asks the widgets in front for exactly the lines that are dirty. Invariant: the strips paint the same cells as
Textual's own partial update would; where they cannot, there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

PlacedStrip = tuple[int, int, Strip]
"""Column, line, and what is drawn from there on."""


class _Piece(NamedTuple):
    """Cells of one line that one widget is in front of."""

    x: int
    end: int
    widget: Widget
    crop: Region
    """The part of the widget that is not clipped away, in its own coordinates."""
    left: int
    top: int
    """Where that part begins on the screen."""


class Front:
    """One layout. cuts: for each line, the columns at which a widget begins or ends. widgets: each visible one
    with its region and what clips it, front to back."""

    def __init__(
        self, cuts: Sequence[Sequence[int]], widgets: Mapping[Widget, tuple[Region, Region]]
    ) -> None:
        self.cuts, self.widgets = cuts, widgets
        self._pieces: dict[int, list[_Piece]] = {}
        """By line."""

    def strips(self, spans: Iterable[tuple[int, int, int]]) -> list[PlacedStrip] | None:
        """What has to be sent for `spans` (line, first column, column after the last). None where the frontmost
        widget draws less than its region, so that another one shows."""
        out: list[PlacedStrip] = []
        rendered: dict[Widget, list[Strip]] = {}
        for y, x1, x2 in spans:
            if not 0 <= y < len(self.cuts):
                continue
            pieces = self._pieces.get(y)
            if pieces is None:
                pieces = self._pieces[y] = self._in_front(y)
            for x, end, widget, crop, left, top in pieces:
                if x >= x2 or end <= x1:
                    continue
                lines = rendered.get(widget)
                if lines is None:
                    lines = rendered[widget] = widget.render_lines(crop)
                if y - top >= len(lines) or lines[y - top].cell_length < end - left:
                    return None
                out.append((x, y, lines[y - top].crop(x - left, min(end, x2) - left)))
        return out

    def _in_front(self, y: int) -> list[_Piece]:
        """Pieces of line y from left to right, each as long as one widget is in front."""
        fronts: dict[int, _Piece] = {}
        for widget, (region, clip) in self.widgets.items():
            shown = region.intersection(clip)
            if not shown.y <= y < shown.bottom:
                continue
            crop = shown.translate(-region.offset)
            for x, end in pairwise(self.cuts[y]):
                if x not in fronts and shown.x <= x < shown.right:
                    fronts[x] = _Piece(x, end, widget, crop, shown.x, shown.y)
        pieces: list[_Piece] = []
        for _, piece in sorted(fronts.items()):
            if pieces and pieces[-1].widget is piece.widget and pieces[-1].end == piece.x:
                piece = _Piece(pieces.pop().x, *piece[1:])
            pieces.append(piece)
        return pieces
