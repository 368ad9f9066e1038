"""The dashboard as a whole: sizes, views, focus, link, colours, freezing, and how it ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from textual import events
from textual.geometry import Offset, Region
from textual.selection import Selection

from engine.events import BlocksCopied, BlocksEvicted, EngineError, EngineStarted, Event, StepBatch
from kvtop.app.screens.main import Box
from kvtop.options import VIEWS
from kvtop.terminal.textual_door import shown_strips
from kvtop.widgets.base.lines import Lines
from tests.kvtop.screen import SIZES, show
from tests.kvtop.stage import Stage
from tests.kvtop.streams import rich_stream

PAGE = " ".join(f"w{i}" for i in range(990))


def story() -> Stage:
    """A page asked cold, then with another question: the second runs."""
    stage = Stage()
    stage.submit("Who was Ada Lovelace?", PAGE, answer="An English mathematician and writer.")
    stage.run(prefill=0.345)
    stage.t += 2
    stage.submit(
        "What did she publish?", PAGE, answer=" ".join(["In 1843 she published notes on the engine"] * 3)
    )
    stage.step(0.041)
    for _ in range(4):
        stage.step(0.016)
    return stage


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
async def test_every_view_at_every_size(size: tuple[int, int]) -> None:
    async with show(size, story().batches, view="chat") as shown:
        if size[0] >= 50 and size[1] >= 15:
            assert "READ 976 of 996" in shown.text
            assert "41 ms" in shown.text and "cold" in shown.text
        small = size[0] < 60 or size[1] < 20
        for n, view in enumerate(VIEWS):
            assert shown.app.main.view == ("chat" if small else VIEWS[n])
            shown.app.set_view(view)
            await shown.settle()
            assert len(shown.rows) == size[1]
            assert all(len(row) == size[0] for row in shown.rows)
            for widget in shown.app.main.query(Lines):
                assert not widget.size.height or len(widget.lines) <= widget.size.height
            shown.app.set_view("chat" if small else view)
            await shown.pilot.press("f2")
            await shown.settle()
        await shown.pilot.resize_terminal(1, 1)
        await shown.settle()
        assert len(shown.rows) == 1


async def test_the_one_thing() -> None:
    """The sentence, the strip and the map tell of the same hit."""
    async with show((100, 30), story().batches) as shown:
        rows = shown.rows
        sentence = "READ 976 of 996 tokens from cache · first word after 41 ms (#1, cold: 690 ms)"
        assert any(sentence in row for row in rows)
        main = shown.app.main
        assert main.strip.lines[0].startswith(" " + "◆" * 61 + "╎█")
        assert "61 read ╎ 2 computed" in main.strip.lines[0]
        assert "page.txt as in #1 → physical 1–61" in main.strip.lines[1]
        assert "╎ first miss: new text" in main.strip.lines[1]
        assert main.map.lines[0].startswith("◆" * 56) and main.map.lines[1].startswith("◆" * 5 + "▒")
        assert "read 976 · computed 20 · 41 ms   17×" in shown.text
        assert "cold · computed 996 tokens · 690 ms" in shown.text
        assert "545 blocks" in rows[0] and "1 running 0 waiting" in rows[0] and "hit 48 %" in rows[0]
        assert "next out" in main.step_line.lines[0] and "decode 1" in main.step_line.lines[0]
        assert main.step_line.lines[0].startswith(" step decode 1 ▏prefill – ▏unused █··")
        assert "· of 512   ITL ▃▃▃▃▃▃▃▃ p50 16 ms   next out" in main.step_line.lines[0]


async def test_a_step_line_without_running_requests_is_of_the_last_step() -> None:
    stage = story()
    stage.run()
    async with show((120, 40), stage.batches) as shown:
        assert shown.app.main.step_line.lines[0].startswith(" last step decode 1 ▏prefill – ▏unused █··")


async def test_log_and_details_leave_no_panel_without_rows() -> None:
    for size in ((100, 30), (120, 40), (80, 24)):
        async with show(size, story().batches) as shown:
            main = shown.app.main
            main.select(5)
            await shown.pilot.press("f4")
            await shown.settle()
            boxes = [box for box in main.query(Box) if box.display and box.parent.display]
            assert {"detail-box", "log-box", "map-box"} <= {box.id for box in boxes}
            assert all(box.widget.size.height for box in boxes), [
                b.id for b in boxes if not b.widget.size.height
            ]


async def test_ops_shows_several_requests_on_a_small_terminal() -> None:
    stage = story()
    for n in range(6):
        stage.submit(f"question {n}?", PAGE)
    stage.step()
    async with show((100, 30), stage.batches, view="ops") as shown:
        assert sum("#" in line for line in shown.app.main.queues.lines) >= 4


async def test_all_blocks_have_a_cell_from_100x30_on() -> None:
    async with show((100, 30), story().batches, view="chat") as shown:
        for size in ((100, 30), (120, 40), (200, 60)):
            await shown.pilot.resize_terminal(*size)
            await shown.settle()
            assert shown.app.main.map.projection.mode == "cells", size
            assert shown.app.main.query_one("#map-box").border_title.startswith("KV pool · 1 cell = 1")
        await shown.pilot.resize_terminal(80, 24)
        await shown.settle()
        assert shown.app.main.query_one("#map-box").border_title == "KV pool · 2 blocks a cell = 32 tokens"


async def test_200x60_starts_with_everything() -> None:
    async with show((200, 60), story().batches) as shown:
        assert shown.app.main.view == "all"
    async with show((199, 60), story().batches) as shown:
        assert shown.app.main.view == "chat"
        await shown.pilot.press("f2")
        await shown.settle()
        assert shown.app.main.view == "ops" and "queues" in shown.text and "TTFT" in shown.text
        await shown.pilot.press("f2", "f2")
        assert shown.app.main.view == "chat"


async def test_replay_starts_in_key_mode_without_a_prompt() -> None:
    async with show((100, 30), story().batches) as shown:
        assert not shown.app.main.typing
        assert "Enter send" not in shown.text and "space play" in shown.rows[-1]
        await shown.pilot.press("i", "x", "enter")
        assert shown.app.main.prompt.value == ""
        await shown.pilot.press("q")
        await shown.pilot.pause()
        assert shown.app.return_code == 0


async def test_pointing_lights_the_other_two() -> None:
    async with show((100, 30), story().batches) as shown:
        main, pilot = shown.app.main, shown.pilot
        await pilot.hover("#strip", offset=(3, 0))
        await shown.settle()
        assert main.map.link == main.chat.link == {3}
        assert "block 3 · active" in str(main.query_one("#map-box").border_subtitle)
        await pilot.hover("#map", offset=(9, 1))
        await shown.settle()
        lit = {56 + 10}
        assert main.strip.link == main.chat.link == lit
        await pilot.click("#strip", offset=(1, 0))
        await shown.settle()
        assert main.selected == 1 and main.map.selected == 1 and main.detail.display
        styles = {s.style for s in main.strip._strips[0] if s.text.startswith("◆")}
        assert len(styles) == 2, "one cell of the strip looks different"


async def test_text_points_at_its_blocks() -> None:
    async with show((100, 30), story().batches) as shown:
        main = shown.app.main
        y = next(i for i, line in enumerate(main.chat.lines) if "What did she publish?" in line)
        await shown.pilot.hover("#chat", offset=(6, y))
        await shown.settle()
        state = shown.app.state
        assert main.map.link == {state.table(2)[990 // 16]}
        await shown.pilot.press("escape")
        block = state.table(2)[62]
        main.select(block)
        await shown.settle()
        answer = next(s for s in main.chat._strips if "In 1843" in s.text)
        assert len({s.style.bgcolor for s in answer}) == 2, "the tokens of that block stand out"


async def test_a_page_unfolds_with_its_gutter() -> None:
    async with show((100, 50), story().batches) as shown:
        chat = shown.app.main.chat
        assert "w500" not in shown.text
        shown.app.main.set_focus(chat)
        await shown.pilot.press("e")
        await shown.settle()
        await shown.pilot.press("home")
        await shown.settle()
        assert "w5 " in shown.text
        chat.back = 0
        gutter = [line[2] for line in chat.lines if line[3:4] == "w"]
        assert set(gutter) <= {"▌", "│"} and "▌" in gutter


async def test_the_chat_goes_back_to_its_first_line_and_says_how_far_that_is() -> None:
    async with show((100, 30), story().batches) as shown:
        chat = shown.app.main.chat
        chat.fold(1)  # longer than the panel
        shown.app.paint()
        chat.action_scroll_lines(1_000_000)
        shown.app.paint()
        assert 0 < chat.back < 1000 and chat.lines[0].startswith("#1 ")
        assert f" {chat.back} lines back" in shown.app.main.chat_box.border_title


async def test_no_color_sends_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with show((100, 30), story().batches) as shown:
        console, sent = shown.app.console, []
        for strip in shown_strips(shown.app):
            sent.append(strip.render(console))
        text = "".join(sent)
        assert "38;" not in text and "48;" not in text
        assert shown.app.theme == "ansi" and shown.app.palette.colourless
        assert shown.app.main.map.lines[0].startswith("◆")
        await shown.pilot.resize_terminal(80, 24)
        await shown.settle()
        assert "▀" not in shown.text, "two states in one cell cannot be told apart without colour"


async def test_themes_switch_live() -> None:
    async with show((100, 30), story().batches) as shown:
        for theme in ("kvtop-light", "mono", "ansi", "nord", "kvtop-dark"):
            before = shown.app.main.map._strips[0]
            shown.app.theme = theme
            await shown.settle()
            after = shown.app.main.map._strips[0]
            assert after is not before and after.text == before.text
            assert [s.style for s in after] != [s.style for s in before]


async def test_ctrl_t_goes_through_our_themes() -> None:
    async with show((100, 30), story().batches) as shown:
        names = []
        for _ in range(4):
            await shown.pilot.press("ctrl+t")
            names.append(shown.app.theme)
        assert set(names) == {"kvtop-dark", "kvtop-light", "mono", "ansi"}


async def test_help_opens_and_closes() -> None:
    async with show((100, 30), story().batches) as shown:
        await shown.pilot.press("f1")
        await shown.settle()
        assert "How to read the map" in shown.text
        await shown.pilot.press("escape")
        await shown.settle()
        assert "KV pool" in shown.text


async def test_palette_offers_what_works() -> None:
    async with show((100, 30), story().batches) as shown:
        titles = [c.title for c in shown.app.get_system_commands(shown.app.screen)]
        assert "View ops" in titles and "Theme kvtop-light" in titles and "Slow motion" not in titles


async def test_nothing_is_painted_while_nothing_happens() -> None:
    async with show((100, 30), story().batches) as shown:
        shown.wall += 20
        shown.app.tick()
        frames = shown.app.frames
        for _ in range(20):
            shown.wall += 0.1
            shown.app.tick()
        assert shown.app.frames == frames


async def test_motion_sweeps_within_400_ms() -> None:
    stage = Stage()
    stage.submit("Who?", PAGE, answer="An English mathematician.")
    stage.run()
    n = len(stage.batches)
    stage.submit("What?", PAGE, answer=" ".join("abcdefghij"))
    stage.step(0.041)
    async with show((100, 30), stage.batches[:n]) as shown:
        shown.feed.queue += stage.batches[n:]
        app, lit = shown.app, []
        for _ in range(14):
            app.tick()
            lit.append(app.main.strip.lines[0].count("◆"))
            assert app.motion.moving == app._fast._active.is_set(), "frames are fast while it sweeps"
            shown.wall += 1 / 30
        assert lit[0] < 10 and lit == sorted(lit) and lit[12] == 61
        assert "╎" not in app.main.strip.lines[0][:60] or lit[-1] == 61
        shown.wall += 0.5
        app.tick()
        assert not app.motion.moving and not app._fast._active.is_set()


async def test_no_motion_stands_still() -> None:
    stage = story()
    n = len(stage.batches) - 5
    async with show((100, 30), stage.batches[:n], motion=False) as shown:
        shown.feed.queue += stage.batches[n:]
        shown.app.tick()
        assert shown.app.main.strip.lines[0].count("◆") == 61 and not shown.app.motion.moving


async def test_selection_ages_but_nothing_else_moves() -> None:
    async with show((100, 30), story().batches) as shown:
        shown.app.main.select(5)
        await shown.settle()
        shown.wall += 10
        frames = shown.app.frames
        for _ in range(20):
            shown.wall += 0.1
            shown.app.tick()
        assert 1 <= shown.app.frames - frames <= 3


async def test_engine_errors_are_seen() -> None:
    stage = story()
    last = stage.batches[-1]
    error = StepBatch(
        last.seq + 1,
        last.t,
        last.step,
        last.first_event + len(last.events),
        [EngineError("out of memory in layer 3", fatal=True)],
    )
    async with show((100, 30), [*stage.batches, error], notifications=True) as shown:
        assert "FAILED" in shown.rows[0]
        await shown.settle()
        assert "out of memory in layer 3" in shown.text


async def test_ctrl_c_copies_a_selection_else_asks_and_quits_with_130() -> None:
    async with show((100, 30), story().batches, notifications=True) as shown:
        chat = shown.app.main.chat
        y = next(i for i, line in enumerate(chat.lines) if "What did she publish?" in line)
        await shown.pilot.mouse_down("#chat", offset=(3, y))
        await shown.pilot.hover("#chat", offset=(11, y))
        await shown.pilot.mouse_up("#chat", offset=(11, y))
        await shown.pilot.press("ctrl+c")
        assert shown.app.clipboard.startswith("What did") and shown.app.return_code is None
        await shown.pilot.press("ctrl+c")
        await shown.settle()
        assert shown.app.return_code is None and "ctrl+c again quits" in shown.text
        shown.wall += 5  # too late
        await shown.pilot.press("ctrl+c")
        await shown.pilot.pause()
        assert shown.app.return_code is None
        await shown.pilot.press("ctrl+c")
        await shown.pilot.pause()
        assert shown.app.return_code == 130


async def test_keys_in_one_read_act_as_one_by_one() -> None:
    """Walking, folding, help and back: each key sees what the one before it did."""
    keys = [
        *["right"] * 4,
        "down",
        "left",
        "escape",
        "right",
        "tab",
        "e",
        "home",
        "f1",
        "down",
        "escape",
        "f2",
    ]
    async with show((120, 40), story().batches) as one, show((120, 40), story().batches) as burst:
        for key in keys:
            await one.pilot.press(key)
            await one.pilot.pause()
        for key in keys:
            burst.app.post_message(events.Key(key, None))
        for _ in range(10):
            await burst.pilot.pause(0.02)
        for n in range(4):  # and four at once of what was walked by one
            one.app.main.select(7 + n)
        burst.app.main.select(10)
        for shown in (one, burst):
            await shown.settle()
        assert one.app.main.selected == burst.app.main.selected == 10
        assert one.app.main.view == burst.app.main.view == "ops"
        assert one.app.main.chat.unfolded == burst.app.main.chat.unfolded
        assert one.text == burst.text


@pytest.mark.parametrize("focus", ["map", "strip"])
@pytest.mark.parametrize("times", [2, 4, 9])
async def test_a_walk_in_one_read_goes_as_far_as_one_by_one(focus: str, times: int) -> None:
    async with show((120, 40), story().batches) as shown:
        main = shown.app.main
        walked: list[int | None] = []
        for burst in (False, True):
            main.select(None)
            main.set_focus(getattr(main, focus))
            await shown.settle()
            for _ in range(times):
                shown.app.post_message(events.Key("right", None))
                if not burst:
                    await shown.pilot.pause()
            await shown.pilot.pause(0.2)
            walked.append(main.selected)
        assert walked[0] == walked[1] is not None


async def test_a_click_on_quit_asks_first() -> None:
    async with show((120, 40), story().batches, notifications=True) as shown:
        row = shown.rows[-1]
        for answer in (None, 0):
            await shown.pilot.click("#keys", offset=(row.index("q quit"), 0))
            await shown.settle()
            assert shown.app.return_code == answer
            assert answer == 0 or "another click quits, and so does ctrl+q" in shown.text


async def test_ctrl_c_closes_help_and_the_palette() -> None:
    async with show((120, 40), story().batches) as shown:
        for opens in ("f1", "ctrl+p"):
            await shown.pilot.press(opens)
            await shown.pilot.pause(0.1)
            assert shown.app.screen is not shown.app.main
            await shown.pilot.press("ctrl+c", "ctrl+c")
            await shown.pilot.pause(0.1)
            assert shown.app.screen is shown.app.main and shown.app.return_code is None
            shown.wall += 5


async def test_hostile_text_cannot_act() -> None:
    stage = Stage()
    stage.submit(
        "evil \x1b[2J \u202e text",
        "page \x07\x1b]0;x\x07 words " * 20,
        name="a\x1b[31mb.txt",
        answer="\x1b[H ok",
    )
    stage.run()
    async with show((100, 30), stage.batches) as shown:
        shown.app.main.chat.unfolded.add(1)
        await shown.settle()
        assert not any(c in shown.text for c in "\x1b\x07\u202e")
        assert "␛[2J" in shown.text


async def test_leaves_cleanly_while_painting() -> None:
    async with show((100, 30), story().batches) as shown:
        shown.app.exit()
        shown.app.tick()
        await asyncio.sleep(0)


async def test_a_copy_is_told_and_marked() -> None:
    """Source and copy stand out, and the line under the map names both."""
    batches = rich_stream()
    async with show((100, 30)) as shown:
        for batch in batches:
            shown.apply([batch], after=0.0)
            copies = [e for e in batch.events if isinstance(e, BlocksCopied)]
            shown.wall += 0.1
            if copies:
                e = copies[-1]
                map_ = shown.app.main.map
                assert f"{e.src}→{e.dst}" in str(shown.app.main.query_one("#map-box").border_subtitle)
                row, column = divmod(e.dst - 1, map_.projection.columns)
                x = column * map_.projection.pitch
                copy = map_._strips[row * map_.projection.rise].crop(x, x + 1)
                assert copy._segments[0].style.bgcolor == shown.app.palette.on("copy").bgcolor
                return
    raise AssertionError("the stream has a copy")


async def test_an_eviction_is_told_under_the_map() -> None:
    stage = Stage(num_blocks=41)
    for text in ("a", "b"):
        stage.submit("why?", " ".join(f"{text}{i}" for i in range(400)))
        stage.run()
    last = next(i for i, b in enumerate(stage.batches) if any(isinstance(e, BlocksEvicted) for e in b.events))
    async with show((120, 40), stage.batches[: last + 1]) as shown:
        told = str(shown.app.main.query_one("#map-box").border_subtitle)
        assert told.startswith("×") and "evicted" in told and "taken by #2" in told


async def test_a_title_draws_its_row_of_the_frame_only_and_is_no_markup() -> None:
    async with show((100, 30), story().batches) as shown:
        box = shown.app.main.map_box
        box.widget.__class__ = type("Named", (type(box.widget),), {"title": "a [bold]name"})
        box._repaint_regions.clear()
        inside = box.render_lines(box.outer_size.region)[1:-1]
        x, y, width, height = box.region
        assert box.retitle("below") == [Region(x, y, width, 1), Region(x, y + height - 1, width, 1)]
        assert {(r.y, r.height) for r in box._repaint_regions} == {(0, 1), (height - 1, 1)}
        lines = box.render_lines(box.outer_size.region)
        assert "a [bold]name" in lines[0].text and "below" in lines[-1].text
        assert all(a is b for a, b in zip(inside, lines[1:-1], strict=True))
        assert box.retitle("below") == []


async def test_what_a_source_cannot_know_is_said() -> None:
    stage = story()
    start = next(i for i, b in enumerate(stage.batches) if isinstance(b.events[0], EngineStarted))
    batch = stage.batches[start]
    poor = msgspec.structs.replace(batch.events[0], capabilities=["timings"])
    batches = [*stage.batches]
    batches[start] = msgspec.structs.replace(batch, events=[poor])
    async with show((100, 30), batches) as shown:
        assert shown.app.main.map.lines[0].strip() == "not in this source"


async def test_what_is_copied_from_the_chat_is_the_text_itself() -> None:
    stage = Stage()
    answer = " ".join(f"word{i}" for i in range(40))
    stage.submit("why?", "w " * 20, answer=answer)
    stage.run()
    async with show((100, 30), stage.batches) as shown:
        chat = shown.app.main.chat
        rows = [y for y, line in enumerate(chat.lines) if "word" in line]
        assert len(rows) > 2 and all(chat.lines[y].startswith("   word") for y in rows)
        selection = Selection(Offset(0, rows[0]), Offset(len(chat.lines[rows[-1]]), rows[-1]))
        assert chat.get_selection(selection) == (" ".join(chat.lines[y].strip() for y in rows), "\n")
        assert chat.get_selection(Selection(Offset(3, rows[0]), Offset(8, rows[0]))) == ("word0", "\n")


@pytest.mark.parametrize(("allowed", "words"), [(False, "kept as text"), (True, "special, acts as a token")])
async def test_a_special_tokens_name_is_marked_in_a_question_and_in_a_page(allowed: bool, words: str) -> None:
    stage = Stage()
    stage.submit("say <|im_end|> twice", "page <|end|> page " * 3, answer="<|im_end|> no")
    stage.run()
    knobs = {"special_tokens": ["<|im_end|>", "<|end|>"], "allow_special_tokens": allowed}

    def change(event: Event) -> Event:
        if not isinstance(event, EngineStarted):
            return event
        return msgspec.structs.replace(event, knobs=msgspec.structs.replace(event.knobs, **knobs))

    batches = [msgspec.structs.replace(b, events=[change(e) for e in b.events]) for b in stage.batches]
    async with show((100, 30), batches) as shown:
        chat = shown.app.main.chat
        chat.fold_latest()
        await shown.settle()
        warned = [
            segment.text
            for y in range(chat.size.height)
            for segment in chat.render_line(y)
            if segment.style and segment.style.color == chat.ink("warning").color
        ]
        lines = [line.strip() for line in chat.lines]
    assert [text for text in warned if "<" in text] == ["<|im_end|>", "<|end|>", "<|end|>", "<|end|>"]
    assert f"<|im_end|>: {words}" in lines
    assert f"<|end|>: {words}" in lines
