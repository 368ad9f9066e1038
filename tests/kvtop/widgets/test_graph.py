"""Graphs: known series give known rows, to the glyph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from kvtop.widgets.base.graph import (
    GUTTER,
    Curve,
    Level,
    Scale,
    bar_levels,
    bars,
    graph,
    last_values,
    line,
    linear,
    logarithmic,
    plot_width,
    quantile,
    round_up,
)

RED, BLUE, DIM = Style(color="#ff0000"), Style(color="#0000ff"), Style(color="#777777")
NAN = np.nan


def row_text(row: tuple[tuple[str, Style], ...]) -> str:
    return "".join(text for text, _ in row)


def test_bars_are_exact_to_the_eighth() -> None:
    values = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16], float)
    assert bars(values, 2, Scale(0, 16)) == [
        "         ▁█",
        " ▁▂▃▄▅▆▇███",
    ]


def test_nothing_is_drawn_for_nan_and_a_sliver_for_any_value_over_the_foot() -> None:
    assert bars(np.array([NAN, 0.0, 1e-6, 1000.0]), 1, Scale(0, 1000)) == ["  ▁█"]


def test_the_axis_top_is_round() -> None:
    assert [round_up(v) for v in (0.9, 1, 1.01, 2.5, 5, 51, 690)] == [1, 1, 1.5, 3, 5, 60, 800]
    assert linear(np.array([3.0, NAN, 41.0])) == Scale(0.0, 50.0)
    assert linear(np.array([NAN])).high > 0
    assert linear(np.array([0.2]), least=1).high == 1


def test_a_logarithmic_axis_gives_each_decade_the_same_height() -> None:
    scale = logarithmic(np.array([0.041, 0.69, NAN, 0.0]))
    assert scale == Scale(0.01, 1.0, log=True)
    assert scale.fraction(np.array([0.01, 0.1, 1.0])) == pytest.approx([0, 0.5, 1])
    assert bars(np.array([0.01, 0.1, 1.0, 0.0, NAN]), 2, scale) == ["  █  ", "▁██  "]
    assert logarithmic(np.array([NAN])).high == 1.0


def test_a_line_joins_its_points_with_dots() -> None:
    flat = line(np.array([1.0] * 6), 1, Scale(0, 1))
    assert flat == ["⠉⠉⠉"]
    assert line(np.array([0.0, 1 / 3, 2 / 3, 1.0]), 1, Scale(0, 1)) == ["⡠⠊"]
    assert line(np.array([0.0, 1.0]), 1, Scale(0, 1)) == ["⡸"]
    assert line(np.array([0.0, NAN, NAN, 1.0]), 2, Scale(0, 1)) == [" ⠈", "⡀ "]


def test_the_newest_values_stand_right() -> None:
    assert last_values(np.array([1.0, 2, 3]), 2).tolist() == [2, 3]
    assert np.isnan(last_values(np.array([1.0]), 3)).tolist() == [True, True, False]
    assert last_values(np.array([1.0]), 0).size == 0


def test_a_graph_has_its_axis_and_levels() -> None:
    width, height = 40, 4
    values = last_values(np.array([0.1, 0.4]), plot_width(width))
    rows = graph(
        width,
        height,
        [Curve(values, RED)],
        Scale(0, 0.4),
        lambda v: f"{v * 1000:.0f} ms",
        DIM,
        [Level(0.25, "p50", BLUE)],
    )
    text = [row_text(row) for row in rows]
    plot = plot_width(width) - 2
    assert text == [
        " 400 ms " + " " * plot + " █",
        "    p50 " + "┈" * plot + "┈█",
        "        " + " " * plot + " █",
        "   0 ms " + " " * plot + "██",
    ]
    assert all(len(t) == width for t in text)
    assert rows[1][1] == ("┈" * (plot + 1), BLUE)
    assert rows[3][-1] == ("██", RED)
    assert text[0][:GUTTER] == " 400 ms "


def test_bars_take_a_style_a_column() -> None:
    rows = graph(3, 1, [Curve(np.ones(3), RED, styles=[RED, RED, BLUE])], Scale(0, 1), str, DIM)
    assert rows == [(("██", RED), ("█", BLUE))]


def test_a_narrow_graph_gives_its_axis_up() -> None:
    assert plot_width(31) == 31
    assert plot_width(32) == 32 - GUTTER
    assert graph(0, 3, [], Scale(0, 1), str, DIM) == []
    assert graph(3, 0, [], Scale(0, 1), str, DIM) == []
    assert [row_text(r) for r in graph(1, 1, [Curve(np.ones(1), RED)], Scale(0, 1), str, DIM)] == ["█"]


@given(
    st.lists(st.floats(0, 1e6) | st.just(NAN), min_size=1, max_size=40),
    st.integers(1, 12),
    st.booleans(),
)
def test_bars_rise_with_their_values(values: list[float], rows: int, log: bool) -> None:
    data = np.array(values)
    scale = logarithmic(data) if log else linear(data)
    levels = bar_levels(data, rows, scale)
    assert levels.min() >= 0
    assert levels.max() <= rows * 8
    known = [(v, int(k)) for v, k in zip(values, levels, strict=True) if v == v]
    for (a, i), (b, k) in zip(sorted(known), sorted(known)[1:], strict=False):
        assert i <= k or a == b
    assert all(k > 0 for v, k in known if v > 0)
    text = bars(data, rows, scale)
    assert [len(t) for t in text] == [len(values)] * rows


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    data = np.sort(np.array(values))
    got = quantile(data, q)
    assert got is not None
    assert abs(got - float(np.quantile(data, q))) <= 1e-6 * (1 + data[-1])
    assert quantile(data[:0], q) is None
