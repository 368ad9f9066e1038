"""Tables: widths that fit, cells that are cut with a mark, bars that are full only when done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from kvtop.widgets.base.table import Column, cut, fit, progress, table

S, T = Style(), Style(bold=True)
COLUMNS = (
    Column("id", 3, right=True, keep=9),
    Column("state", 6, keep=5),
    Column("prefill", 8, grow=2, keep=4),
    Column("why", 5, grow=1, keep=1),
)


def text(row: tuple[tuple[str, Style], ...]) -> str:
    return "".join(part for part, _ in row)


def test_spare_cells_go_to_those_that_grow() -> None:
    assert fit(COLUMNS, 25) == [3, 6, 8, 5]
    assert fit(COLUMNS, 31) == [3, 6, 12, 7]


def test_what_does_not_fit_leaves_lowest_first() -> None:
    assert fit(COLUMNS, 24) == [3, 6, 13, 0]
    assert fit(COLUMNS, 12) == [3, 6, 0, 0]
    assert fit(COLUMNS, 4) == [3, 0, 0, 0]
    assert fit(COLUMNS, 2) == [2, 0, 0, 0]


def test_rows_stand_under_their_titles() -> None:
    rows = table(COLUMNS, [[("7", S), ("run", S), (("██", T), ("··", S)), ("no free blocks", S)]], 27, T)
    assert [text(r) for r in rows] == [
        " id state  prefill   why   ",
        "  7 run    ██··      no fr…",
    ]


def test_wide_characters_are_cut_by_cells() -> None:
    assert cut([("日本語", S)], 4) == [("日 …", S)]
    assert cut([("日本", S)], 4) == [("日本", S)]
    assert cut([("ab", S), ("cd", T)], 3) == [("ab…", S)]
    assert cut([("ab", S)], 0) == [("", S)]


def test_a_bar_is_full_only_when_done() -> None:
    assert [progress(p, 3) for p in (0, 0.2, 0.5, 0.999, 1, 2)] == ["···", "╸··", "━╸·", "━━╸", "━━━", "━━━"]
    assert progress(0.5, 0) == ""


@given(st.integers(0, 60), st.lists(st.text(max_size=20), min_size=4, max_size=4))
def test_every_row_has_the_width_asked_for(width: int, cells: list[str]) -> None:
    clean = ["".join(c for c in cell if c.isprintable()) for cell in cells]
    for row in table(COLUMNS, [[(c, S) for c in clean]], width, T):
        assert cell_len(text(row)) == width
