"""The dashboard's compositor: Textual's own, with a shorter way to the few lines that differ in a frame.

Textual renders every widget that a frame touches, cuts all their lines at every widget's edge and lets the
frontmost piece win. Who is in front of a cell changes only with the layout, so it is found once a layout here, and
a frame asks the widgets in front for exactly the lines that are dirty. Invariant: what is sent paints the same
cells as Textual's own partial update would; where the short way cannot tell, Textual's is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.console import Console
from textual._compositor import ChopsUpdate, Compositor, CompositorMap, CompositorUpdate
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


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


class _Spans(CompositorUpdate):
    """Strips, each with its place."""

    def __init__(self, strips: Sequence[tuple[int, int, Strip]]) -> None:
        self.strips = strips

    def render_segments(self, console: Console) -> str:
        """What is written to the terminal."""
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self.strips])


class FrameCompositor(Compositor):
    """Put in place of a screen's `_compositor` before it is laid out."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[int, list[_Piece]] = {}
        """By line."""
        self._planned_for: object = None

    @property
    def full_map(self) -> CompositorMap:
        """Where every widget is. Textual computes it anew when somebody asks between two layouts, and the next
        layout then finds nothing changed: what a toast covered would never be drawn again."""
        before = self._full_map
        after = super().full_map
        if after is not before:
            regions = (place.clip.intersection(place.region) for _, place in after.items() ^ before.items())
            self._dirty_regions |= {region for region in regions if region}
        return after

    def render_partial_update(self) -> ChopsUpdate | None:
        """The lines that are dirty."""
        regions = self._dirty_regions.copy()
        strips = self._dirty_strips(regions) if regions else None
        if strips is None:
            return super().render_partial_update()
        self._dirty_regions.clear()
        return _Spans(strips)  # type: ignore[return-value]  # all that its caller knows is CompositorUpdate

    def _dirty_strips(self, regions: set[Region]) -> list[tuple[int, int, Strip]] | None:
        """(column, line, strip) of what has to be sent; None where the frontmost widget draws less than its
        region, so that another one shows."""
        out: list[tuple[int, int, Strip]] = []
        rendered: dict[Widget, list[Strip]] = {}
        for y, x1, x2 in self._regions_to_spans(regions):
            if not 0 <= y < self.size.height:
                continue
            for x, end, widget, crop, left, top in self._plan(y):
                if x >= x2 or end <= x1:
                    continue
                lines = rendered.get(widget)
                if lines is None:
                    lines = rendered[widget] = widget.render_lines(crop)
                if y - top >= len(lines) or lines[y - top].cell_length < end - left:
                    return None
                out.append((x, y, lines[y - top].crop(x - left, min(end, x2) - left)))
        return out

    def _plan(self, y: int) -> list[_Piece]:
        cuts = self.cuts
        if cuts is not self._planned_for:  # Textual drops them with every layout
            self._plans, self._planned_for = {}, cuts
        plan = self._plans.get(y)
        if plan is None:
            plan = self._plans[y] = self._in_front(y, cuts[y])
        return plan

    def _in_front(self, y: int, cuts: Sequence[int]) -> list[_Piece]:
        """Pieces of line y from left to right, each as long as one widget is in front."""
        fronts: dict[int, _Piece] = {}
        for widget, (region, clip) in self.visible_widgets.items():  # front to back
            shown = region.intersection(clip)
            if not shown.y <= y < shown.bottom:
                continue
            crop = shown.translate(-region.offset)
            for x, end in pairwise(cuts):
                if x not in fronts and shown.x <= x < shown.right:
                    fronts[x] = _Piece(x, end, widget, crop, shown.x, shown.y)
        plan: list[_Piece] = []
        for _, piece in sorted(fronts.items()):
            if plan and plan[-1].widget is piece.widget and plan[-1].end == piece.x:
                piece = plan.pop()._replace(end=piece.end)
            plan.append(piece)
        return plan
