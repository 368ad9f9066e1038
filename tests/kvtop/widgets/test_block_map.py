"""The map law: without its marks, what the map shows is the state, at every batch and in every mode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import BlocksEvicted, StepBatch
from kvtop.paint.map_layout import STATES, Histogram, Layout
from kvtop.state.dashboard import BlockState, DashboardState
from kvtop.widgets.map.block_map import ACTIVE, EVICTED_GLOW
from tests.kvtop.screen import Show, show
from tests.kvtop.stage import Stage
from tests.kvtop.streams import rich_stream

FILLING = "▁▂▃▄▅▆▇█"


def glyph(state: DashboardState, block: int) -> str:
    """What the specification says this block looks like."""
    kind, fill, ref = (
        BlockState(int(state.pool.state[block])),
        int(state.pool.fill[block]),
        int(state.pool.ref[block]),
    )
    match kind:
        case BlockState.FREE:
            return "·"
        case BlockState.CACHED:
            return "▒"
        case BlockState.FILLING:
            return FILLING[max(1, -(-fill * 8 // state.block_size)) - 1]
        case BlockState.ACTIVE:
            return "█"
    return str(ref) if ref < 10 else "+"


def cells(shown: Show) -> dict[int, str]:
    """Glyph by block id, read off the map's rows."""
    map_ = shown.app.main.map
    found: dict[int, str] = {}
    for y, line in enumerate(map_.lines[: map_.projection.height]):
        for x, char in enumerate(line):
            for block in map_.projection.blocks_at(x, y):
                found.setdefault(block, char)
    return found


def swatches(shown: Show) -> list[str]:
    """Palette entry of each pixel, read off the colours of the map's rows."""
    map_, palette = shown.app.main.map, shown.app.palette
    names = {palette.colour(n).rich_color: n for n in ("free", "cached", "filling", "active", "shared")}
    rows: list[list[str]] = []
    for strip in map_._strips[: map_.projection.height]:
        top, bottom = [], []
        for segment in strip:
            top += [names.get(segment.style.color, "mark")] * len(segment.text)
            bottom += [names.get(segment.style.bgcolor, "mark")] * len(segment.text)
        rows += [top, bottom]
    return [name for row in rows for name in row]


async def test_every_cell_is_its_block_at_every_batch() -> None:
    batches = rich_stream()
    async with show((100, 30)) as shown:
        seen: set[str] = set()
        for batch in batches:
            shown.apply([batch])
            if shown.app.state.started is None:
                continue
            state, hit = shown.app.state, set(shown.app.motion.hit().tolist())
            found = cells(shown)
            assert sorted(found) == list(range(1, state.num_blocks))
            for block, char in found.items():
                want = glyph(state, block)
                if block in hit and want == "█":  # read from the cache by a request that still runs
                    want = "◆"
                assert char == want, f"batch {batch.seq}, block {block}"
            seen |= set(found.values())
        assert {"·", "▒", "█", "2", "◆"} <= seen


@pytest.mark.parametrize("size", [(16, 22), (30, 21)])
async def test_every_pixel_is_the_majority_of_its_blocks(size: tuple[int, int]) -> None:
    """Too many blocks for the cells: colours by majority, kept up from deltas alone."""
    stage = Stage(num_blocks=546)
    pages = [" ".join(f"p{n}w{i}" for i in range(600)) for n in range(3)]
    for n in (0, 0, 1, 2):
        stage.submit("why?", pages[n], answer="because it is so")
    while stage.acts:
        stage.step()
    async with show((size[0] + 60, size[1])) as shown:
        box = shown.app.main.query_one("#map-box")
        box.styles.width, box.styles.height = size[0] + 2, 9
        await shown.settle()
        for batch in stage.batches:
            shown.apply([batch])
            state, layout = shown.app.state, shown.app.main.map.projection
            if state.started is None or layout is None:
                continue
            assert layout.mode in ("halves", "majority")
            pixel = layout.pixel_of()
            counts = np.zeros((layout.pixels, STATES), int)
            np.add.at(counts, (pixel, state.pool.state[1:]), 1)
            got = swatches(shown)
            hit = set(pixel[shown.app.motion.hit() - 1].tolist())
            for p in set(pixel.tolist()) - hit:
                best = np.flatnonzero(counts[p] == counts[p].max())[-1]
                assert got[p] == BlockState(best).name.lower(), f"batch {batch.seq}, pixel {p}"
        assert shown.app.main.query_one("#map-box").border_title.endswith(
            ("majority", "a cell", "a cell = 32 tokens")
        )


