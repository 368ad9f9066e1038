"""Panels: what they say over a known run, at any size, and what they say when nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll

from engine.events import (
    AdmissionBlocked,
    DeviceSample,
    EngineError,
    Knobs,
    RequestPreempted,
    RequestQueued,
    StepBatch,
)
from kvtop.paint import themes
from kvtop.paint.palette import Palette
from kvtop.state.dashboard import DashboardState
from kvtop.state.series import Rate
from kvtop.units import NOT_HERE, count, duration, percent, rate, size, span
from kvtop.widgets.base.moment_text import blocks
from kvtop.widgets.base.panel import Panel
from kvtop.widgets.ops.budget import BudgetPanel, shares
from kvtop.widgets.ops.device import DevicePanel
from kvtop.widgets.ops.event_log import EventLogPanel
from kvtop.widgets.ops.evictions import EvictionsPanel
from kvtop.widgets.ops.hash_table import HashTablePanel
from kvtop.widgets.ops.kernels import KernelsPanel
from kvtop.widgets.ops.latency import ItlPanel, TtftPanel
from kvtop.widgets.ops.log_panel import LogPanel
from kvtop.widgets.ops.memory import MemoryPanel
from kvtop.widgets.ops.prefix_cache import PrefixCachePanel, steps_in_time
from kvtop.widgets.ops.queues import QueuesPanel
from kvtop.widgets.ops.throughput import ThroughputPanel, history
from tests.kvtop.stage import Stage

PANELS: tuple[type[Panel], ...] = (
    QueuesPanel,
    BudgetPanel,
    TtftPanel,
    ItlPanel,
    MemoryPanel,
    PrefixCachePanel,
    HashTablePanel,
    EvictionsPanel,
    ThroughputPanel,
    DevicePanel,
    KernelsPanel,
    EventLogPanel,
    LogPanel,
)
PAGE = " ".join(f"note{i} on the engine" for i in range(250))


@lru_cache(1)
def scene() -> tuple[StepBatch, ...]:
    """#1 cold (300 ms), #2 hit (20 ms), #3 evicts part of the page in a pool of 80, #4 stays in prefill."""
    stage = Stage(num_blocks=81, budget=512)
    stage.submit("who was she?", PAGE, answer="one two three four")
    stage.run(prefill=0.3)
    stage.submit("what did she write?", PAGE, answer="one two three")
    stage.run(prefill=0.02)
    stage.submit("and this?", " ".join(f"other{i}" for i in range(600)), answer="five six")
    stage.run(prefill=0.1)
    stage.submit("still \x1b[31mcomputing\u202e", " ".join(f"last{i}" for i in range(700)))
    stage.step(0.2)
    return tuple(stage.batches)


def played(batches: tuple[StepBatch, ...]) -> DashboardState:
    state = DashboardState(strict=True)
    for batch in batches:
        state.apply(batch)
    return state


def more(state: DashboardState, *events: object, after: float = 0.1) -> None:
    """One batch that goes on from here."""
    state.apply(
        StepBatch(state.seq + 1, state.t + after, state.stream.step, state.stream.num_events, list(events))
    )


class Show(App[None]):
    """One panel that fills the screen."""

    def __init__(self, panel: Panel, theme: str = "kvtop-dark") -> None:
        super().__init__()
        self.panel = panel
        chosen = themes.find(theme)
        self.palette: Palette = themes.palette(chosen)
        self.register_theme(chosen)
        self.theme = chosen.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.defaults(True)

    def compose(self) -> ComposeResult:
        yield self.panel


Shown = Callable[..., AbstractAsyncContextManager[list[str]]]


@asynccontextmanager
async def shown(
    panel: Panel, state: DashboardState, width: int = 80, height: int = 24, now: float | None = None
) -> Iterator[list[str]]:
    app = Show(panel)
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        panel.paint(state, state.t if now is None else now)
        yield panel.lines


class Wall(Show):
    """Every panel, each as large as the screen."""

    CSS = "Panel { width: 100vw; height: 100vh; }"

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            for kind in PANELS:
                yield kind()


