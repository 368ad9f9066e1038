"""The memory panel over known runs: every figure to the digit, both bars to scale."""

from __future__ import annotations

import msgspec
import pytest

from engine.events import EngineStarted, StepBatch
from kvtop.state.dashboard import DashboardState
from kvtop.widgets.ops.memory import MemoryPanel
from tests.kvtop.screen import show
from tests.kvtop.stage import Stage
from tests.kvtop.widgets.test_panels import played, shown

PAGE = " ".join(f"note{i} on the engine" for i in range(250))


def busy(num_blocks: int = 546) -> tuple[StepBatch, ...]:
    """One answered page (63 full blocks cached), then three requests that still run, two of them over the page."""
    stage = Stage(num_blocks=num_blocks, budget=2048)
    stage.submit("who was she?", PAGE, answer="she was a countess")
    stage.run()
    answer = " ".join("word" for _ in range(40))
    for i in range(3):
        stage.submit(
            "and now?", PAGE if i < 2 else " ".join(f"other{i}.{j}" for j in range(500)), answer=answer
        )
    for _ in range(9):
        stage.step()
    return tuple(stage.batches)


def with_max_len(batches: tuple[StepBatch, ...], length: int) -> tuple[StepBatch, ...]:
    """The same stream from an engine with another max_model_len."""

    def change(event: object) -> object:
        is_start = isinstance(event, EngineStarted)
        return msgspec.structs.replace(event, max_model_len=length) if is_start else event

    return tuple(msgspec.structs.replace(b, events=[change(e) for e in b.events]) for b in batches)


def counted(state: DashboardState) -> tuple[int, int, int]:
    """(referenced blocks, cached blocks, filled slots) from the columns."""
    ref = state.pool.ref[1:]
    filled = int(state.pool.fill[1:][ref > 0].sum())
    return int((ref > 0).sum()), int(((ref == 0) & state.pool.hashed[1:]).sum()), filled


async def test_every_figure() -> None:
    state = played(with_max_len(busy(), 2048))
    referenced, cached, filled = counted(state)
    naive = sum(s.num_computed for s in state.requests.sequences.values())
    async with shown(MemoryPanel(), state, 70, 9) as lines:
        said = [line.split() for line in lines]
    assert said[1] == f"referenced {100 * referenced // 545} % {referenced} of 545 blocks".split()
    share = f"{100 * cached // 545} %" if cached else "none"
    pool = state.pool
    assert pool.peak_blocks >= referenced > 0
    peak = f"{pool.peak_blocks} of 545 blocks, {pool.peak_filled:,} slots filled"
    assert said[2] == f"peak {100 * pool.peak_blocks // 545} % {peak}".split()
    assert said[3] == f"cached {share} {cached} of 545 blocks".split()
    assert said[4] == f"filled {100 * filled // 8720} % {filled:,} of 8,720 slots".split()
    held = referenced * 16
    assert said[5] == f"paged waste {100 * (held - filled) / held:.1f} % of {held:,} held".split()
    assert said[7] == f"naive waste {100 * (6144 - naive) / 6144:.1f} % of 6,144 held".split()
    assert said[8] == "naive fit 3 of 3 0 wait, 0 ever".split()
    assert naive > filled  # the page is there once, where reservations hold it twice


async def test_both_bars_are_to_scale() -> None:
    state = played(with_max_len(busy(), 3000))
    async with shown(MemoryPanel(), state, 12 + 545, 9) as lines:
        paged, naive = lines[0][12:], lines[6][12:]
    referenced, cached, filled = counted(state)
    for glyph, slots in (("█", filled), ("░", referenced * 16 - filled), ("▒", cached * 16)):
        assert abs(paged.count(glyph) - slots / 16) <= 1
    assert paged.count("·") == 545 - len(paged.rstrip("·"))
    twin = state.twin
    assert (twin.places, len(twin.place), len(twin.waiting)) == (2, 2, 1)
    for glyph, slots in (("█", twin.filled), ("░", twin.inside), ("╱", twin.between), ("·", twin.idle)):
        assert abs(naive.count(glyph) - 545 * slots / twin.slots) <= 1


async def test_who_would_wait() -> None:
    """One reservation of 8,192 tokens fits into 8,736 slots."""
    state = played(busy())
    async with shown(MemoryPanel(), state, 60, 9) as lines:
        assert lines[8].split() == "naive fit 1 of 3 2 wait, 2 ever".split()
    async with shown(MemoryPanel(), played(with_max_len(busy(), 9000)), 80, 9) as lines:
        assert "9,000 tokens in one piece are more than there are" in lines[8]


async def test_at_rest_the_twin_says_that_nothing_runs() -> None:
    stage = Stage(num_blocks=546)
    stage.submit("hello", answer="hi")
    stage.run()
    async with shown(MemoryPanel(), played(tuple(stage.batches)), 60, 9) as lines:
        assert lines[8].split() == "naive fit – nothing runs; 0 had to wait so far".split()


async def test_at_rest_nothing_is_wasted_and_nothing_is_a_number() -> None:
    stage = Stage(num_blocks=81)
    stage.submit("hello", answer="hi")
    stage.run()
    async with shown(MemoryPanel(), played(tuple(stage.batches)), 60, 9) as lines:
        assert lines[1].split() == "referenced none 0 of 80 blocks".split()
        assert lines[5].split() == "paged waste – nothing held".split()
        assert lines[7].split() == "naive waste – nothing held".split()


@pytest.mark.parametrize(
    ("height", "names"),
    [
        (1, ["peak"]),
        (2, ["peak", "filled"]),
        (4, ["peak", "filled", "paged waste", "naive waste"]),
        (5, ["referenced", "peak", "filled", "paged waste", "naive waste"]),
        (
            20,
            [
                "paged",
                "referenced",
                "peak",
                "cached",
                "filled",
                "paged waste",
                "naive",
                "naive waste",
                "naive fit",
            ],
        ),
    ],
)
async def test_what_few_rows_show(height: int, names: list[str]) -> None:
    async with shown(MemoryPanel(), played(busy()), 40, height) as lines:
        assert [line[:12].rstrip() for line in lines] == names


@pytest.mark.parametrize("view", ["ops", "all"])
@pytest.mark.parametrize(
    ("size", "rows"), [((100, 30), 5), ((100, 40), 5), ((140, 40), 5), ((160, 36), 5), ((200, 60), 9)]
)
async def test_it_stands_once_where_there_is_room(size: tuple[int, int], rows: int, view: str) -> None:
    async with show(size, busy(), view=view) as shown_:
        (panel,) = [p for p in shown_.app.main.query(MemoryPanel) if p.parent.display and p.region]
        assert panel.size.height == rows
        assert shown_.text.count("memory · paged and naive") == 1
        assert panel.size.width < 31 or not any("…" in line for line in panel.lines), panel.lines