@given(n=st.integers(1, 5000), width=st.integers(1, 90), height=st.integers(1, 30), colour=st.booleans())
def test_every_block_has_one_place(n: int, width: int, height: int, colour: bool) -> None:
    layout = Layout.fit(n, width, height, colour)
    pixel = layout.pixel_of()
    assert len(pixel) == n and pixel.min() >= 0 and pixel.max() < layout.pixels
    assert (np.diff(pixel) >= 0).all()
    found = {b for y in range(height) for x in range(width) for b in layout.blocks_at(x, y)}
    if layout.mode == "cells":
        assert found == set(range(1, n + 1)) and len(set(pixel.tolist())) == n
    assert found <= set(range(1, n + 1))
    assert not layout.blocks_at(-1, 0) and not layout.blocks_at(0, height) and not layout.blocks_at(width, 0)
    if not colour:
        assert layout.mode in ("cells", "glyphs")


@settings(max_examples=50)
@given(st.data())
def test_histogram_by_deltas_is_the_histogram(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    layout = Layout.fit(n, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)))
    if layout.mode == "cells":
        return
    state = np.zeros(n, np.uint8)
    kept = Histogram(layout, state)
    for _ in range(5):
        ids = np.array(data.draw(st.lists(st.integers(0, n), unique=True)), np.int64)
        for i in ids[ids > 0]:
            state[i - 1] = data.draw(st.integers(0, STATES - 1))
        kept.update(ids, state)
        assert (kept.counts == Histogram(layout, state).counts).all()


async def test_only_what_changed_is_refreshed() -> None:
    stage = Stage()
    stage.submit("why?", " ".join(f"w{i}" for i in range(300)), answer="a b c d e")
    stage.step()
    async with show((100, 30), stage.batches) as shown:
        map_, spans = shown.app.main.map, []
        before = [id(s) for s in map_._strips]
        changed_at = map_.changed_at
        map_.changed_at = lambda *regions: (spans.extend(regions), changed_at(*regions))
        n = len(stage.batches)
        stage.step()
        shown.apply(stage.batches[n:], after=0.1)
        assert len(spans) == 1 and spans[0].width <= 4, spans
        changed = [y for y, s in enumerate(map_._strips) if id(s) != before[y]]
        assert changed == [spans[0].y]
        spans.clear()
        shown.app.paint()
        assert not spans, "nothing changed, so nothing is sent"


async def test_marks_lie_over_the_state_for_their_time() -> None:
    """× only while nothing has been written to the block; with content again its glyph is the true one."""
    stage = Stage(num_blocks=41)
    first, second = (" ".join(f"{c}{i}" for i in range(400)) for c in "ab")
    stage.submit("why?", first)
    stage.run()
    n = len(stage.batches)
    stage.submit("how?", second)
    stage.step()
    after = stage.batches[n:]
    async with show((100, 30), stage.batches[:n]) as shown:
        shown.apply(after, after=0.0)
        state, map_ = shown.app.state, shown.app.main.map
        gone = shown.app.motion.evicted().tolist()
        written = [b for b in gone if state.pool.fill[b] or state.pool.hashed[b]]
        assert written and len(written) < len(gone)
        for block in gone:
            assert cells(shown)[block] == (glyph(state, block) if block in written else "×")
        glowing = map_._look(ACTIVE | EVICTED_GLOW)
        assert glowing.color == shown.app.palette["evicted"].color and glowing.bold
        shown.wall += 0.61
        shown.app.tick()
        assert not len(shown.app.motion.evicted())


async def test_an_evicted_block_is_crossed_out_until_something_is_written_to_it() -> None:
    stage = Stage(num_blocks=8)
    stage.submit("why?", " ".join(f"a{i}" for i in range(60)))
    stage.run()
    state = DashboardState()
    for batch in stage.batches:
        state.apply(batch)
    cached = [b for b in range(1, 8) if state.pool.hashed[b]][:2]
    first = stage.batches[-1].first_event + len(stage.batches[-1].events)
    hashes = [state.pool.hash_of(b) for b in cached]
    event = BlocksEvicted(ids=cached, hashes=hashes, why="invalid", by_seq=None)
    last = stage.batches[-1]
    async with show((100, 30), stage.batches) as shown:
        shown.apply([StepBatch(last.seq + 1, last.t, last.step, first, [event])], after=0.0)
        assert all(cells(shown)[b] == "×" for b in cached)
        shown.wall += 0.61
        shown.app.tick()
        assert all(cells(shown)[b] == "·" for b in cached)


async def test_a_shared_block_shows_its_count_also_while_the_sweep_passes() -> None:
    stage = Stage()
    page = "w " * 400
    stage.submit("why?", page, answer="word " * 40)
    stage.run()
    stage.submit("how?", page, answer="word " * 40)
    stage.submit("when?", page, answer="word " * 40)
    n = len(stage.batches)
    stage.step()
    async with show((100, 30), stage.batches[:n]) as shown:
        shown.apply(stage.batches[n:], after=0.0)
        state = shown.app.state
        shared = [b for b in range(1, state.num_blocks) if state.pool.state[b] == BlockState.SHARED]
        assert len(shared) > 10 and len(shown.app.motion.hit())
        for wait in (0.0, 0.1, 0.3, 1.0, 5.0):
            shown.wall += wait
            shown.app.tick()
            assert {cells(shown)[b] for b in shared} == {"2"}, wait


