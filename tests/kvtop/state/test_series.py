"""Rings and rates: what they keep, what they forget, what they sum to."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.state.series import Rate, Ring, percentile


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(1, 20))
def test_a_ring_keeps_the_last_points_in_order(gaps: list[float], capacity: int) -> None:
    ring, t = Ring(capacity), 0.0
    points = []
    for i, gap in enumerate(gaps):
        t += gap
        points.append((t, i * 0.5, float(-i)))
        ring.add(*points[-1])
    kept = points[-capacity:]
    assert ring.rows().tolist() == [list(p) for p in kept]
    assert len(ring) == len(kept)
    assert ring.total == len(points)
    assert ring.last() == (kept[-1][1] if kept else None)
    for since in (0.0, t / 2, t + 1):
        assert ring.values(since).tolist() == [v for x, v, _ in kept if x >= since]


def test_percentiles_interpolate_and_none_is_not_zero() -> None:
    assert percentile([], 50) is None
    assert Ring().percentile(99) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([0.0, 10.0], 50) == 5.0
    ring = Ring()
    for i in range(101):
        ring.add(i, i)
    assert ring.percentile(99) == 99
    assert ring.percentile(50, since=100) == 100


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=40))
def test_a_rate_is_what_was_added_per_second(steps: list[tuple[float, int]]) -> None:
    rate, t = Rate(bucket=0.5, capacity=40), 0.0
    added = []
    for gap, amount in steps:
        t += gap
        rate.add(t, amount)
        added.append((t, amount))
    starts, values = rate.points(t, 20)
    assert len(starts) == 40
    for start, value in zip(starts, values, strict=True):
        want = sum(a for x, a in added if int(x / 0.5) * 0.5 == start)
        assert value == pytest.approx(want / 0.5)
    assert rate.total == sum(a for _, a in added)


def test_a_rate_decays_and_knows_nothing_before_its_first_amount() -> None:
    rate = Rate(bucket=0.25)
    assert rate.now(5.0) is None
    for i in range(8):
        rate.add(10 + i * 0.25, 5)
    assert rate.now(11.75, window=2.0) == pytest.approx(20.0)
    assert rate.now(13.0, window=2.0) == pytest.approx(7.5)
    assert rate.now(99.0) == 0.0


def test_a_young_rate_is_not_diluted_by_the_time_before_it() -> None:
    rate = Rate(bucket=0.25)
    rate.add(100.0, 10)
    assert rate.now(100.0) == pytest.approx(40.0), "over one bucket, not over the whole window"


def test_a_long_silence_leaves_no_ghosts() -> None:
    rate = Rate(bucket=1.0, capacity=10)
    for t in range(10):
        rate.add(t, 1)
    rate.add(1000, 3)
    _, values = rate.points(1000, 10)
    assert values.tolist() == [0.0] * 9 + [3.0]
    _, old = rate.points(20, 10)
    assert not np.any(old), "what fell out of the ring reads as nothing"


def test_percentiles_are_of_the_latest_points_whatever_is_drawn() -> None:
    ring = Ring(4096)
    for i in range(3000):
        ring.add(i, float(i))
    assert ring.latest().tolist() == [float(i) for i in range(2000, 3000)]
    assert percentile(ring.latest(), 50) == 2499.5


def test_peak_is_the_largest_rate_that_was_shown() -> None:
    rate = Rate()
    assert rate.peak(0.0) is None
    for i in range(16):
        rate.add(i * 0.25, 100 if i < 8 else 10)
    assert rate.peak(4.0) == pytest.approx(400.0, rel=0.01)
    assert rate.peak(1e6) == rate.peak(4.0), "it does not fade with time"
    assert copy.deepcopy(rate).peak(4.0) == rate.peak(4.0)
