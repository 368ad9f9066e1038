"""The work list of attention: it covers every query and key once, fills the GPU, and orders by length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.ops.nvidia.split import MOST_SPLITS, WorkList, work_list

SEQUENCE = st.tuples(st.integers(1, 70), st.integers(0, 3000))


def make(lens: list[tuple[int, int]], *, block_q: int = 4, keys: int = 32, kv_heads: int = 2,
         programs: int = 64, least: int = 64, window: int | None = None) -> WorkList:  # fmt: skip
    q = np.array([n for n, _ in lens])
    kv = np.array([n + past for n, past in lens])
    return work_list(
        np.arange(len(lens)), q, kv, block_q=block_q, keys=keys, kv_heads=kv_heads, programs=programs,
        least=least, window=window,
    )  # fmt: skip


def keys_of(item: np.ndarray, q: int, kv: int, block_q: int, keys: int, window: int | None) -> range:
    """As the kernel cuts."""
    _, first, split, splits, _ = item.tolist()
    end = min(kv, kv - q + first + block_q)
    begin = 0 if window is None else max(kv - q + first - window + 1, 0) // keys * keys
    each = (-(-(end - begin) // splits) + keys - 1) // keys * keys
    return range(begin + split * each, min(begin + (split + 1) * each, end))


@given(
    st.lists(SEQUENCE, min_size=1, max_size=6), st.sampled_from([1, 4, 5]), st.integers(1, 200),
    st.sampled_from([None, 1, 40, 500]),
)  # fmt: skip
def test_every_key_of_every_query_is_taken_once(
    lens: list[tuple[int, int]], block_q: int, programs: int, window: int | None
) -> None:
    w = make(lens, block_q=block_q, programs=programs, window=window)
    seen: dict[tuple[int, int], list[range]] = {}
    for item in w.work:
        s, first = int(item[0]), int(item[1])
        q, past = lens[s]
        seen.setdefault((s, first), []).append(keys_of(item, q, q + past, block_q, 32, window))
    want = {(s, first) for s, (q, _) in enumerate(lens) for first in range(0, q, block_q)}
    assert set(seen) == want
    for (s, first), spans in seen.items():
        q, past = lens[s]
        spans.sort(key=lambda r: r.start)
        assert all(a.stop == b.start for a, b in pairwise(spans))
        assert all(spans)  # no piece is empty
        assert spans[-1].stop == min(q + past, past + first + block_q)
        assert spans[0].start == 0 if window is None else spans[0].start <= max(past + first - window + 1, 0)


@given(st.lists(SEQUENCE, min_size=1, max_size=6), st.integers(1, 400))
def test_every_part_has_its_place_and_its_merge(lens: list[tuple[int, int]], programs: int) -> None:
    w = make(lens, programs=programs)
    alone = w.work[w.work[:, 4] < 0]
    assert (alone[:, 3] == 1).all()
    split = w.work[w.work[:, 4] >= 0]
    assert sorted(split[:, 4].tolist()) == list(range(w.parts))
    places = {(int(s), int(f), int(part + i)) for s, f, part, n in w.merges for i in range(n)}
    assert places == {(int(s), int(f), int(part)) for s, f, _, _, part in split}
    assert w.most <= MOST_SPLITS


def test_one_token_behind_a_long_prefix_is_spread_like_a_decode() -> None:
    for tokens in (1, 16, 32):
        w = make([(tokens, 177_000)], block_q=32, kv_heads=8, programs=264, least=512)
        assert 30 <= len(w.work) <= 36
    assert make([(1, 10)]).parts == 0


def test_full_gpus_are_not_split_and_long_sequences_do_not_lag() -> None:
    even = make([(1, 2047)] * 64, kv_heads=8, programs=528)
    assert (even.parts, len(even.work)) == (0, 64)
    uneven = make([(1, 511)] * 63 + [(1, 32_767)], kv_heads=8, programs=528)
    assert 30 <= len(uneven.work[uneven.work[:, 0] == 63]) <= 40
    assert uneven.work[0, 0] == 63  # the longest pieces first
