"""Profiles and graphs: what is kept of them, what the panels say, and figures that cannot be."""

from __future__ import annotations

import msgspec
import pytest

from engine import events as ev
from kvtop.options import View
from kvtop.record.redact import Redactor
from kvtop.record.verify import verify_batches
from kvtop.state.dashboard import DashboardState
from kvtop.widgets.ops.device import DevicePanel
from kvtop.widgets.ops.event_log import EventLogPanel
from kvtop.widgets.ops.kernels import KernelsPanel
from tests.kvtop.app.test_live import live
from tests.kvtop.record.test_verify import renumbered, rich_stream
from tests.kvtop.screen import show
from tests.kvtop.widgets.test_panels import more, played, scene, shown

PROFILE = ev.KernelsProfiled(
    tokens=8,
    sequences=8,
    names=["norm", "qkv", "attention", "head"],
    calls=[61, 30, 30, 1],
    seconds=[0.0005, 0.002, 0.004, 0.002],
    bytes=[4_000_000, 90_000_000, 100_000_000, 60_000_000],
    flops=[1_000_000, 4_000_000_000, 1_000_000, 500_000_000],
    forward=0.010,
    bandwidth=50e9,
    peak=4e12,
)
"""At least 0.08 ms, 1.8 (by bytes, not 1 by operations), 2 and 1.2 ms."""


def profiled(**fields: object) -> DashboardState:
    state = played(scene())
    more(state, msgspec.structs.replace(PROFILE, **fields))
    return state


async def test_a_line_a_kernel_the_largest_first_and_what_is_left() -> None:
    async with shown(KernelsPanel(), profiled(), 80, 12) as lines:
        head = "tokens 8   sequences 8   forward 10 ms   roofline 50 %   read 50.0 GB/s"
        assert lines[0].rstrip() == head
        assert lines[1].split() == ["kernel", "ms", "share", "GB/s", "TFLOP/s", "roofline"]
        assert [line.replace("━", "").replace("╸", "").replace("·", "").split() for line in lines[2:7]] == [
            ["attention", "4.00", "40", "%", "25.0", "0.00", "50", "%"],
            ["qkv", "2.00", "20", "%", "45.0", "2.00", "90", "%"],
            ["head", "2.00", "20", "%", "30.0", "0.25", "60", "%"],
            ["norm", "0.50", "5", "%", "8.00", "0.00", "16", "%"],
            ["other", "1.50", "15", "%", "–", "–", "–"],
        ]
        filled = [line.count("━") + line.count("╸") / 2 for line in lines[2:7]]
        assert filled[0] == pytest.approx(2 * filled[1], abs=0.5)


async def test_what_does_not_fit_is_other() -> None:
    async with shown(KernelsPanel(), profiled(), 80, 5) as lines:
        assert [line.split()[:2] for line in lines[2:]] == [
            ["attention", "4.00"],
            ["qkv", "2.00"],
            ["other", "4.00"],
        ]
    async with shown(KernelsPanel(), profiled(), 45, 12) as lines:
        assert lines[1].split() == ["kernel", "ms", "share", "GB/s", "roofline"]
        assert not any("…" in line for line in lines)


async def test_without_a_rate_of_operations_only_bytes_count_and_without_any_nothing() -> None:
    async with shown(KernelsPanel(), profiled(peak=None), 80, 12) as lines:
        assert lines[1].split()[-1] == "bandwidth"
        assert "bandwidth 50 %" in lines[0]
    by_operations = profiled(bytes=[0, 0, 0, 0])
    async with shown(KernelsPanel(), by_operations, 80, 12) as lines:
        assert lines[3].split()[-2:] == ["50", "%"]  # qkv: 4 GFLOP at 4 TFLOP/s in 2 ms
    async with shown(KernelsPanel(), profiled(peak=None, bandwidth=None), 80, 12) as lines:
        assert "bandwidth –" in lines[0] and "read – GB/s" in lines[0]
        assert all(line.split()[-1] == "–" for line in lines[2:7])
    async with shown(KernelsPanel(), played(scene()), 80, 12) as lines:
        assert lines[0].rstrip() == "no step was profiled yet"


async def test_the_device_tells_its_roofline_and_its_graphs() -> None:
    state = profiled()
    for i, bucket in enumerate((8, 1, 2)):
        more(state, ev.GraphCaptured(bucket, i + 1, 0.2))
    async with shown(DevicePanel(), state, 80, 14) as lines:
        reported = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
        assert reported["roofline"][-2:] == ["50", "%"]
        assert reported["graphs"] == ["1", "2", "8"]
    async with shown(DevicePanel(), profiled(peak=None, bandwidth=None), 80, 14) as lines:
        assert not any(line.startswith(("roofline", "bandwidth", "graphs")) for line in lines)