@pytest.mark.parametrize("size_", [(1, 1), (2, 3), (7, 2), (20, 5), (80, 24), (120, 40), (200, 60)])
async def test_every_panel_fits_every_size(size_: tuple[int, int]) -> None:
    width, height = size_
    app, state = Wall(Panel()), played(scene())
    async with app.run_test(size=size_) as pilot:
        await pilot.pause()
        for panel in app.query(Panel):
            assert panel.size == size_
            panel.paint(state, state.t)
            assert 1 <= len(panel.lines) <= height
            assert all(cell_len(line) == width for line in panel.lines)
            assert not any("\x1b" in line or "\u202e" in line for line in panel.lines)
            assert any(line.strip() for line in panel.lines)


async def test_every_panel_says_that_nothing_is_known_yet() -> None:
    app = Wall(Panel())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        for panel in app.query(Panel):
            panel.paint(DashboardState(), 0.0)
            text = "\n".join(panel.lines)
            assert "waiting for the engine" in text or "nothing was printed" in text
            panel.paint(played(scene()[:2]), 0.0)
            text = "\n".join(panel.lines)
            assert not any(invented in text for invented in ("0 %", "0.0 ms", "nan"))


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_tells_what_its_figures_mean(panel: type[Panel]) -> None:
    assert panel.TITLE
    assert panel.FIGURES
    assert all(name and meaning.endswith(".") for name, meaning in panel.FIGURES)


async def test_a_panel_paints_again_only_for_something_new() -> None:
    state, panel = played(scene()), QueuesPanel()
    async with shown(panel, state):
        calls: list[float] = []
        real = panel.rows
        panel.rows = lambda s, now, w, h: calls.append(now) or real(s, now, w, h)  # type: ignore[method-assign,func-returns-value]
        panel.paint(state, state.t)
        assert not calls
        panel.paint(state, state.t + 1)
        more(state, EngineError("x"))
        panel.paint(state, state.t)
        assert len(calls) == 2


# ---------------------------------------------------------------------------------------- latency


async def test_ttft_tells_hits_from_cold_ones_by_glyph() -> None:
    async with shown(TtftPanel(), played(scene()), 80, 12) as lines:
        assert lines[0].startswith("last 200 ms   p50 200 ms   p99 592 ms   cold 400 ms   ◆ hit 20 ms")
        assert lines[-1].startswith("◆ = hit ")
        assert [mark.strip() for mark in lines[-1][8:].split("   ") if mark.strip()] == ["·", "◆◆◆ ·"]
        assert lines[1].startswith(" 600 ms")
        assert "┈" in "".join(lines)


async def test_ttft_axis_can_be_logarithmic() -> None:
    panel = TtftPanel()
    async with shown(panel, played(scene()), 80, 12):
        panel.action_toggle_log()
        panel.paint(played(scene()), 3.0)
        assert panel.lines[1].startswith("    1 s")
        assert panel.lines[-2].startswith("  10 ms")


async def test_itl_leaves_slow_steps_out() -> None:
    state = played(scene())
    known = len(state.series.itl)
    async with shown(ItlPanel(), state, 60, 8) as lines:
        assert lines[0].startswith("last 16 ms   p50 16 ms   p99 16 ms   max 16 ms")
    assert known == 3 + 2 + 1


async def test_latency_needs_a_source_that_times() -> None:
    state = played(scene())
    assert state.started is not None
    state.engine.started = msgspec.structs.replace(state.started, capabilities=["blocks"])
    for panel in (TtftPanel(), ItlPanel()):
        async with shown(panel, state) as lines:
            assert lines[0].strip() == NOT_HERE
    async with shown(BudgetPanel(), state) as lines:
        assert f"times {NOT_HERE}" in "\n".join(lines)
    async with shown(DevicePanel(), state) as lines:
        assert [line.split(maxsplit=1)[1].strip() for line in lines[:2]] == [NOT_HERE, NOT_HERE]


# ----------------------------------------------------------------------------- queues and the step


