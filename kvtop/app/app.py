"""KvtopApp: the dashboard over a session, on a terminal.

Owns the one clock that drains, applies and paints (nothing else paints), the theme and the way out; what the
keys do to the engine or the recording is in the session. Invariants: the engine's thread never touches Textual; a
frame is painted only when something changed; the terminal is restored before anything is written to stderr.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events, on
from textual.app import SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.timer import Timer

from kvtop.app import keys
from kvtop.app.capture import Captured
from kvtop.app.screens.arrange import NARROW, SMALL_OPS_ROWS
from kvtop.app.screens.help import HelpScreen
from kvtop.app.screens.main import MainScreen
from kvtop.app.signs import Mode, Signs, signs
from kvtop.options import VIEWS, View
from kvtop.paint import themes
from kvtop.paint.motion import Motion
from kvtop.paint.palette import Palette
from kvtop.play.session import Session
from kvtop.state.dashboard import DashboardState
from kvtop.terminal.textual_door import BURST, OrderedApp
from kvtop.text import cut, safe_text
from kvtop.widgets.bars.hint import KeyLine
from kvtop.widgets.chat.prompt import Prompt

CPU_FPS, GPU_FPS = 10.0, 30.0
"""Frames a second by default: a CPU engine shares its cores with the screen."""
SWEEP_FPS = 30.0
FIRST_FRAME = 0.05
"""Seconds that the first frame is given before the engine starts."""
NOTE = 4.0
"""Seconds for which the line under the prompt says what a key did, and a second ctrl+c quits."""
SETTLING = 3.0
"""Seconds after the last batch in which rates still fall."""
LOADING_PAUSE = 1.0
"""Seconds between two frames while a recording loads: the time is for loading."""
LOADING_BREATH = 0.005
"""Seconds between two slices of loading, in which keys are read."""


class KvtopApp(OrderedApp):
    """Shows `session` and hands the keys to it."""

    TITLE = "kvtop"
    CSS_PATH = Path(__file__).parent / "screens" / "main.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = keys.BINDINGS

    def __init__(
        self,
        session: Session,
        *,
        captured: Captured | None = None,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        """wall: monotonic seconds for motion and pace; tests hand over their own."""
        # Under NO_COLOR Textual chooses its filter here, before a theme is known: this one takes all colour away,
        # the other would turn the terminal's own colours into black on black.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.session = session
        self.captured = captured
        self.wall = wall
        self.motion = Motion(still=not session.options.motion)
        self.failure: str | None = None
        """Why nothing could be shown: one line for stderr, exit code 2."""
        self.frames = 0
        self.own_themes: list[str] = []
        """kvtop's and the user's, in the order of ctrl+t."""
        self._note = ("", float("-inf"))
        """What a key did, and until when to say it."""
        self._quits_until = float("-inf")
        """Until when ctrl+c or a click on `quit` is the second one."""
        self._told_errors = 0
        self._moved_at = self._stirred_at = self._painted_at = float("-inf")
        self._stirs = 0
        self._standing = self._is_up = self._owed = False
        self._said_recording_failed = False
        self._waking = False
        self._loading = self._slice_comes = False
        """A recording loads; its next slice is on the way."""
        self._clock: Timer | None = None
        self._fast: Timer | None = None
        self._palette: tuple[str, Palette] | None = None
        self._main: MainScreen | None = None

    # ---------------------------------------------------------------------------------- theme

    @property
    def palette(self) -> Palette:
        """Styles of the theme in force."""
        if self._palette is None or self._palette[0] != self.theme:
            self._palette = self.theme, themes.palette(self.current_theme, self.no_color)
        return self._palette[1]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """kvtop's own colours under any theme."""
        return themes.defaults(self.current_theme.dark)

    def _load_themes(self) -> None:
        found, problems = themes.all_themes()
        for theme in found:
            self.register_theme(theme)
        chosen = themes.find(self.session.options.theme or themes.default_name(self.no_color))
        if chosen.name not in self.available_themes or chosen.name in {t.name for t in found}:
            self.register_theme(chosen)
        self.theme = chosen.name
        self.own_themes = [t.name for t in found]
        for problem in problems:
            self.notify(problem, title="A theme cannot be used", severity="warning")

    # ----------------------------------------------------------------------------------- start

    def get_default_screen(self) -> Screen[Any]:
        """The dashboard."""
        session, (width, height) = self.session, self.size
        live = session.engine is not None and session.options.demo is None
        captured = () if self.captured is None else self.captured
        self._main = MainScreen(self.state, self.motion, captured, live=live)
        self._main.view = session.options.view or ("all" if width >= 200 and height >= 60 else "chat")
        return self._main

    @property
    def state(self) -> DashboardState:
        """What is shown."""
        return self.session.shown

    @property
    def main(self) -> MainScreen:
        """The dashboard's screen, also while another one covers it."""
        assert self._main is not None
        return self._main

    def on_load(self) -> None:
        """Before the first frame: colours."""
        self._load_themes()

    def on_mount(self) -> None:
        """The clock, then the engine: the first frame does not wait for either."""
        self._clock = self.set_interval(1 / (self.session.options.fps or CPU_FPS), self.tick)
        self._fast = self.set_interval(1 / SWEEP_FPS, self.tick, pause=True)
        self._catch_signals()
        if self.captured is not None:
            self.begin_capture_print(self)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        session = self.session
        session.prepare()
        if session.problem is not None:
            self.notify(session.problem, title="No examples", severity="warning", markup=False)
        self.main.caption_rows = 3 if session.play is not None else 0
        self.paint()
        if session.engine is None:
            if session.source.loading is None:  # else the clock goes on with it, once this frame is out
                self.tick()
        else:
            # The engine's imports hold the interpreter for a while: let the frame go out before.
            self.set_timer(FIRST_FRAME, session.start)

    def on_print(self, event: events.Print) -> None:
        """Python's print, which Textual catches before it can reach the log file."""
        if self.captured is not None:
            for line in event.text.splitlines():
                if line.strip():
                    self.captured.add(line)

    def _catch_signals(self) -> None:
        def leave(code: int) -> Callable[[], None]:
            return lambda: self.exit(code, return_code=code)

        with suppress(
            NotImplementedError, RuntimeError, ValueError
        ):  # not on this system, not in this thread
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                loop.add_signal_handler(number, leave(128 + number))

    # ----------------------------------------------------------------------------------- clock

    def wake(self) -> None:
        """A widget wants a frame before the clock's next tick."""
        if not self._waking and self.is_running:
            self._waking = True
            self.call_after_refresh(self._woken)

    def say(self, text: str) -> None:
        """What a key did, in the line under the prompt for a moment; a toast would cover that line."""
        if not self.main.hint.display:
            self.notify(text, timeout=NOTE, markup=False)
            return
        self._note = text, self.wall() + NOTE
        self.wake()

    @property
    def note(self) -> str:
        """What to say of the last key now."""
        text, until = self._note
        return text if self.wall() < until else ""

    def _woken(self) -> None:
        self._waking = False
        if self.input_waits and self.wall() - self._painted_at < BURST:
            return  # the clock paints what a burst of keys has changed
        if self.main.is_attached:
            self.paint()

    @property
    def now(self) -> float:
        """The display's clock, in the engine's seconds."""
        return self.session.now

    def tick(self) -> None:
        """Take the batches that are due, apply them, and paint if the screen may have changed."""
        if not self.is_running or not self.main.is_attached or self._slice_comes:
            return
        session, wall = self.session, self.wall()
        if not self.frames and session.source.loading is not None:
            return  # the first frame does not wait for a slice of loading
        if session.pull():
            self._moved_at = wall
            if session.state.stream.stirs != self._stirs:
                self._stirs, self._stirred_at = session.state.stream.stirs, wall
            self._watch()
        elif session.failure is not None:
            self._watch()
        if session.recording_failed is not None and not self._said_recording_failed:
            self._say_recording_failed(session.recording_failed)
        before, self._loading = self._loading, session.source.loading is not None
        if self._loading:
            self._load_on(wall)
            return
        self.motion.update(self.state, wall)
        self._set_pace()
        if before:
            self.paint()
            return
        if self.main.logs and self.captured is not None and self.captured.poll():
            self.main.log_panel.stale = True
        if self.draws_at_once and self._is_due(wall):
            self._frame(wall, every=False)

    def _load_on(self, wall: float) -> None:
        """Say how far it is, from time to time, and go on as soon as the keys were read."""
        if self.draws_at_once and wall - self._painted_at >= LOADING_PAUSE:
            self._paint_loading(wall)
        self._slice_comes = True
        self.set_timer(LOADING_BREATH, self._next_slice)

    def _next_slice(self) -> None:
        self._slice_comes = False
        self.tick()

    def _paint_loading(self, wall: float) -> None:
        self._say(signs(self.session, self._mode))
        self.main.paint_loading(self.state, self.now)
        self._painted_at = wall
        self.frames += 1

    def _say_recording_failed(self, why: str) -> None:
        """A toast now, the badge and a line of the log from now on."""
        self._said_recording_failed = True
        self.notify(safe_text(why), title="Recording", severity="error", timeout=15, markup=False)
        if self.captured is not None:
            self.captured.add(why)
        self.main.log_panel.stale = self.main.header.stale = True

    def _is_due(self, wall: float) -> bool:
        """Something on the screen may differ from the last frame."""
        session, rest = self.session, wall - self._painted_at
        # One frame more after the last mark has gone.
        standing, self._standing = self._standing, self.motion.standing
        settling = wall - self._stirred_at < SETTLING or session.playing
        ageing = self.main.selected is not None and not session.frozen
        return (
            self._moved_at == wall
            or standing
            or self._standing
            or self._owed
            or self._painted_at < self._note[1] <= wall
            or (rest >= 0.5 and settling)
            or (rest >= 1.0 and ageing)
            or self.main.stale
        )

    def _set_pace(self) -> None:
        assert self._fast is not None
        if self.motion.moving:
            self._fast.resume()
        else:
            self._fast.pause()

    def _watch(self) -> None:
        """What happens once: the engine is up, it failed, an error has to be shown."""
        session = self.session
        state = session.state
        if session.failure is not None:
            self.failure = session.failure
            self.exit(2, return_code=2)
            return
        if state.started is not None and not self._is_up:
            self._is_up = True
            self._started()
        for error in state.engine.errors[self._told_errors :]:
            # A fatal one is in the hint, and the error of a request is in the chat.
            if error.request_id is None and not (error.fatal and self.main.live):
                text = safe_text(error.message)
                self.notify(text, title="Engine", severity="error", timeout=15, markup=False)
        self._told_errors = len(state.engine.errors)

    def _started(self) -> None:
        started = self.session.state.started
        assert started is not None
        if self.session.options.fps is None and started.device != "cpu" and self._clock is not None:
            self._clock.stop()
            self._clock = self.set_interval(1 / GPU_FPS, self.tick)
        self.session.begin_slow()

    def paint(self) -> None:
        """One frame of everything, at once."""
        self._frame(self.wall(), every=True)

    def _frame(self, wall: float, every: bool) -> None:
        main, state, now = self.main, self.state, self.now
        main.state = state
        main.map.touch(state.pool.take_dirty())
        self._say(signs(self.session, self._mode))
        self._owed = main.paint(state, now, wall, every)
        self._painted_at = wall
        self.frames += 1

    @property
    def _mode(self) -> Mode:
        main = self.main
        return Mode(
            main.typing, main.prompt.value, self.note, not main.has_room_for("ops"), not self.is_headless
        )

    def _say(self, said: Signs) -> None:
        """Hand the signs to the widgets that this frame paints."""
        main = self.main
        main.header.badges, main.key_line.keys = said.badges, said.keys
        main.chat.sent, main.chat.topic, main.chat.invites = said.sent, said.topic, said.invites
        main.header.held = main.queues.held = len(said.sent)
        main.header.without_figures, main.chat.progress = bool(said.loading), said.loading
        main.hint.says, main.hint.why, main.hint.warns = said.hint, said.why, said.warns
        main.caption.says, main.caption.then = said.caption, said.then
        if self.session.play is not None:
            main.caption_rows = 6 if said.judged else 3

    # ------------------------------------------------------------------------------------ keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what works now: help lists what this allows."""
        return self.session.may(action)

    @on(Prompt.Sent)
    def _sent(self, event: Prompt.Sent) -> None:
        if self.session.composer is not None:
            self.main.strip.picked = None
            self.main.chat.back = 0
            self.session.composer.send(event.text)
            self.wake()

    @on(Prompt.Changed)
    def _typed(self) -> None:
        if self.main.prompt.value:  # what is typed now is another matter; an emptied line is not
            self._note = "", float("-inf")
        self.main.hint.wake()

    @on(KeyLine.Clicked)
    def _key_clicked(self, event: KeyLine.Clicked) -> None:
        if event.press in ("q", "ctrl+q"):  # a click is easily made by mistake
            self._quit_when_asked_twice(self.session.exit_code, "another click quits, and so does ctrl+q")
        else:
            self.simulate_key(event.press)

    def action_ask(self) -> None:
        """Enter in key mode: the demo goes on, or the prompt gets the letters."""
        if self.session.play is not None:
            self.session.play.advance()
            self.wake()
        elif self.session.composer is not None:
            self.main.prompt.focus()

    async def action_quit(self) -> None:
        """Leave."""
        code = self.session.exit_code
        self.exit(code, return_code=code)

    def action_interrupt(self) -> None:
        """ctrl+c: the first of these that there is to do."""
        main = self.main
        text = main.prompt.selected_text if main.typing else ""
        text = text or self.screen.get_selected_text() or ""
        if text:
            self.copy_to_clipboard(text)
            self.screen.clear_selection()
            self.say("copied")
        elif self.screen is not main:
            self.screen.dismiss()
        elif main.prompt.value:
            main.prompt.value = ""
        elif count := self.session.abort_answers():
            self.say("the answer is aborted" if count == 1 else f"{count} answers are aborted")
        else:
            self._quit_when_asked_twice(128 + signal.SIGINT, "ctrl+c again quits")

    def _quit_when_asked_twice(self, code: int, how: str) -> None:
        """Leave, if the hint has just said `how`."""
        if self.wall() < self._quits_until:
            self.exit(code, return_code=code)
        else:
            self._quits_until = self.wall() + NOTE
            self.say(how)

    def action_repaint(self) -> None:
        """ctrl+l."""
        self.repaint()

    def action_stop_process(self) -> None:
        """ctrl+z."""
        self.stop_process()

    def action_help(self) -> None:
        """What everything means."""
        self.push_screen(HelpScreen.over(self.screen))

    def action_next_view(self) -> None:
        """chat, ops, all, chat: the next one that the terminal has room for."""
        now = self.main.view
        at = VIEWS.index(now)
        others = (*VIEWS[at + 1 :], *VIEWS[:at])
        view = next((v for v in others if v == "chat" or self.main.has_room_for(v)), now)
        if view == now:
            self.say(f"the other views need {NARROW} × {SMALL_OPS_ROWS} cells")
        else:
            self.set_view(view)

    def set_view(self, view: View) -> None:
        """Show this view."""
        self.main.show_view(view)
        self.wake()

    def action_unfold(self) -> None:
        """e, wherever the focus is."""
        if not self.main.chat_box.display:
            self.say("the chat is not in this view: F2 shows another")
        elif not self.main.chat.fold_latest():
            self.say("nothing in view can be unfolded: no page, no long prompt")

    def action_logs(self) -> None:
        """Show or hide what was printed."""
        self.main.toggle_logs()
        self.wake()

    def action_next_theme(self) -> None:
        """The next of kvtop's and the user's themes."""
        names = self.own_themes
        place = names.index(self.theme) + 1 if self.theme in names else 0
        self.theme = names[place % len(names)]
        self.say(f"theme {self.theme}")

    def action_new_conversation(self) -> None:
        """The next prompt starts anew."""
        if self.session.composer is not None:
            self.session.composer.new_conversation()
            self.say("a new conversation: the next prompt starts anew")

    def action_slow(self) -> None:
        """F3."""
        self.session.toggle_slow()
        self.wake()

    def action_step(self) -> None:
        """Full stop."""
        self._control(self.session.step, 1)

    def action_step_back(self) -> None:
        """Comma."""
        self._control(self.session.step, -1)

    def action_freeze(self) -> None:
        """Space."""
        self._control(self.session.toggle_frozen)

    def action_seek(self, seconds: int) -> None:
        """Brackets and braces."""
        self._control(self.session.seek, seconds)

    def action_speed(self, direction: int) -> None:
        """Less and greater than."""
        self._control(self.session.change_speed, direction)

    def _control(self, control: Callable[..., None], *args: int) -> None:
        """Do it, and show at once what became of it."""
        control(*args)
        self.tick()
        if self._loading:
            self._paint_loading(self.wall())
        else:
            self.paint()

    def action_abort(self) -> None:
        """x."""
        self.session.abort(self.main.strip.picked)

    def action_reset_cache(self) -> None:
        """From the palette."""
        self.session.reset_cache()

    def action_picture(self) -> None:
        """An SVG of the screen in the current folder."""
        from kvtop.picture.frame import render

        path = Path(time.strftime("kvtop-%Y%m%d-%H%M%S.svg"))
        try:
            path.write_bytes(render(self, "svg"))
        except (OSError, ValueError) as error:
            self.notify(cut(safe_text(str(error)), 120), title="No picture", severity="error")
        else:
            self.say(f"picture saved: {safe_text(str(path.resolve()))}")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What ctrl+p offers."""
        for name in self.own_themes:
            yield SystemCommand(f"Theme {name}", "Switch the colours", partial(setattr, self, "theme", name))
        yield SystemCommand("Theme: all", "Choose among all themes", self.action_change_theme)
        for view in VIEWS:
            yield SystemCommand(f"View {view}", "F2 goes round", partial(self.set_view, view))
        for title, about, action in keys.COMMANDS:
            if self.session.may(action):
                yield SystemCommand(title, about, partial(self.run_action, action))
