"""The dashboard over a running engine (a toy one): prompts, examples, freezing, slow motion, and the ends."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from textual import events

from engine import Engine, EngineConfig, SetupError
from kvtop.app.app import KvtopApp
from kvtop.options import Options
from kvtop.play.session import Session
from kvtop.sources import LiveSource
from kvtop.terminal.textual_door import shown_strips
from tests.demos.toy import build


class Live:
    """A dashboard over an engine that really runs."""

    def __init__(self, options: Options, make: Any) -> None:
        self.engine = Engine(EngineConfig(), build=make, device_interval=0)
        self.app = KvtopApp(Session(LiveSource(self.engine), options, self.engine))

    async def until(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait for the engine's thread."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it did not happen"
            await asyncio.sleep(0.01)
            self.app.tick()

    async def finished(self, *ids: int) -> None:
        """These requests are done and on the screen."""
        requests = self.app.state.requests
        await self.until(lambda: all(i in requests and requests[i].done for i in ids))
        await self.pilot.pause()

    @property
    def hint(self) -> str:
        """The line under the prompt."""
        return self.app.main.hint.lines[0]


@asynccontextmanager
async def live(size: tuple[int, int] = (120, 40), make: Any = build, **options: Any) -> AsyncIterator[Live]:
    """Started, with the first frame painted."""
    shown = Live(Options(**options), make)
    async with shown.app.run_test(size=size) as pilot:
        shown.pilot = pilot
        try:
            if make is build:
                await shown.until(lambda: shown.app.state.started is not None)
                await pilot.pause()
                shown.app.paint()
            yield shown
        finally:
            await asyncio.to_thread(shown.engine.stop)


async def test_typing_types_and_keys_act_only_in_key_mode() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot
        assert app.main.typing and "Esc keys" in app.main.key_line.lines[0]
        await pilot.press("q", "i", "space", "x", "s", "full_stop", "L", "question_mark")
        assert app.main.prompt.value == "qi xs.L?" and app.return_code is None and not app.session.frozen
        await pilot.press("escape")
        await pilot.pause()
        app.paint()
        assert not app.main.typing and app.main.key_line.lines[0].startswith(" i prompt   space freeze")
        await pilot.press("space")
        assert app.session.frozen and app.main.prompt.value == "qi xs.L?"
        await pilot.press("space", "i")
        assert not app.session.frozen and app.main.typing
        await pilot.press("escape", "enter")
        assert app.main.typing
        await pilot.press("escape", "q")
        await pilot.pause()
        assert app.return_code == 0


async def test_ctrl_q_quits_from_the_prompt() -> None:
    async with live() as shown:
        await shown.pilot.press("a", "ctrl+q")
        await shown.pilot.pause()
        assert shown.app.return_code == 0


async def test_ctrl_c_clears_the_prompt_then_aborts_then_asks() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot
        await pilot.press("escape", "full_stop", "i")  # the engine stands still
        await pilot.press(*"why?", "enter", *"half")
        await pilot.press("ctrl+c")
        assert app.main.prompt.value == ""
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert "the answer is aborted" in shown.hint and app.return_code is None
        await pilot.press("f3")
        await shown.finished(1)
        assert app.state.requests[1].finish_reason == "abort"
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert "ctrl+c again quits" in shown.hint and app.return_code is None
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert app.return_code == 130


async def test_what_was_pasted_is_shown_by_symbols_and_sent_as_it_is() -> None:
    text = "a\u009b31mb\u009dc\u202ed\u2067e\u200bf\u200dg\ufe0f"
    async with live(size=(100, 30)) as shown:
        app, pilot, sent = shown.app, shown.pilot, list[str]()
        app.session.composer.send = sent.append
        app.post_message(events.Paste(text + "漢x"))
        await pilot.pause()
        line = next(row for row in (strip.text for strip in shown_strips(app)) if row.startswith("› "))
        assert line.rstrip() == "› a␦31mb␦c⇄d⇄e␢f␢g␢漢x"
        assert app.main.prompt.cursor_screen_offset.x == 2 + 20 + 1  # Textual counts one more at the end
        await pilot.press("left", "left")
        assert app.main.prompt.cursor_screen_offset.x == 2 + 17
        await pilot.click("#prompt", offset=(15, 0))
        assert app.main.prompt.cursor_position == 15
        await pilot.press("enter")
        assert sent == [text + "漢x"]
        await pilot.press("ctrl+p")
        await pilot.pause(0.1)
        app.post_message(events.Paste(text))
        await pilot.pause(0.1)
        assert "a␦31mb␦c⇄d⇄e␢f␢g␢" in "\n".join(strip.text for strip in shown_strips(app))


async def test_enter_goes_through_the_examples() -> None:
    """Five Enters, as fast as they come: each example waits for the one before."""
    async with live() as shown:
        app = shown.app
        assert "Enter sends example 1 of 5: a question about a page of 1,000 tokens" in shown.hint
        assert "first eviction in 545 blocks" in shown.hint
        await shown.pilot.press(*["enter"] * 5)
        await shown.finished(*range(1, 13))
        views = app.state.requests
        assert [views[i].hit_blocks > 40 for i in (1, 2, 3)] == [False, True, False]
        assert views[3].hit_blocks == 0 and views[3].explanation.first_miss_block == 0
        assert {views[i].conversation for i in range(4, 12)} and len(
            {views[i].conversation for i in views}
        ) == 12
        assert app.state.pool.evictions > 0
        last = views[12]
        assert last.prompt_token_ids == views[1].prompt_token_ids and last.hit_blocks < views[2].hit_blocks
        app.paint()
        assert "Enter sends example 1 of 5" in shown.hint and "evicted so far" in shown.hint


async def test_a_conversation_goes_on_and_a_new_one_starts_anew() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot
        await pilot.press(*"hello", "enter")
        await shown.finished(1)
        await pilot.press(*"more", "enter")
        await shown.finished(2)
        await pilot.press("ctrl+n", *"new", "enter")
        await shown.finished(3)
        views = app.state.requests
        assert views[1].conversation == views[2].conversation != views[3].conversation
        first = views[1].prompt_token_ids
        assert views[2].prompt_token_ids[: len(first)] == first
        await pilot.press("up", "up")
        assert app.main.prompt.value == "more"
        await pilot.press("down", "down")
        assert app.main.prompt.value == ""


async def test_a_burst_of_keys_acts_in_order() -> None:
    """Nothing waits between the keys: each Enter sends what stood there when it was pressed."""
    async with live() as shown:
        sent: list[str] = []
        shown.app.session.composer.send = sent.append
        keys = [*"Say A", "x", "backspace", "enter", *"Say Bed", "left", "left", "r", "enter", "up", "enter"]
        for key in keys:
            shown.app.post_message(events.Key("space" if key == " " else key, key if len(key) == 1 else None))
        await shown.pilot.pause()
        assert sent == ["Say A", "Say Bred", "Say Bred"] and shown.app.main.prompt.value == ""


async def test_typed_prompts_go_on_with_the_attached_page_only() -> None:
    """Which conversation a typed prompt continues is what title and hint say."""
    async with live() as shown:
        app, pilot = shown.app, shown.pilot

        async def typed(text: str) -> tuple[str, str]:
            await pilot.press(*text)
            app.paint()
            reported = app.main.chat.title, shown.hint.strip()
            await pilot.press("enter")
            return reported

        await pilot.press("enter")
        await shown.finished(1)
        title, hint = await typed("and then")
        assert title == "chat · page.txt attached" and hint.startswith(
            "Enter continues page.txt · ctrl+n starts anew"
        )
        await shown.finished(2)
        views = app.state.requests
        assert views[2].hit_blocks > 40 and views[2].conversation == views[1].conversation
        await pilot.press("x", "ctrl+u", "ctrl+n")
        await pilot.pause()
        assert app.main.chat.title == "chat · new conversation"
        assert shown.hint.strip().startswith("a new conversation: the next prompt starts anew")
        title, hint = await typed("mine")
        assert hint.startswith("Enter starts a new conversation")
        await shown.finished(3)
        assert views[3].conversation not in (views[1].conversation, None)
        app.paint()
        assert app.main.chat.title == "chat"
        await pilot.press("enter", "enter", "enter")  # two more on the page, then eight others
        await shown.finished(*range(4, 14))
        title, hint = await typed("mine again")
        assert title == "chat" and hint.startswith("Enter goes on with this conversation ")
        await shown.finished(14)
        assert views[14].conversation == views[3].conversation


async def test_turns_that_wait_are_seen_and_counted() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot
        await pilot.press("escape", "full_stop")
        await shown.until(lambda: shown.engine._paused and not shown.engine._single_steps)
        for text in ("one", "two", "three"):
            app.session.composer.send(text)
        app.session.composer.new_conversation()
        app.session.composer.send("four")
        await shown.until(lambda: 4 in app.state.requests)
        app.paint()
        await pilot.pause()
        assert sorted(app.state.requests) == [1, 4]
        reported = [line.rstrip() for line in app.main.chat.lines if line.strip()]
        assert reported == [
            *("#1 one", "   waiting"),
            *("#2 two", "   waiting for the turn before, #1"),
            *("#3 three", "   waiting for the turn before, #2"),
            *("#4 four", "   waiting"),
        ]
        assert "0 running 4 waiting" in app.main.header.lines[0]
        await pilot.press("f2")
        await pilot.pause()
        app.paint()
        assert app.main.queues.lines[0].startswith("0 running   4 waiting")
        await pilot.press("f3")
        await shown.finished(1, 2, 3, 4)
        assert not app.session.composer.sent(app.state)


async def test_the_hint_tells_what_the_cache_holds() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot

        def why() -> str:
            app.paint()
            return app.session.composer.next_enter("").why

        assert why() == "nothing of it is cached yet: every block of the prompt is computed"
        await pilot.press(*["enter"] * 4)
        await shown.finished(*range(1, 12))
        hashes = app.state.requests[1].lookup_hashes
        left = sum(bool(app.state.pool.find(h)) for h in hashes)
        assert left < len(hashes)
        if left:
            assert (
                why() == f"{left} of its {len(hashes)} full blocks are still cached; the others were evicted"
            )
        else:
            assert why().startswith("its blocks now hold other pages")
        await pilot.press("enter")
        await shown.finished(12)
        assert re.fullmatch(
            r"all its \d+ full blocks are cached: they are read, and only the end is computed", why()
        )
        shown.engine.reset_prefix_cache()
        await shown.until(lambda: app.state.pool.num_hashes == 0)
        assert why() == "its blocks were evicted since: all of it is computed again"


async def test_the_hint_is_whole_at_100_columns() -> None:
    async with live(size=(100, 30)) as shown:
        first, second = shown.app.main.hint.lines
        assert first.strip() == "Enter sends example 1 of 5: a question about a page of 1,000 tokens"
        assert second.startswith("  nothing of it is cached yet: every block of the prompt is computed ")
        assert second.rstrip().endswith("  first eviction in 545 blocks")


async def test_the_hint_is_whole_at_80_columns() -> None:
    async with live(size=(80, 24)) as shown:
        (line,) = shown.app.main.hint.lines
        assert line.strip() == "Enter sends example 1 of 5: a question about a page of 1,000 tokens"


async def test_a_full_conversation_recommends_a_new_one() -> None:
    async with live() as shown:
        app = shown.app
        app.session.composer.send("word " * 480)
        await shown.finished(1)
        view, limit = app.state.requests[1], app.state.started.max_model_len
        assert view.finish_reason == "refused" or view.prompt_tokens < limit
        reported = app.session.composer.next_enter("more").says
        view.prompt_tokens = limit - view.num_output - 1
        assert reported == "Enter goes on with this conversation"
        assert (
            app.session.composer.next_enter("more").says
            == "this conversation is nearly full · ctrl+n starts a new one"
        )
        view.finish_reason = "refused"
        assert (
            app.session.composer.next_enter("more").says
            == "this conversation is full · ctrl+n starts a new one"
        )


async def test_freezing_keeps_what_comes() -> None:
    async with live() as shown:
        app = shown.app
        await shown.pilot.press("escape", "space")
        app.session.composer.send("hello")
        await shown.until(lambda: not shown.engine._inbox and not shown.engine._live().has_work)
        await asyncio.sleep(0.05)
        app.tick()
        assert app.session.state.requests, "it goes on behind the screen"
        app.paint()
        assert not app.state.requests and any(b.text == "FROZEN" for b in app.main.header.badges)
        assert "frozen" in shown.hint
        assert app.main.chat.lines[0].startswith("#1 hello"), (
            "what was asked is not taken off the screen again"
        )
        assert "1 waiting" in app.main.header.lines[0]
        await shown.pilot.press("space")
        await shown.finished(1)


async def test_the_last_lines_tell_the_mode_while_nothing_else_moves() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot

        async def line() -> str:
            await pilot.pause()
            await pilot.pause()  # the frame that the first one asked for
            return app.main.key_line.lines[0]

        await pilot.press("escape", "space")
        assert "space catches up" in shown.hint and (await line()).startswith(" i prompt   space go on")
        app.tick = lambda: None  # type: ignore[method-assign]  # no frame by the clock
        await pilot.press("i")
        assert (await line()).startswith(" Esc keys") and "Esc, then space catches up" in shown.hint
        await pilot.press("escape")
        assert (await line()).startswith(" i prompt   space go on")


async def test_a_frozen_display_counts_what_is_sent_alike_everywhere() -> None:
    async with live(view="ops") as shown:
        app, pilot = shown.app, shown.pilot
        await pilot.press("escape", "full_stop")  # nothing that is sent arrives
        await shown.until(lambda: shown.engine._paused and not shown.engine._single_steps)
        await pilot.press("space")
        for sent in (1, 2):
            app.session.composer.send("hello")
            app.paint()
            assert f"{sent} waiting" in app.main.header.lines[0]
            assert f"{sent} waiting" in app.main.queues.lines[0]


async def test_a_single_step_is_shown_although_the_display_was_frozen() -> None:
    async with live() as shown:
        app = shown.app
        await shown.pilot.press("escape", "space")
        assert app.session.frozen
        await shown.pilot.press("full_stop")
        assert app.session.stepping and not app.session.frozen
        app.session.composer.send("hello")
        await shown.until(lambda: 1 in app.state.requests)


async def test_where_other_views_do_not_fit_their_key_is_not_offered() -> None:
    async with live(size=(50, 15)) as shown:
        app = shown.app
        assert "F2" not in app.main.key_line.lines[0] and "F1 help" in app.main.key_line.lines[0]
        await shown.pilot.press("f2")
        await shown.pilot.pause()
        assert app.main.view == "chat" and "the other views need 60 × 12 cells" in shown.hint


async def test_e_unfolds_from_anywhere_in_key_mode() -> None:
    async with live() as shown:
        app, pilot = shown.app, shown.pilot
        await pilot.press("escape", "e")
        await pilot.pause()
        assert shown.hint.strip().startswith("nothing in view can be unfolded")
        await pilot.press("i", "enter")
        await shown.finished(1)
        await pilot.press("escape")
        assert app.focused is app.main.map
        await pilot.press("e")
        assert app.main.chat.unfolded == {1}
        await pilot.press("f2", "e")
        await pilot.pause()
        assert shown.hint.strip().startswith("the chat is not in this view")


async def test_slow_motion_and_single_steps() -> None:
    async with live() as shown:
        app = shown.app
        await shown.pilot.press("f3")
        app.paint()
        assert any(b.text.startswith("SLOW") for b in app.main.header.badges)
        await shown.pilot.press("f3", "escape", "full_stop")
        assert app.session.stepping and app.session.slow == 0
        await shown.until(lambda: shown.engine._paused and not shown.engine._single_steps)
        app.session.composer.send("hello")
        await shown.until(lambda: 1 in app.state.requests)
        step = app.state.stream.step
        await shown.pilot.press("full_stop")
        await shown.until(lambda: app.state.stream.step == step + 1)
        app.paint()
        assert "stands still" in shown.hint and "F3 run on" in app.main.key_line.lines[0]
        await shown.pilot.press("f3")
        await shown.finished(1)
        assert not app.session.stepping


async def test_prompts_of_the_start_run_at_once() -> None:
    async with live(prompts=("one", "two", "three")) as shown:
        await shown.finished(1, 2, 3)
        assert len({v.conversation for v in shown.app.state.requests.values()}) == 3


async def test_loading_shows_progress() -> None:
    seen = threading.Event()

    def slow(config: EngineConfig, progress: Any) -> Any:
        progress(30, 100, "reading weights")
        seen.wait(20)
        return build(config, progress)

    async with live(make=slow) as shown:
        await shown.until(lambda: any("reading weights" in line for line in shown.app.main.chat.lines))
        chat = "\n".join(shown.app.main.chat.lines)
        assert " 30 %" in chat and "████" in chat
        assert any(b.text == "LOADING" for b in shown.app.main.header.badges)
        seen.set()
        await shown.until(lambda: shown.app.state.started is not None)


async def test_a_start_that_fails_is_one_line_and_exit_2() -> None:
    def broken(config: EngineConfig, progress: Any) -> Any:
        raise SetupError("no such model; try --model Qwen/Qwen3-0.6B")

    async with live(make=broken) as shown:
        await shown.until(lambda: shown.app.failure is not None)
        assert shown.app.failure == "no such model; try --model Qwen/Qwen3-0.6B"
        assert shown.app.return_code == 2


async def test_x_aborts_what_runs() -> None:
    async with live() as shown:
        app = shown.app
        await shown.pilot.press("escape", "full_stop")
        app.session.composer.send("hello")
        await shown.until(lambda: 1 in app.state.requests)
        await shown.pilot.press("full_stop")
        await shown.until(lambda: bool(app.state.requests.running))
        await shown.pilot.press("x")
        await shown.finished(1)
        assert app.state.requests[1].finish_reason == "abort"
        app.paint()
        assert "aborted" in "\n".join(app.main.chat.lines)


@pytest.mark.parametrize("name", ["cache-hit", "eviction"])
async def test_a_demo_plays_with_captions(name: str) -> None:
    from kvtop.play import demo

    scene = demo.load(name)
    shown = Live(Options(demo=scene), build)
    shown.engine.config = scene.config(shown.engine.config)
    async with shown.app.run_test(size=(120, 40)) as pilot:
        shown.pilot = pilot
        app = shown.app
        try:
            assert not app.main.typing
            await shown.until(lambda: app.state.started is not None)
            app.paint()
            if name == "cache-hit":
                assert app.session.play.stage.warming and not app.state.requests
                assert "The engine warms up first" in " ".join(app.main.caption.lines)
            await shown.until(lambda: app.session.play is not None and app.session.play.waiting)
            app.paint()
            await pilot.pause()
            assert app.main.caption.display and app.main.caption.lines
            assert not app.state.requests and app.state.cache.hit_rate() is None, (
                "a warm-up is no part of the scene"
            )
            assert app.state.pool.free == app.state.num_blocks - 1
            assert "five examples" not in "\n".join(app.main.chat.lines), "there is no prompt to type into"
            assert any("Enter goes on" in line for line in app.main.caption.lines)
            for _ in range(60):
                await shown.until(lambda: app.session.play.waiting or app.session.play.verdict is not None)
                if app.session.play.verdict is not None:
                    break
                await pilot.press("enter")
            assert app.session.play.verdict is not None
            app.paint()
            await pilot.pause()
            app.paint()
            reported = " ".join(" ".join(app.main.caption.lines).split())
            assert re.match(r"\d+ of \d+ checks passed [✓✗] ", reported) and "q quits" in reported
            assert all(c["name"] in reported for c in app.session.play.verdict["checks"])
            assert list(app.state.requests) == list(range(1, len(app.state.requests) + 1))
            if name == "cache-hit":
                assert app.state.cache.hit_rate() == 3 * 2000 / (6 * 2200)
            await pilot.press("q")
            await pilot.pause()
            assert app.return_code == (0 if app.session.play.verdict["ok"] else 1)
        finally:
            await asyncio.to_thread(shown.engine.stop)


async def test_a_recording_that_ends_early_is_said_in_badge_toast_and_log() -> None:
    why = "recording stopped early: a.jsonl: No space left on device"
    async with live(size=(120, 40)) as shown:
        app = shown.app
        app.session.options = replace(app.session.options, recording="a.jsonl")
        app.session.recorder = SimpleNamespace(failed=None)
        lines: list[str] = []
        toasts: list[str] = []
        app.notify = lambda text, **_: toasts.append(text)
        app.captured = SimpleNamespace(add=lines.append, poll=lambda: False)
        app.paint()
        assert " REC " in app.main.header.lines[0]
        app.session.recorder.failed = why
        app.tick()
        app.tick()
        assert "REC FAILED" in app.main.header.lines[0] and lines == [why]
        assert toasts == [why]
