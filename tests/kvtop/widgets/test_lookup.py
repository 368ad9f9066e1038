"""What a look-up means in words, and text that knows where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from engine.events import StepBatch
from kvtop.paint import motion as motion_module
from kvtop.paint.motion import Motion, Sweep
from kvtop.state.dashboard import DashboardState
from kvtop.widgets.chat import lookup
from kvtop.wrap import spelled, wrap
from tests.kvtop.stage import Stage

PAGE = " ".join(f"w{i}" for i in range(990))


def state_of(batches: Sequence[StepBatch]) -> DashboardState:
    """Everything applied."""
    state = DashboardState(strict=True)
    for batch in batches:
        state.apply(batch)
    return state


def words(state: DashboardState, rid: int, form: int = 0) -> str:
    """The sentence as one text."""
    return "".join(t for t, _ in lookup.sentence(state, state.requests[rid])[form])


def test_the_stage_keeps_the_law() -> None:
    stage = Stage(num_blocks=90)
    for n in range(4):
        stage.submit("why?", " ".join(f"p{n % 3}w{i}" for i in range(500)), answer="because it is so " * 6)
        stage.run()
    stage.stop()
    state = state_of(stage.batches)
    assert state.stream.losses == 0 and state.pool.evictions > 0


def test_sentences_of_a_cold_and_a_read_prompt() -> None:
    stage = Stage()
    stage.submit("Who?", PAGE, answer="An English mathematician.")
    assert words(state_of(stage.batches), 1) == (
        "COMPUTING all 993 tokens, none in the cache · waits for its turn"
    )
    stage.step(0.345)
    assert words(state_of(stage.batches), 1).endswith("none in the cache · 512 of 993 computed …")
    stage.step(0.345)
    cold = state_of(stage.batches)
    assert words(cold, 1) == "COMPUTED all 993 tokens, none in the cache · first word after 690 ms"
    assert lookup.speedup(cold, cold.requests[1]) == "" and lookup.whence(cold, cold.requests[1]) == ""
    stage.run()
    stage.submit("What?", PAGE, answer="Notes.")
    stage.step(0.041)
    state = state_of(stage.batches)
    assert words(state, 2) == (
        "READ 976 of 993 tokens from cache · first word after 41 ms (#1, cold: 690 ms)"
    )
    assert [words(state, 2, n) for n in (1, 2, 3, 4)] == [
        "READ 976 of 993 tokens from cache · first word 41 ms (cold: 690 ms)",
        "READ 976 of 993 tokens · 41 ms (cold 690 ms)",
        "READ 976 of 993 · 41 ms (cold 690 ms)",
        "READ 976/993 · 41 ms",
    ]
    assert lookup.speedup(state, state.requests[2]) == "17×"
    assert lookup.whence(state, state.requests[2]) == "page.txt as in #1 → physical 1–61"


def test_only_an_equal_prefix_is_compared() -> None:
    """A cold request over another page says nothing about this one."""
    stage = Stage()
    for page in (PAGE, "other " + PAGE, PAGE):
        stage.submit("Who?", page, answer="An English mathematician.")
        stage.run(0.345)
    state = state_of(stage.batches)
    assert state.requests[2].hit_blocks == 0 and lookup.cold(state, state.requests[2]) is None
    assert lookup.cold(state, state.requests[3]).request_id == 1


def test_unequal_prompts_are_not_compared() -> None:
    """A first word after 2.56 s beside a cold one of 110 ms says nothing, if only 32 tokens are the same."""
    stage = Stage()
    short, long = (
        " ".join(f"w{i}" for i in range(33)),
        " ".join(f"w{i}" for i in range(33)) + " and more" * 600,
    )
    for text in (short + " so", long + " so"):
        stage.submit("Who?", text, answer="ok.")
        stage.run(0.345)
    state = state_of(stage.batches)
    assert state.requests[2].cached_tokens == 32 and state.requests[2].prompt_tokens > 1000
    assert lookup.cold(state, state.requests[2]) is None and lookup.speedup(state, state.requests[2]) == ""
    assert words(state, 2).endswith("from cache · first word after 1.03 s")


def test_a_time_spent_waiting_is_not_compared() -> None:
    """Neither the one that waited for others, nor one that read a part of it, is how long cold takes."""
    stage = Stage()
    stage.submit("Who?", PAGE, answer="An English mathematician.")
    stage.run(0.345)
    stage.submit("What?", PAGE, answer="Notes.")
    stage.run(0.041)
    state = state_of(stage.batches)
    first, second = state.requests[1], state.requests[2]
    assert lookup.cold(state, second) is first
    assert not first.crowded and not second.crowded
    for view, name, value in (
        (first, "crowded", True),
        (first, "preemptions", 1),
        (first, "slow", True),
        (first, "hit_tokens", 16),
        (second, "preemptions", 1),
        (second, "slow", True),
    ):
        before = getattr(view, name)
        setattr(view, name, value)
        assert lookup.cold(state, second) is None, name
        assert lookup.speedup(state, second) == ""
        setattr(view, name, before)
    assert lookup.cold(state, second) is first


def test_table_of_a_finished_request_names_only_what_is_still_there() -> None:
    stage = Stage(num_blocks=70)
    stage.submit("Who?", PAGE, answer="An English mathematician.")
    stage.run()
    state = state_of(stage.batches)
    assert lookup.table_of(state, state.requests[1]) == list(range(1, 64))
    stage.submit("Who?", "other " + PAGE, answer="An English mathematician.")
    stage.run()
    state = state_of(stage.batches)
    table = lookup.table_of(state, state.requests[1])
    for i, block in enumerate(table):
        if block and i < 62:
            assert state.pool.hash_of(block) == state.requests[1].lookup_hashes[i]
    assert 0 in table


def test_runs() -> None:
    assert lookup.runs([]) == ""
    assert lookup.runs([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"
    assert lookup.runs([1, 3, 5, 7, 9]) == "1, 3, 5, …"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=80), st.lists(st.integers(0, 80)))
def test_spelled_keeps_every_character_with_its_token(text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [data[a:b] for a, b in pairwise(places)]
    reported, starts = spelled(pieces)
    assert len(starts) == len(pieces) and starts == sorted(starts)
    assert all(0 <= s <= len(reported) for s in starts)
    if text.isascii() and text.isprintable():
        assert reported == text and starts == places[: len(pieces)]


@given(st.text(alphabet="ab 日\n", max_size=60), st.integers(1, 12))
def test_wrap_loses_only_blanks_and_breaks(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(text[a:b]) <= max(width, 2) for a, b in lines)
    assert all(a <= b for a, b in lines) and [a for a, _ in lines] == sorted(a for a, _ in lines)
    kept = "".join(text[a:b] for a, b in lines)
    assert kept.replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert wrap("", width) == [(0, 0)]


def test_sweep_lights_left_to_right_and_ends() -> None:
    stage = Stage()
    stage.submit("Who?", PAGE, answer="An English mathematician.")
    stage.run()
    first = len(stage.batches)
    stage.submit("What?", PAGE, answer="Notes on the engine.")
    stage.step(0.041)
    state, motion = state_of(stage.batches[:first]), Motion()
    motion.update(state, 0.0)
    for batch in stage.batches[first:]:
        state.apply(batch)
    motion.update(state, 50.0)
    seen = []
    for n in range(14):
        motion.update(state, 50.0 + n / 30)
        lit = motion.lit(2)
        seen.append(61 if lit is None else lit)
        assert motion.hit().tolist() == state.requests[2].hit_ids[: seen[-1]]
        assert set(motion.flash().tolist()) <= set(motion.hit().tolist())
    assert seen == sorted(seen) and 1 <= seen[0] < 5 and seen[12] == 61
    motion.update(state, 52.0)
    assert not motion.moving and len(motion.hit()) == 61, "it still runs, so it stays lit"
    stage.run()
    for batch in stage.batches[state.seq + 1 :]:
        state.apply(batch)
    motion.update(state, 60.0)
    assert not len(motion.hit()) and not motion.standing
    still = Motion(still=True)
    still.update(state, 0.0)
    assert not still.moving


def test_after_a_long_way_the_marks_are_those_of_a_display_that_kept_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(num_blocks=100)
    for n in range(40):
        stage.submit(f"{n}?", PAGE if n % 4 else f"{n} " + PAGE[::-1])
        stage.run()
    stage.submit("What?", PAGE, answer="Notes on the engine.")
    stage.step(0.041)
    stage.step()
    kept_up, state = Motion(), state_of([])
    for batch in stage.batches:
        state.apply(batch)
        kept_up.update(state, 50.0 + state.t)
    assert state.pool.evictions > 100
    made: list[int] = []
    monkeypatch.setattr(motion_module, "Sweep", lambda rid, *a: (made.append(rid), Sweep(rid, *a))[1])
    late = Motion()
    late.update(state, 50.0 + state.t)
    assert set(made) == set(kept_up.sweeps) and len(made) < 15, "requests that ended long ago cost nothing"
    for motion in (kept_up, late):  # what was just hit sweeps anew after a jump
        motion.update(state, 51.0 + state.t)
    assert len(late.hit()) > 10 and late.hit().tolist() == kept_up.hit().tolist()
    assert set(late.evicted()) == set(kept_up.evicted()) and late.copies == kept_up.copies


def test_a_block_that_is_evicted_and_hit_again_is_marked_again() -> None:
    sweep = Sweep(1, np.array([3, 5, 8], np.intp), 0.0, 0.0)
    sweep.evict({5, 9})
    assert sweep.reached(1.0).tolist() == [3, 8]
    sweep.extend(np.array([9, 5], np.intp))
    assert sweep.reached(1.0).tolist() == [3, 5, 8, 9]
    sweep.evict({9})
    assert sweep.reached(1.0).tolist() == [3, 5, 8]