async def test_queues_show_progress_cache_and_reasons() -> None:
    state = played(scene())
    more(
        state,
        RequestQueued(9, [1] * 40, state.t),
        AdmissionBlocked(9, need=65, free=12, reason="no free blocks"),
        RequestQueued(10, [1] * 40, state.t),
    )
    async with shown(QueuesPanel(), state, 110, 12, now=state.t + 2) as lines:
        assert lines[0].startswith("1 running   2 waiting   0 preempted   3 finished")
        assert lines[1].split() == ["id", "state", "prefill", "out", "blocks", "cached", "TTFT"]
        rows = {line.split()[0]: line for line in lines[2:]}
        assert "prefill   ━━━━·· 512/704 +512" in rows["#4"]
        assert "no free blocks: needs 65, 12 free" in rows["#9"]
        assert "waits 2.10 s" in rows["#10"]
        assert rows["#2"].split()[2:4] == ["1,006", "tokens"]
        assert "98 %" in rows["#2"]
        assert "20 ms" in rows["#2"]
        assert rows["#1"].split()[-1] == "stop"
        assert list(rows) == ["#4", "#9", "#10", "#3", "#2", "#1"]


async def test_a_preempted_request_starts_over() -> None:
    state = played(scene())
    view = state.requests[4]
    more(state, RequestPreempted(4, list(view.seq_ids), 512))
    async with shown(QueuesPanel(), state, 110, 8) as lines:
        assert "1 preempted" in lines[0]
        assert "preempted ······ 0/704" in lines[2]


async def test_narrow_queues_keep_what_matters() -> None:
    async with shown(QueuesPanel(), played(scene()), 36, 6) as lines:
        assert lines[1].split() == ["id", "state", "prefill", "cached"]
        assert "━━━━·· 72 %" in lines[2]


async def test_queues_scroll() -> None:
    panel = QueuesPanel()
    state = played(scene())
    async with shown(panel, state, 100, 4):
        panel.action_scroll_by(1000)
        panel.paint(state, state.t)
        assert [line.split()[0] for line in panel.lines[2:]] == ["#2", "#1"]
        panel.action_scroll_by(-1)
        panel.paint(state, state.t)
        assert [line.split()[0] for line in panel.lines[2:]] == ["#3", "#2"]


async def test_the_budget_bar_is_the_step() -> None:
    state = played(scene())
    done = state.steps.completed
    assert done is not None
    more(state, msgspec.structs.replace(done, budget=100, decode_tokens=25, prefill_tokens=50))
    async with shown(BudgetPanel(), state, 48, 5) as lines:
        assert lines[0] == "tokens  " + "█" * 10 + "▓" * 20 + "·" * 10
        assert lines[1].split() == ["decode", "25", "prefill", "50", "unused", "25"]
        assert lines[2].startswith("time    ░▒███")
        assert "schedule 0.1 ms" in lines[3]
    more(state, msgspec.structs.replace(done, budget=100, decode_tokens=25, prefill_tokens=50, overrun=3))
    async with shown(BudgetPanel(), state, 70, 5) as lines:
        assert lines[1].split()[-4:] == ["of", "100", "overrun", "3"]


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=5), st.integers(1, 200))
def test_shares_fill_the_bar(parts: list[int], room: int) -> None:
    cells = shares(parts, room)
    assert sum(cells) == room
    assert min(cells) >= 0
    if sum(parts) and room >= len(parts):
        assert all(c > 0 for c, part in zip(cells, parts, strict=True) if part)
        assert all(not c for c, part in zip(cells, parts, strict=True) if not part)


# ------------------------------------------------------------------------------------------- cache


async def test_the_prefix_cache_counts_as_the_state_does() -> None:
    state = played(scene())
    async with shown(PrefixCachePanel(), state, 90, 12) as lines:
        text = "\n".join(lines)
        assert f"hit rate {percent(state.cache.hit_tokens, state.cache.query_tokens)}" in text
        assert f"{state.cache.hit_tokens:,} of {state.cache.query_tokens:,} tokens" in text
        assert "look-ups 4" in text
        assert f"evicted {state.pool.evictions}" in text
        assert f"table {int(state.pool.hashed.sum())} of 80 blocks   contents {state.pool.num_hashes}" in text
        assert lines[3].startswith("  100 %")


