"""Who is painted when: all figures of a frame are of one moment, and nothing is left behind."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from engine.events import DeviceSample
from kvtop.sources import Loading
from kvtop.widgets.base.lines import Lines
from tests.kvtop.screen import Show, show
from tests.kvtop.stage import Stage

TICK = 0.1


def talking() -> Stage:
    """A request that generates for long."""
    stage = Stage()
    stage.submit("why?", "w " * 100, answer=" ".join(f"word{i}" for i in range(400)))
    for _ in range(4):
        stage.step()
    return stage


class Watch:
    """Counts the paints of every widget of a running app."""

    def __init__(self, shown: Show, stage: Stage) -> None:
        self.shown, self.stage = shown, stage
        self.painted: list[Lines] = []
        for widget in shown.app.main.in_view:
            paint = widget.paint
            widget.paint = lambda *a, _w=widget, _p=paint: (self.painted.append(_w), _p(*a))

    def tick(self, steps: int = 1) -> list[Lines]:
        """The next tick, `steps` engine steps later. Returns who was painted."""
        self.painted.clear()
        for _ in range(steps):
            at = len(self.stage.batches)
            self.stage.step()
            self.shown.feed.queue += self.stage.batches[at:]
        self.shown.wall += TICK + 1e-6
        self.shown.app.tick()
        return self.painted[:]


async def test_figures_are_painted_in_rounds_and_what_moves_in_every_frame() -> None:
    stage = talking()
    async with show((200, 60), stage.batches) as shown:
        watch = Watch(shown, stage)
        frames = [watch.tick() for _ in range(40)]
        in_view = set(shown.app.main.in_view)
        assert {frozenset(frame) for frame in frames} == {frozenset(in_view), frozenset()}
        rounds = sum(bool(frame) for frame in frames)
        assert 12 <= rounds <= 15, "every third frame of ten a second"


def same_figures(text: str) -> None:
    """Figures of one name are equal wherever they are on the screen."""
    header, _, rest = text.partition("\n")
    for name in ("running", "waiting", "preempted"):
        inside = set(re.findall(rf"(\d[\d,]*) {name}\b", rest))
        outside = set(re.findall(rf"(\d[\d,]*) {name}\b", header))
        assert name == "preempted" or len(outside) == 1, header
        assert not outside or not inside or inside == outside, (name, header, inside)
    evicted = set(re.findall(r"evicted (\d[\d,]*)", rest)) | set(
        re.findall(r"(\d[\d,]*) evicted so far", rest)
    )
    assert len(evicted) <= 1, evicted
    hit = set(re.findall(r"hit (\d+) %", header)) | set(re.findall(r"hit rate (\d+) %", rest))
    assert len(hit) <= 1, hit
    decode = set(re.findall(r"decode (\d+) +▏?prefill", rest))
    assert len(decode) <= 1, decode
    rows = len(re.findall(r"#\d+ (?:decode|prefill) ", rest))
    assert not rows or f" {rows} running" in header


@pytest.mark.parametrize("steps", [1, 3, 10])
async def test_all_figures_of_a_frame_are_of_one_moment(steps: int) -> None:
    """Requests come, run, preempt and end while it is looked at between any two frames."""
    stage = Stage(num_blocks=60)
    async with show((200, 60), stage.batches, view="all") as shown:
        differing = []
        for n in range(60):
            at = len(stage.batches)
            if n % 2 == 0:
                stage.submit(f"question {n}?", f"w{n % 7} " * (60 + n), answer="word " * (5 + n % 9))
            for _ in range(steps):
                stage.step()
            shown.feed.queue += stage.batches[at:]
            shown.wall += TICK + 1e-6
            shown.app.tick()
            await shown.pilot.pause()
            same_figures(shown.text)
            differing.append(shown.rows[0])
        assert len(set(differing)) > 10, "the figures moved"


async def test_after_the_last_batch_every_panel_shows_it_and_then_nothing_is_owed() -> None:
    stage = talking()
    async with show((200, 60), stage.batches) as shown:
        watch = Watch(shown, stage)
        for _ in range(10):
            watch.tick()
        late: set[Lines] = set()
        last = set(watch.tick())
        for _ in range(5):
            late |= set(watch.tick(steps=0))
        assert late | last == set(shown.app.main.in_view) and not shown.app._owed
        frames = [bool(watch.tick(steps=0)) for _ in range(20)]
        assert sum(frames) <= 4, "falling rates are reported twice a second"


async def test_after_a_rest_all_of_it_changes_at_once() -> None:
    stage = talking()
    async with show((200, 60), stage.batches) as shown:
        watch = Watch(shown, stage)
        shown.wall += 2
        assert set(watch.tick()) == set(shown.app.main.in_view)


async def test_while_only_the_device_tells_how_it_is_each_panel_is_painted_once_a_time() -> None:
    stage = talking()
    async with show((200, 60), stage.batches) as shown:
        watch = Watch(shown, stage)
        for _ in range(40):  # falling rates are over
            watch.tick(steps=0)
        paints: Counter[Lines] = Counter()
        for n in range(50):
            if n % 10 == 0:
                stage.t += 1.0
                stage._emit([DeviceSample(util=1.0)])
                shown.feed.queue.append(stage.batches[-1])
            paints.update(watch.tick(steps=0))
        assert set(paints) == set(shown.app.main.in_view)
        assert set(paints.values()) == {5}


async def test_while_a_recording_loads_only_its_progress_is_painted_once_a_second() -> None:
    stage = talking()
    async with show((120, 40)) as shown:
        watch, main = Watch(shown, stage), shown.app.main
        shown.feed.queue += stage.batches  # as a seek does, while it is on its way
        telling = {main.header, main.chat, main.key_line}
        frames = []
        for i in range(30):
            shown.feed.loading = Loading(f"LOADING {i} %", f"loading: {i} % of the way")
            shown.app._slice_comes = False  # the timer of the next slice, which this test takes the place of
            frames.append(watch.tick())
        assert [set(frame) for frame in frames if frame] == [telling] * 3
        assert "% of the way" in "\n".join(main.chat.lines)
        assert "running" not in main.header.lines[0], "figures of another moment than the panels show"
        shown.feed.loading = None
        shown.app._slice_comes = False
        assert set(watch.tick()) == set(main.in_view)
        assert "running" in main.header.lines[0] and "of the way" not in shown.text
