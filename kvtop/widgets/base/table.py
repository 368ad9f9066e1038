"""Tables as rows of text: columns that fit the width, without a DataTable.

A column has a least width, a share of the spare width, and a rank that says which column is left out first.
Invariants: every row has exactly the width asked for. A cell that is cut ends in "…". A column has at least its own
width or is left out, except the last one.
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
    """width: least cells. grow: share of the spare cells. keep: the column with the lowest `keep` is left out first, of
    equal ones the rightmost."""

    title: str
    width: int
    right: bool = False
    grow: int = 0
    keep: int = 1


def fit(columns: Sequence[Column], width: int) -> list[int]:
    """Cells of each column, without the blank between two; 0: left out."""
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
    """A line of titles, then one line for each row."""
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
    """The parts in at most `width` cells. If they are cut, the last cell is "…"."""
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
    """A thin bar of `width` cells, filled to `part` (0 to 1) in half cells: ━━╸···. It is full only at 1."""
    halves = int(max(0.0, min(1.0, part)) * width * 2)
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(width, "·")
