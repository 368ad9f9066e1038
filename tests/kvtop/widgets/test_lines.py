"""Lines: rows that did not change keep their strips, only what differs is refreshed, and any size is fine."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.style import Style
from textual.app import App, ComposeResult
from textual.geometry import Region

from kvtop.app.capture import Capture
from kvtop.paint import themes
from kvtop.widgets.base.lines import KeepsLines, Lines

RED = Style(color="#ff0000")
PLAIN = Style.null()


class Both(App[None]):
    """Two widgets in a column."""

    CSS = "Lines { height: 3; } #second { background: #203040; }"

    def __init__(self) -> None:
        super().__init__()
        self.palette = themes.palette(themes.find("kvtop-dark"))
        self.first, self.second = Lines(id="first"), Lines(id="second")

    def compose(self) -> ComposeResult:
        """One above the other."""
        yield self.first
        yield self.second


@asynccontextmanager
async def both(size: tuple[int, int] = (20, 8)) -> AsyncIterator[tuple[Both, list[Region]]]:
    """The app, and the regions that its first widget refreshes."""
    app, regions = Both(), list[Region]()
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.pilot = pilot
        refresh = app.first.refresh
        app.first.refresh = lambda *r, **kw: (regions.extend(r), refresh(*r, **kw))[1]
        yield app, regions


async def test_only_what_differs_is_refreshed_and_the_rest_is_kept() -> None:
    async with both() as (app, regions):
        rows = [[("one", RED)], [("left ", PLAIN), ("right", RED)], [("three", PLAIN)]]
        app.first.set_rows(rows)
        before = app.first.render_lines(app.first.size.region)[:]
        regions.clear()
        rows[1] = [("left ", PLAIN), ("RIGHT", RED)]
        app.first.set_rows(rows)
        assert regions == [Region(5, 1, 15, 1)]
        after = app.first.render_lines(app.first.size.region)
        assert [a is b for a, b in zip(before, after, strict=True)] == [True, False, True]
        regions.clear()
        app.first.set_rows(rows)
        assert regions == []


async def test_rows_that_scroll_keep_their_strips() -> None:
    async with both() as (app, regions):
        rows = [((f"row {n}", RED),) for n in range(4)]
        app.first.set_rows(rows[:3], scrolls=True)
        before = app.first.render_lines(app.first.size.region)[:]
        regions.clear()
        app.first.set_rows(rows[1:], scrolls=True)
        after = app.first.render_lines(app.first.size.region)
        assert after[0] is before[1] and after[1] is before[2]
        assert [line.strip() for line in app.first.lines] == ["row 1", "row 2", "row 3"]
        assert [region.y for region in regions] == [0, 1, 2]


async def test_who_paints_it_may_tell_the_screen_itself() -> None:
    async with both() as (app, regions):
        app.second.paint = lambda state, now: app.second.set_rows([[("x", PLAIN)], [("y", PLAIN)]])
        assert app.second.paint_into(None, 0.0) == [Region(0, 3, 20, 1), Region(0, 4, 20, 1)]
        assert app.second.paint_into(None, 0.0) == [] and regions == []
        app.second.set_row(0, [("z", PLAIN)])
        assert app.second._repaint_regions == {Region(0, 0, 20, 1)}, "outside of it as ever"


async def test_rows_are_cut_padded_and_styled() -> None:
    async with both() as (app, _):
        app.second.set_rows(
            [[("日本" * 20, RED)], [("", PLAIN)], [("x", PLAIN)], [("beyond the height", PLAIN)]]
        )
        strips = app.second.render_lines(app.second.size.region)
        assert [s.cell_length for s in strips] == [20, 20, 20]
        assert all(s.style is not None and s.style.bgcolor is not None for strip in strips for s in strip)
        assert app.second.lines[2] == "x" + " " * 19
        app.second.set_rows([[("only one", PLAIN)]])
        assert [s.text.strip() for s in app.second.render_lines(app.second.size.region)] == [
            "only one",
            "",
            "",
        ]


async def test_a_part_of_it_can_be_asked_for() -> None:
    async with both() as (app, _):
        app.first.set_rows([[(f"row {n} abcdefghij", PLAIN)] for n in range(3)])
        part = app.first.render_lines(Region(4, 1, 6, 2))
        assert [s.text for s in part] == ["1 abcd", "2 abcd"]


@pytest.mark.parametrize("size", [(1, 1), (0, 0), (3, 2)])
async def test_no_size_is_too_small(size: tuple[int, int]) -> None:
    async with both((20, 8)) as (app, _):
        app.first.set_rows([[("something", RED)]] * 3)
        app.screen.styles.width, app.first.styles.height = size[0], size[1]
        app.first.styles.width = size[0]
        app.refresh(layout=True)
        await app.animator.wait_for_idle()
        app.first.set_rows([[("else", RED)]] * 5)
        app.first.set_row(7, [("far", RED)])
        app.first.forget()


async def test_a_theme_makes_every_row_new() -> None:
    async with both() as (app, regions):
        app.first.set_rows([[("one", RED)]])
        app.first.stale = False
        app.theme = "textual-light"
        await app.pilot.pause()
        assert app.first.stale
        regions.clear()
        app.first.set_rows([[("one", RED)]])
        assert regions, "the same text in other colours"


async def test_containers_are_rendered_once() -> None:
    class Counting(KeepsLines, Lines):
        """Counts how often it is asked to render anew."""

    class One(Both):
        def compose(self) -> ComposeResult:
            self.box = Counting()
            yield self.box

    app = One()
    async with app.run_test(size=(10, 4)) as pilot:
        await pilot.pause()
        region = app.box.size.region
        assert app.box.render_lines(region) is app.box.render_lines(region)
        before = app.box.render_lines(region)
        app.box.refresh()
        app.box.set_rows([[("x", PLAIN)]])
        assert app.box.render_lines(region) is not None and before is not None


def test_capture_takes_descriptors_and_gives_them_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sub" / "kvtop.log"
    real = sys.__stderr__
    with Capture(log) as captured:
        os.write(1, b"out\n")
        os.write(2, b"half")
        assert captured.poll() and captured[-1] == "out"
        os.write(2, b" a line\n")
        assert captured.poll() and captured[-1] == "half a line"
        assert sys.__stderr__ is not real
    os.write(2, b"after\n")
    assert sys.__stderr__ is real and capfd.readouterr().err == "after\n"
    assert log.read_text().splitlines()[1:] == ["out", "half a line"]


def test_capture_without_a_place_for_its_log(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    capture = Capture(blocked / "kvtop.log")
    with capture as captured:
        os.write(2, b"still kept\n")
        assert captured.poll() and list(captured)[-1] == "still kept"
    assert not capture.path.exists()


def test_each_process_has_a_log_of_its_own(tmp_path: Path) -> None:
    """What another one prints is none of our lines."""
    log = tmp_path / "kvtop.log"
    with open(log, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        capture = Capture(log)
        with capture as captured:
            other.write(b"not ours\n")
            other.flush()
            os.write(1, b"ours\n")
            assert captured.poll() and list(captured) == ["ours"]
        assert capture.path == tmp_path / "kvtop-2.log"
    with Capture(log):
        os.write(1, b"free again\n")
    assert log.read_text().endswith("free again\n")
