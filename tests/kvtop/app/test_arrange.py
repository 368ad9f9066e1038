"""Which panels are shown at which size: the arrangement itself, and that the screen follows it."""

from __future__ import annotations

from itertools import product

import pytest

from kvtop.app.screens.arrange import NEEDS, PLACED, Asked, Plan, arrange, is_tiny
from kvtop.app.screens.main import Box
from kvtop.options import VIEWS, View
from tests.kvtop.screen import show
from tests.kvtop.stage import Stage

WIDTHS = (20, 40, 59, 60, 70, 80, 99, 100, 120, 132, 139, 140, 160, 200, 240)
HEIGHTS = (*range(6, 45), 48, 50, 55, 60, 70, 80)
LIKE = {"memory-low-box": "graphs", **dict.fromkeys(("ttft-box", "itl-box", "throughput-box"), "graphs")}
LIKE |= {"device-box": "graphs"}
LIKE |= dict.fromkeys(("cache-box", "table-box", "evictions-box", "events-box"), "tables")
ROWS = ("header", "caption", "top", "strip-box", "graphs", "tables", "log-box", "step", "ask", "hint", "keys")


def boxes(plan: Plan) -> dict[str, int]:
    return {name: rows for name, (_, rows) in plan.sizes.items() if name.endswith("-box")}


def check(asked: Asked) -> None:
    """What holds at every size, whatever is switched on."""
    plan = arrange(asked)
    assert set(plan.sizes) <= PLACED
    assert all(columns > 0 and rows > 0 for columns, rows in plan.sizes.values()), (asked, plan)
    assert sum(plan.sizes[name][1] for name in ROWS if name in plan.sizes) == asked.height, (asked, plan)
    for name in ROWS:
        assert name not in plan.sizes or plan.sizes[name][0] == asked.width
    for container, members in (
        ("graphs", ("ttft-box", "itl-box", "throughput-box", "memory-low-box", "device-box")),
        ("tables", ("cache-box", "table-box", "evictions-box", "events-box")),
    ):
        widths = [plan.sizes[name][0] for name in members if name in plan.sizes]
        assert sum(widths) == (asked.width if container in plan.sizes else 0)
    if plan.tiny:
        return
    for name, rows in boxes(plan).items():
        if name == "detail-box" and "chat-box" not in plan.sizes:
            continue  # it takes the place of the chat
        assert rows >= NEEDS[LIKE.get(name, name)].least, (asked, name, rows)


@pytest.mark.parametrize("view", VIEWS)
def test_map_and_queues_come_before_everything_else(view: View) -> None:
    for width, height in product(WIDTHS, HEIGHTS):
        asked = Asked(width, height, view)
        check(asked)
        plan, shown = arrange(asked), boxes(arrange(asked))
        assert plan.tiny == is_tiny(width, height, view)
        if plan.tiny:
            assert "chat-box" in shown or height < 3
            continue
        assert "map-box" in shown, asked
        assert ("queues-box" in shown) == (view != "chat"), asked
        assert ("chat-box" in shown) == (view != "ops") == ("strip-box" in shown), asked
        later = ("budget-box", "memory-box", "graphs", "tables", "kernels-box")
        if any(name in plan.sizes for name in later):
            assert (
                shown["map-box"] >= NEEDS["map-box"].good and shown["queues-box"] >= NEEDS["queues-box"].good
            )


def test_nothing_that_is_switched_on_breaks_a_rule() -> None:
    switches = product(VIEWS, (False, True), (False, True), (False, True), (False, True), (0, 3, 6))
    for view, live, selected, logs, profiled, caption in switches:
        for width, height in product(
            (1, 20, 59, 60, 99, 100, 140, 240), (1, 2, 3, 6, 7, 8, *range(12, 50, 3), 80)
        ):
            check(Asked(width, height, view, live, selected, logs, profiled, caption))


@pytest.mark.parametrize(
    ("size", "view", "least"),
    [
        ((80, 24), "all", {"chat-box": 7, "map-box": 8, "queues-box": 8, "strip-box": 4}),
        ((80, 24), "ops", {"map-box": 8, "queues-box": 8}),
        ((120, 24), "ops", {"map-box": 12, "queues-box": 8, "budget-box": 4, "graphs": 6}),
        ((132, 24), "ops", {"map-box": 12, "queues-box": 8, "budget-box": 4, "graphs": 6}),
        ((120, 20), "ops", {"map-box": 12, "queues-box": 8, "budget-box": 4}),
        ((120, 14), "ops", {"map-box": 8, "queues-box": 8}),
        ((160, 50), "all", {"chat-box": 20, "queues-box": 8, "budget-box": 4, "memory-box": 7, "tables": 10}),
    ],
)
def test_common_sizes(size: tuple[int, int], view: View, least: dict[str, int]) -> None:
    sizes = arrange(Asked(*size, view)).sizes
    assert {name: sizes[name][1] for name in least if sizes[name][1] < least[name]} == {}


@pytest.mark.parametrize("view", VIEWS)
async def test_the_screen_follows_the_plan(view: View) -> None:
    stage = Stage()
    for n in range(4):
        stage.submit(f"question {n}?", "w " * 200, answer="word " * 30)
    for _ in range(6):
        stage.step()
    async with show((200, 60), stage.batches, view=view) as shown:
        for width, height in (
            (200, 60),
            (160, 50),
            (120, 40),
            (132, 24),
            (120, 14),
            (80, 24),
            (60, 20),
            (20, 6),
        ):
            await shown.pilot.resize_terminal(width, height)
            await shown.settle()
            main = shown.app.main
            plan = arrange(Asked(width, height, view, live=False))
            seen = {box.id: box for box in main.query(Box) if box.region}
            assert set(seen) == set(boxes(plan)), (width, height)
            for name, box in seen.items():
                assert box.outer_size == plan.sizes[name], (width, height, name)
                assert box.widget.size.height >= 1, "no title on a frame without a row"
            if "queues-box" in seen:
                rows = [line for line in main.queues.lines if "#" in line]
                assert len(rows) >= min(4, plan.sizes["queues-box"][1] - 4), (width, height)