@pytest.mark.parametrize(
    ("n", "size", "colour", "words"),
    [
        (545, (56, 8), True, "2 blocks a cell = 32 tokens"),
        (545, (78, 5), False, "1 or 2 blocks a cell, majority"),
        (545, (30, 5), False, "3 or 4 blocks a cell"),
        (9300, (30, 5), True, "62 blocks a cell"),
        (545, (37, 17), True, "1 cell = 1 block"),
    ],
)
def test_the_scale_in_words(n: int, size: tuple[int, int], colour: bool, words: str) -> None:
    title = Layout.fit(n, *size, colour).title(16)
    assert title == words and len(title) <= size[0]


async def test_greys_are_no_swatches() -> None:
    """Under mono two states in one cell are two greys: glyphs tell them apart, and the legend shows them."""
    stage = Stage()
    stage.submit("why?", " ".join(f"w{i}" for i in range(300)))
    stage.run()
    async with show((80, 24), stage.batches, theme="mono") as shown:
        assert shown.app.palette.hueless and not shown.app.palette.colourless
        assert shown.app.main.map.projection.mode == "glyphs"
        assert "■" not in shown.text and "▀" not in shown.text and "▒cached" in shown.app.main.map.lines[-1]
    async with show((80, 24), stage.batches, theme="kvtop-light") as shown:
        assert not shown.app.palette.hueless and shown.app.main.map.projection.mode == "halves"


async def test_walking_selects_and_tells() -> None:
    stage = Stage()
    stage.submit("why?", " ".join(f"w{i}" for i in range(100)))
    stage.run()
    async with show((120, 40), stage.batches) as shown:
        await shown.pilot.press("right", "right", "down")
        await shown.settle()
        main = shown.app.main
        assert main.selected == 2 + main.map.projection.columns
        await shown.pilot.press("up")
        await shown.settle()
        assert main.selected == 2 and main.detail.display
        text = shown.text
        assert "block 2" in text and "cached · 16 of 16 slots filled" in text
        assert "w16 w17" in text, "the tokens as text"
        assert (
            f"{shown.app.state.pool.hash_of(2)[:8]}" in text
            and f"after {shown.app.state.pool.hash_of(1)[:8]}" in text
        )
        await shown.pilot.press("escape")
        await shown.settle()
        assert main.selected is None and not main.query_one("#detail-box").display


def batches_of(stage: Stage, start: int) -> list[StepBatch]:
    """What the stage has emitted since batch `start`."""
    return stage.batches[start:]


async def test_a_hundred_thousand_blocks_are_fast() -> None:
    """The budget is 6 ms of CPU a frame at 200x60; projecting and drawing the map takes a part of it."""
    import time

    stage = Stage(num_blocks=100_001, load=False)
    stage.submit("why?", " ".join(f"w{i}" for i in range(480)), answer=" ".join("abcdefgh" * 5))
    stage.step()
    async with show((200, 60), stage.batches, view="all") as shown:
        map_, state = shown.app.main.map, shown.app.state
        assert map_.projection.mode == "majority"
        spent = []
        for _ in range(30):
            n = len(stage.batches)
            stage.step()
            for batch in batches_of(stage, n):
                state.apply(batch)
            begin = time.process_time()
            map_.touch(state.pool.take_dirty())
            map_.paint(state, state.t)
            spent.append(time.process_time() - begin)
        assert sorted(spent)[15] < 6e-3


@pytest.mark.parametrize("sizes", [((80, 24), (150, 45)), ((120, 40), (200, 60)), ((200, 60), (150, 45))])
async def test_another_layout_leaves_nothing_behind(sizes: tuple[tuple[int, int], ...]) -> None:
    """Rows between blocks are drawn by nobody: after a resize or F2 they are blank, not the old legend."""
    stage = Stage(num_blocks=101)
    stage.submit("why?", " ".join(f"w{i}" for i in range(300)), answer="a b c")
    stage.run()
    async with show(sizes[0], stage.batches, view="chat") as shown:
        for press in ((), ("f2",), ("f2",), ("f2",)):
            await shown.pilot.press(*press)
            for size in sizes:
                await shown.pilot.resize_terminal(*size)
                await shown.settle()
                map_ = shown.app.main.map
                layout = map_.projection
                rows = map_.lines[: layout.height]
                if layout.rise == 2:
                    assert not "".join(rows[1::2]).strip(), (size, press)
                seen = [row.text for row in map_.render_lines(map_.size.region)]
                assert seen == [line.ljust(layout.width) for line in map_.lines][: len(seen)]
