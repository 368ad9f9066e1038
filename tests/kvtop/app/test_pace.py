"""Who is painted when: figures at their own pace and spread over the frames, and nothing is left behind."""

from __future__ import annotations

from collections import Counter

from engine.events import DeviceSample
from kvtop.app.screens.main import _period
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


async def test_figures_are_spread_over_the_frames() -> None:
    stage = talking()
    async with show((200, 60), stage.batches) as shown:
        watch = Watch(shown, stage)
        frames = [watch.tick() for _ in range(41)][1:]
        panels = [w for w in shown.app.main.in_view if _period(w)]
        most = max(sum(1 for w in frame if _period(w)) for frame in frames)
        assert len(panels) >= 10 and most <= 0.6 * len(panels), "no frame has them all"
        paints = Counter(w for frame in frames for w in frame)
        for widget in shown.app.main.in_view:
            pace = 40 * TICK / max(TICK, 2 * _period(widget))
            assert paints[widget] >= int(pace), f"{widget} waits for more than two periods"


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
        assert sum(frames) <= 4, "falling rates are told twice a second"


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