def test_graphs_are_those_that_there_are() -> None:
    state = played(scene())
    for bucket, graphs, left in (
        (4, 1, (4,)),
        (1, 2, (1, 4)),
        (2, 1, (2,)),  # the others were dropped before it
        (8, 2, (2, 8)),
        (16, 0, ()),  # and now all are given up
    ):
        more(state, ev.GraphCaptured(bucket, graphs, 0.5))
        assert state.engine.graphs == left
    copy = state.copy()
    more(copy, ev.GraphCaptured(1, 1, 0.5))
    assert state.engine.graphs == () and copy.engine.graphs == (1,)


async def test_both_are_told_among_the_events() -> None:
    state = profiled()
    more(state, ev.GraphCaptured(8, 1, 0.34), ev.GraphCaptured(1, 0, 0.1))
    more(state, msgspec.structs.replace(PROFILE, tokens=1, names=["x\x1b[2J"] * 4))
    async with shown(EventLogPanel(), state, 80, 5) as lines:
        reported = [line.split(maxsplit=1)[1].strip() for line in lines[-4:]]
    assert reported == [
        "profiled 8 tokens: 10 ms, longest attention",
        "graph of up to 8 sequences: captured in 340 ms",
        "graph of up to 1 sequence: not captured, steps run without",
        "profiled 1 token: 10 ms, longest x␛[2J",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": ["a"]},
        {"flops": []},
        {"seconds": [-1.0, 0.0, 0.0, 0.0]},
        {"seconds": [1e300, 0.0, 0.0, 0.0]},
        {"forward": -1.0},
        {"bytes": [-1, 0, 0, 0]},
        {"bandwidth": 1e-300},
        {"peak": 0.0},
    ],
    ids=str,
)
def test_figures_that_cannot_be_are_not_believed(wrong: dict[str, object]) -> None:
    state = played(scene())
    state.stream.strict = False
    more(state, msgspec.structs.replace(PROFILE, **wrong))
    assert state.engine.profile is None
    assert state.stream.losses == 1


async def test_figures_that_can_hardly_be_are_drawn() -> None:
    """No size and no value that is let in ends the application."""
    state = profiled(
        names=["", "\u202e" * 50, "一" * 30, "z"],
        seconds=[0.0, 1e-300, 9e5, 1e-9],
        bytes=[0, 2**63, 2**63, 0],
        flops=[2**63, 0, 2**63, 2**63],
        forward=1e-300,
        bandwidth=1.0,
        peak=1e300,
    )
    none = profiled(names=[], calls=[], seconds=[], bytes=[], flops=[], forward=0.0)
    for some in (state, none):
        for width, height in ((1, 1), (9, 3), (30, 4), (80, 20)):
            for panel in (KernelsPanel(), DevicePanel(), EventLogPanel()):
                async with shown(panel, some, width, height) as lines:
                    assert len(lines) <= height
                    assert not any("\u202e" in line for line in lines)


@pytest.mark.parametrize("redact", [False, True])
def test_a_stream_with_them_verifies_and_says_the_same_when_redacted(redact: bool) -> None:
    batches = rich_stream(40)
    at = next(i for i, b in enumerate(batches) if isinstance(b.events[-1], ev.StepCompleted))
    events = batches[at].events
    batches[at] = msgspec.structs.replace(
        batches[at], events=[*events[:-1], ev.GraphCaptured(4, 1, 0.2), PROFILE, events[-1]]
    )
    batches = renumbered(batches)
    if redact:
        redactor = Redactor()
        batches = [redactor(b) for b in batches]
    assert verify_batches(batches).violations == []
    state = DashboardState(strict=True)
    for batch in batches:
        state.apply(ev.decode_batch(ev.encode_batch(batch)))
    assert (state.engine.profile, state.engine.graphs) == (PROFILE, (4,))


@pytest.mark.parametrize(
    ("size", "view", "rows"),
    [((200, 60), "ops", 12), ((200, 60), "all", 9), ((120, 60), "ops", 12), ((120, 40), "ops", 0)],
)
async def test_it_stands_where_there_is_room_once_there_is_a_profile(
    size: tuple[int, int], view: View, rows: int
) -> None:
    batches = list(scene())
    async with show(size, batches, view=view) as screen:
        assert "kernels of one step" not in screen.text
        last = batches[-1]
        first = last.first_event + len(last.events)
        screen.apply([ev.StepBatch(last.seq + 1, last.t + 0.1, last.step, first, [PROFILE])])
        await screen.settle()
        assert ("kernels of one step" in screen.text) == bool(rows)
        (panel,) = screen.app.main.query(KernelsPanel)
        if rows:
            assert panel.size.height == rows
            assert panel.lines[2].startswith("attention")
            assert not any("…" in line for line in panel.lines)


@pytest.mark.parametrize("view", ["ops", "all"])
async def test_it_leaves_the_queues_their_rows(view: View) -> None:
    async with live((100, 60), view=view) as shown:
        shown.app.state.engine.profile = PROFILE
        for _ in range(2):
            shown.app.paint()
            await shown.pilot.pause()
        main = shown.app.main
        assert main.query_one(KernelsPanel).size.height >= 9 and main.queues.size.height >= 4