async def test_no_lookup_yet_is_not_zero_percent() -> None:
    async with shown(PrefixCachePanel(), played(scene()[:2]), 90, 12) as lines:
        assert lines[0].startswith("hit rate – no look-up yet   look-ups 0")


async def test_a_cache_that_is_off_says_so() -> None:
    state = played(scene())
    assert state.started is not None
    state.engine.started = msgspec.structs.replace(state.started, knobs=Knobs(enable_prefix_caching=False))
    async with shown(PrefixCachePanel(), state) as lines:
        assert lines[0].strip() == "prefix caching is off"


async def test_the_hash_table_spells_its_blocks() -> None:
    state = played(scene())
    async with shown(HashTablePanel(), state, 80, 100) as lines:
        assert lines[0].split()[:5] == ["hash", "block", "refs", "hits", "used"]
        assert len(lines) == 1 + int(state.pool.hashed.sum())
        for line in lines[1:]:
            short, block, refs, hits, *_ = line.split()
            info = state.block(int(block))
            assert (info.hash or "")[:8] == short
            assert (info.ref, info.hits) == (int(refs), int(hits))
        assert "last0 last1" in "\n".join(lines)
        touched = [float(state.pool.touched[int(line.split()[1])]) for line in lines[1:]]
        assert touched == sorted(touched, reverse=True)


async def test_evictions_say_what_was_lost_for_whom() -> None:
    state = played(scene())
    async with shown(EvictionsPanel(), state, 100, 10) as lines:
        assert lines[0].startswith(f"evicted {state.pool.evictions} blocks")
        assert lines[1].split()[:6] == ["×", "ago", "age", "hits", "taken", "by"]
        assert all("#4" in line for line in lines[2:6])
        assert "“" in lines[2]
    everything = EvictionsPanel()
    everything.first = 10**6
    async with shown(everything, state, 100, 300) as lines:
        assert len(lines) == 2 + state.pool.evictions
        assert any("#3" in line and "on the engine" in line for line in lines)


# ------------------------------------------------------------------------- throughput and the device


def test_rates_are_those_of_the_series() -> None:
    source = Rate(bucket=0.25)
    for i in range(8):
        source.add(0.1 + i * 0.25, 10)
    seconds, values = history(source, 2.0, 4)
    assert seconds == 4 * 2 * 0.25
    assert values.tolist()[:3] == [40.0, 40.0, 40.0]
    assert np.isnan(values[3])  # its first bucket has only begun
    assert np.isnan(history(source, 2.0, 80)[1][:40]).all()  # before the run
    assert history(source, 2.0, 0)[1].size == 0


async def test_throughput_has_two_axes() -> None:
    async with shown(ThroughputPanel(), played(scene()), 80, 12) as lines:
        assert lines[0].startswith("decode ")
        assert lines[6].startswith("prefill ")
        assert "total 9 " in lines[0]
        assert "tok/s" in lines[0]


async def test_the_device_splits_its_memory() -> None:
    state = played(scene())
    assert state.started is not None
    started = msgspec.structs.replace(
        state.started,
        capabilities=["blocks", "text", "timings", "device"],
        weights_bytes=256 << 20,
        bytes_per_block=1 << 20,
    )
    state.engine.started = started
    more(state, DeviceSample(util=50.0, memory=512 << 20, memory_total=1 << 30))
    more(state, DeviceSample(util=75.0, memory=512 << 20, memory_total=1 << 30))
    async with shown(DevicePanel(), state, 80, 14) as lines:
        assert lines[0].split() == ["use", "━" * 18 + "·" * 6, "75", "%"]
        assert lines[1].split() == ["memory", "━" * 12 + "·" * 12, "512", "MiB", "of", "1.0", "GiB"]
        assert lines[2].split() == ["of", "it", "█" * 12 + "▓" * 4 + "▒" * 8]
        assert " ".join(lines[3].split()) == "█ weights 256 MiB ▓ KV 81 MiB ▒ other 175 MiB"
        assert lines[4].split() == ["power", *NOT_HERE.split()]
        assert any(line.startswith("  100 %") for line in lines)
    more(state, DeviceSample(util=91.0, power=312.5, temperature=64.0))
    async with shown(DevicePanel(), state, 80, 14) as lines:
        assert "312 W" in "\n".join(lines)
        assert "64 °C" in "\n".join(lines)


