"""Tables as rows of text: columns that fit the width, without a DataTable.

A column says how narrow it may get, who takes the spare width and who leaves first when there is
too little. Invariants: every row is exactly as wide as asked for, a cell that is cut ends in "…",
and a column is shown with at least its own width or not at all, unless it is the last one left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.style import Style

from kvtop.widgets.base.lines import Part, Row

Cell = Part | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """width: least cells. grow: share of the spare cells. keep: of the columns that do not fit
    together the one with the lowest `keep` leaves first, of equals the rightmost."""

    title: str
    width: int
    right: bool = False
    grow: int = 0
    keep: int = 1


def fit(columns: Sequence[Column], width: int) -> list[int]:
    """Cells for each column, one blank between them not counted; 0 = left out."""
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(columns[i].width for i in shown) + len(shown) - 1 > width:
        shown.remove(min(shown, key=lambda i: (columns[i].keep, -i)))
    widths = [min(columns[i].width, width) if i in shown else 0 for i in range(len(columns))]
    spare = width - sum(widths) - max(0, len(shown) - 1)
    growing = [i for i in shown if columns[i].grow]
    for place, i in enumerate(growing):
        share = spare * columns[i].grow // sum(columns[j].grow for j in growing[place:])
        widths[i] += share
        spare -= share
    return widths


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, head: Style) -> list[Row]:
    """A line of titles and a line a row."""
    widths = fit(columns, width)
    titles = [(column.title, head) for column in columns]
    return [_line(columns, widths, cells, width, head) for cells in (titles, *rows)]


def _line(
    columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Cell], width: int, blank: Style
) -> Row:
    parts: list[Part] = []
    used = 0
    for column, cells_wide, cell in zip(columns, widths, cells, strict=True):
        if not cells_wide:
            continue
        if parts:
            parts.append((" ", blank))
            used += 1
        parts += _cell(cell, cells_wide, column.right, blank)
        used += cells_wide
    if used < width:
        parts.append((" " * (width - used), blank))
    return tuple(parts)


def _cell(cell: Cell, width: int, right: bool, blank: Style) -> list[Part]:
    parts: list[Part] = [cell] if isinstance(cell[0], str) else list(cell)
    total = sum(cell_len(text) for text, _ in parts)
    if total > width:
        return cut(parts, width)
    padding = (" " * (width - total), blank)
    if total == width:
        return parts
    return [padding, *parts] if right else [*parts, padding]


def cut(parts: Sequence[Part], width: int) -> list[Part]:
    """The leading parts in exactly `width` cells, the last of them "…" where something was left out."""
    total = sum(cell_len(text) for text, _ in parts)
    if total <= width:
        return list(parts)
    out: list[Part] = []
    left = max(0, width - 1)
    for text, style in parts:
        size = cell_len(text)
        if size >= left:
            out.append((set_cell_size(text, left) + "…" * (width > 0), style))
            break
        out.append((text, style))
        left -= size
    return out


def progress(part: float, width: int) -> str:
    """A thin bar of `width` cells filled to `part` (0 to 1) in halves: ━━╸···. Full only when done."""
    halves = int(max(0.0, min(1.0, part)) * width * 2)
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(width, "·")
