"""FrameCompositor: what it sends for a dirty part is what a full picture has there, also under a toast."""

from __future__ import annotations

import asyncio
import random

import pytest
from rich.segment import Segment
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widgets._toast import Toast

from kvtop.app.app import KvtopApp
from kvtop.terminal.textual_door import FrameCompositor
from tests.kvtop.app.test_app import story
from tests.kvtop.app.test_live import live
from tests.kvtop.screen import Show, show


def cells(strip: Strip) -> list[tuple[str, object]]:
    """Each cell with its style; a wide character fills two."""
    out: list[tuple[str, object]] = []
    for text, style, _ in strip:
        for character in text:
            out += [(character, style)] * Segment(character).cell_length
    return out


def check(shown: Show, regions: set[Region]) -> None:
    """Every dirty cell is sent, and every cell that is sent is as in a full picture."""
    compositor = shown.app.screen._compositor
    assert type(compositor) is FrameCompositor
    whole = [cells(strip) for strip in compositor.render_strips()]
    strips = compositor.strips_for(regions)
    assert strips is not None
    sent: set[tuple[int, int]] = set()
    for x, y, strip in strips:
        got = cells(strip)
        assert got == whole[y][x : x + len(got)], (x, y)
        sent |= {(x + i, y) for i in range(len(got))}
    width, height = shown.app.size
    for region in regions:
        for y in range(max(0, region.y), min(height, region.bottom)):
            assert {(x, y) for x in range(max(0, region.x), min(width, region.right))} <= sent


@pytest.mark.parametrize("size", [(30, 8), (80, 24), (200, 60)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_a_part_is_as_in_the_whole(size: tuple[int, int]) -> None:
    chance = random.Random(3)
    async with show(size, story().batches, notifications=True) as shown:
        for toast in (False, True):
            if toast:
                shown.app.notify("a toast lies over the panels", timeout=60)
                await shown.settle()
            for _ in range(20):
                places = [(chance.randrange(size[0]), chance.randrange(size[1])) for _ in range(6)]
                check(shown, {Region(x, y, chance.randint(1, 60), chance.randint(1, 3)) for x, y in places})
        shown.app.set_view("ops")  # another layout: nothing that is known of the lines holds any more
        await shown.settle()
        check(shown, {Region(0, 0, *size)})


async def test_a_frame_sends_the_cells_that_changed_in_one_update() -> None:
    stage = story()
    async with show((100, 30), stage.batches) as shown:
        updates: list[object] = []
        display = shown.app._display
        shown.app._display = lambda screen, update: (updates.append(update), display(screen, update))
        before = [cells(strip) for strip in shown.app.screen._compositor.render_strips()]
        at = len(stage.batches)
        stage.step()
        shown.feed.queue += stage.batches[at:]
        shown.app.tick()
        await shown.pilot.pause(0.05)
        (update,) = [u for u in updates if u is not None]
        painted = [row[:] for row in before]
        for x, y, strip in update.strips:
            painted[y][x : x + strip.cell_length] = cells(strip)
        assert painted != before
        assert painted == [cells(strip) for strip in shown.app.screen._compositor.render_strips()]
        assert "\x1b[2;2H" not in update.render_segments(shown.app.console), "rows that stayed are not sent"


async def test_a_widget_that_draws_too_little_is_left_to_textual() -> None:
    async with show((80, 24), story().batches) as shown:
        compositor, main = shown.app.screen._compositor, shown.app.main
        main.map.render_lines = lambda crop: [Strip.blank(2)]
        assert compositor.strips_for({main.map.region}) is None
        compositor._dirty_regions.add(main.map.region)
        assert compositor.render_partial_update() is not None and not compositor._dirty_regions


def drawn(app: KvtopApp) -> list[list[tuple[str, object]]]:
    """What a terminal shows, kept up with what the app sends from now on."""
    screen, display = app.screen, app._display
    painted = [cells(strip) for strip in screen._compositor.render_strips()]

    def draw(on: Screen[object], update: object) -> None:
        for x, y, strip in getattr(update, "strips", ()):
            painted[y][x : x + strip.cell_length] = cells(strip)
        display(on, update)  # type: ignore[arg-type]

    app._display = draw  # type: ignore[method-assign]
    return painted


async def test_what_toasts_covered_is_drawn_again() -> None:
    async with show((100, 30), story().batches, notifications=True) as shown:
        painted = drawn(shown.app)
        before = [row[:] for row in painted]
        for n in (1, 2):
            shown.app.notify(f"toast {n}", timeout=0.2 * n)
        await shown.pilot.pause(0.1)
        await shown.settle()
        assert painted != before and len(shown.app.screen.query(Toast)) == 2
        await shown.pilot.pause(0.5)
        await shown.settle()
        assert not shown.app.screen.query(Toast) and painted == before


async def test_a_cursor_that_moves_during_a_frame_is_drawn_there() -> None:
    async with live((100, 30)) as shown:
        app, main = shown.app, shown.app.main
        await shown.pilot.press(*"typed")
        await shown.pilot.pause(0.1)
        painted = drawn(app)
        main.prompt.cursor_position = 0
        while main.prompt not in main._dirty_widgets:
            await asyncio.sleep(0)
        app.session.toggle_frozen()
        app.paint()
        await shown.pilot.pause(0.1)
        assert "FROZEN" in "".join(character for character, _ in painted[0])
        assert painted == [cells(strip) for strip in main._compositor.render_strips()]


class Busy:
    """A terminal that is full or slow, as one says."""

    is_full, limit = True, None


async def test_while_the_terminal_is_full_no_frame_is_made_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with live((100, 30)) as shown:
        app, busy = shown.app, Busy()
        painted = drawn(app)
        monkeypatch.setattr(type(app), "output", property(lambda _: busy))
        before = [row[:] for row in painted]
        await shown.pilot.press(*"typed")
        app.set_view("ops")
        await shown.pilot.pause(0.2)
        assert painted == before
        busy.is_full, busy.limit = False, 10**6
        app.output_is_free()
        await shown.pilot.pause(0.1)
        await shown.pilot.pause(0.1)
        assert painted == [cells(strip) for strip in app.screen._compositor.render_strips()] != before


async def test_a_slow_terminal_gets_a_frame_in_slices_the_prompt_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with live((100, 30)) as shown:
        app, busy = shown.app, Busy()
        sizes: list[int] = []
        painted, display = drawn(app), app._display

        def count(on: Screen[object], update: object) -> None:
            if update is not None:
                sizes.append(len(update.render_segments(app.console)))
            display(on, update)

        app._display = count
        busy.is_full, busy.limit = False, 1000
        monkeypatch.setattr(type(app), "output", property(lambda _: busy))
        app.theme = "kvtop-light"  # every cell differs
        await shown.pilot.press(*"ab")
        await shown.pilot.pause(0.05)
        row = app.main.prompt.region.y
        whole = [cells(strip) for strip in app.screen._compositor.render_strips()]
        assert painted[row] == whole[row] and painted != whole
        for _ in range(200):
            app.output_is_free()
            await shown.pilot.pause()
        assert painted == [cells(strip) for strip in app.screen._compositor.render_strips()]
        assert len(sizes) > 5 and max(sizes) < 5000