# ------------------------------------------------------------------------------------------- words


async def test_events_are_told_with_their_numbers() -> None:
    state = played(scene())
    more(state, EngineError("bad \x1b[2Jthing", request_id=4))
    async with shown(EventLogPanel(), state, 120, 60) as lines:
        text = "\n".join(lines)
        assert "#1 queued, 1,005 tokens" in text
        assert "#1 admitted, nothing cached (first miss: never seen)" in text
        assert text.count("◆ #2 hit 62 blocks 1–62") == 1
        assert "#1 stored 62 blocks 1–62" in text
        assert "#1 finished: stop, 4 tokens, first after 600 ms" in text
        assert "× " in text
        assert "taken by #3" in text
        assert "error #4: bad ␛[2Jthing" in text


async def test_events_can_be_scrolled_back() -> None:
    state, panel = played(scene()), EventLogPanel()
    async with shown(panel, state, 100, 3):
        newest = panel.lines[-1]
        panel.action_scroll_by(-1_000_000)
        panel.paint(state, state.t)
        assert "#1 queued" in panel.lines[0]
        panel.action_scroll_by(1_000_000)
        panel.paint(state, state.t)
        assert panel.lines[-1] == newest


async def test_the_log_follows_its_end() -> None:
    captured = [f"line {i}" for i in range(50)]
    panel = LogPanel(captured)
    state = DashboardState()
    async with shown(panel, state, 40, 4):
        assert [line.strip() for line in panel.lines] == ["line 46", "line 47", "line 48", "line 49"]
        captured.append("ERROR \x1b[31mred")
        panel.paint(state, 0)
        assert panel.lines[-1].strip() == "ERROR ␛[31mred"
        panel.action_scroll_by(-10)
        panel.paint(state, 0)
        captured.append("more")
        panel.paint(state, 0)
        assert panel.lines[-1].strip() == "line 40"


def test_runs_of_blocks_read_both_ways() -> None:
    assert blocks([1, 2, 3, 7]) == "4 blocks 1–3, 7"
    assert blocks([9, 8, 7]) == "3 blocks 9–7"
    assert blocks([5]) == "1 block 5"
    assert blocks([1, 3, 5, 7, 9]) == "5 blocks 1, 3, 5, …"


def test_the_hit_rate_stands_until_the_next_lookup() -> None:
    got = steps_in_time(np.array([2.0, 6.0]), np.array([0.0, 50.0]), 10.0, 5)
    assert got.tolist() == [0, 0, 50, 50, 50]  # at t = 2, 4, 6, 8, 10
    assert np.isnan(steps_in_time(np.array([2.0]), np.array([0.0]), 10.0, 10)[0])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (duration(0.0004), "0.4 ms"),
        (duration(0.041), "41 ms"),
        (duration(0.9996), "1.00 s"),
        (duration(75), "75.0 s"),
        (duration(3725), "62 min"),
        (duration(None), "–"),
        (span(12.7), "12 s"),
        (span(7300), "2 h"),
        (size(201_326_592), "192 MiB"),
        (size(1_288_490_188), "1.2 GiB"),
        (size(0), "0 B"),
        (size(None), "–"),
        (percent(1999, 2000), "99 %"),
        (percent(0, 0), "–"),
        (percent(0, 5), "0 %"),
        (rate(61.3, "tok/s"), "61 tok/s"),
        (rate(0.4, "/s"), "0.4 /s"),
        (rate(None, "/s"), "–"),
        (count(1040), "1,040"),
        (count(None), "–"),
    ],
)
def test_units(text: str, wanted: str) -> None:
    assert text == wanted
