"""KvtopApp: the dashboard over a source of batches, with or without an engine behind it.

Owns the one clock that drains, applies and paints (nothing else paints), the keys, the theme and the way
out. Invariants: the engine's thread never touches Textual; a frame is painted only when something changed;
whatever happens, the terminal is restored before a word is said on stderr.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, on
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.timer import Timer

from engine import SetupError
from kvtop import signs, themes
from kvtop.asking import Asker
from kvtop.capture import Capture, Captured
from kvtop.demo import Performance
from kvtop.motion import Motion
from kvtop.options import VIEWS, Options, View
from kvtop.palette import Palette
from kvtop.screens.help import HelpScreen
from kvtop.screens.main import MainScreen
from kvtop.settings import log_file
from kvtop.state import DashboardState
from kvtop.text import cut, safe_text
from kvtop.widgets.hint import KeyLine
from kvtop.widgets.prompt import Prompt

if TYPE_CHECKING:
    from engine import Engine
    from engine.events import StepBatch
    from kvtop.sources import Source

CPU_FPS, GPU_FPS = 10.0, 30.0
"""Frames a second by default: a CPU engine shares its cores with the screen."""
SWEEP_FPS = 30.0
SLOW = 0.25
"""Seconds that F3 lets the engine wait between steps."""
FIRST_FRAME = 0.05
"""Seconds that the first frame is given before the engine starts."""
SETTLING = 3.0
"""Seconds after the last batch in which rates still fall."""


class KvtopApp(App[int]):
    """`source` gives batches; `engine`, if there is one, takes prompts and control."""

    TITLE = "kvtop"
    CSS_PATH = Path(__file__).parent / "screens" / "main.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", id="quit", priority=True, show=False),
        Binding(
            "ctrl+c", "copy_or_quit", "Copy the selection, else quit", id="copy", priority=True, show=False
        ),
        Binding("f1,question_mark", "help", "Help", id="help"),
        Binding("f2", "next_view", "View chat, ops, all", id="view"),
        Binding("f3", "slow", "Slow motion", id="slow"),
        Binding("f4,L", "logs", "What was printed", id="logs"),
        Binding("ctrl+t", "next_theme", "Next theme", id="theme"),
        Binding("ctrl+n", "new_conversation", "New conversation", id="new"),
        Binding("space", "freeze", "Freeze the display (the engine runs on)", id="freeze"),
        Binding("full_stop", "step", "One engine step", id="step"),
        Binding("comma", "step_back", "One batch back", id="step-back"),
        Binding("left_square_bracket", "seek(-1)", "1 s back", id="back-1"),
        Binding("right_square_bracket", "seek(1)", "1 s on", id="on-1"),
        Binding("left_curly_bracket", "seek(-10)", "10 s back", id="back-10"),
        Binding("right_curly_bracket", "seek(10)", "10 s on", id="on-10"),
        Binding("less_than_sign", "speed(-1)", "Slower", id="slower"),
        Binding("greater_than_sign", "speed(1)", "Faster", id="faster"),
        Binding("x", "abort", "Abort the newest running request", id="abort"),
        Binding("s", "picture", "Save a picture (SVG)", id="picture"),
        Binding("q", "quit", "Quit", id="quit-q"),
    ]

    def __init__(
        self,
        source: Source,
        options: Options,
        *,
        engine: Engine | None = None,
        captured: Captured | None = None,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        """wall: monotonic seconds for motion; tests hand over their own."""
        # Under NO_COLOR Textual chooses its filter here, before a theme is known: this one takes all colour away,
        # the other would turn the terminal's own colours into black on black.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.source, self.options, self.engine = source, options, engine
        self.captured = captured
        self.wall = wall
        self.state = DashboardState()
        source.attach(self.state)
        self.motion = Motion(still=not options.motion)
        self.asker: Asker | None = None
        self.play: Performance | None = None
        self.failure: str | None = None
        """Why nothing could be shown: one line for stderr, exit code 2."""
        self.frozen = False
        self.stepping = False
        self.slow = options.slow
        self.frames = 0
        self.own_themes: list[str] = []
        """kvtop's and the user's, in the order of ctrl+t."""
        self._held: list[StepBatch] = []
        self._applied = (-1, -1)
        self._told_errors = 0
        self._moved_at = self._painted_at = float("-inf")
        self._standing = self._running_known = self._owed = False
        self._waking = False
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
        chosen = themes.find(self.options.theme or themes.default_name(self.no_color))
        if chosen.name not in self.available_themes or chosen.name in {t.name for t in found}:
            self.register_theme(chosen)
        self.theme = chosen.name
        self.own_themes = [t.name for t in found]
        for problem in problems:
            self.notify(problem, title="A theme cannot be used", severity="warning")

    # ----------------------------------------------------------------------------------- start

    def get_default_screen(self) -> Screen[Any]:
        """The dashboard."""
        live = self.engine is not None and self.options.demo is None
        self._main = MainScreen(
            self.state, self.motion, () if self.captured is None else self.captured, live=live
        )
        self._main.view = self.options.view or (
            "all" if self.size.width >= 200 and self.size.height >= 60 else "chat"
        )
        return self._main

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
        self._clock = self.set_interval(1 / (self.options.fps or CPU_FPS), self.tick)
        self._fast = self.set_interval(1 / SWEEP_FPS, self.tick, pause=True)
        self._catch_signals()
        if self.captured is not None:
            self.begin_capture_print(self)
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        if self.engine is None:
            self.tick()
            return
        demo, options = self.options.demo, self.options
        if demo is not None:
            self.play = Performance(demo, self.engine, self.state, hold=True)
            self.main.set_class(True, "-captioned")
        else:
            try:
                from kvtop.examples import load_examples

                examples = load_examples()
            except SetupError as error:
                examples = ()
                self.notify(str(error), title="No examples", severity="warning")
            self.asker = Asker(
                self.engine,
                self.state,
                examples=examples,
                params=options.params,
                system=options.system,
                system_name=options.system_name,
            )
        self.paint()
        # The engine's imports hold the interpreter for a while: let the frame go out before.
        self.set_timer(FIRST_FRAME, self._start_engine)

    def _start_engine(self) -> None:
        assert self.engine is not None
        self.engine.start()
        if self.asker is None:
            return
        for prompt in self.options.prompts:
            self.asker.new_conversation()
            self.asker.send(prompt)

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
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                code = 130 if number == signal.SIGINT else 128 + number
                loop.add_signal_handler(number, leave(code))

    # ----------------------------------------------------------------------------------- clock

    def wake(self) -> None:
        """A widget wants a frame before the clock's next tick."""
        if not self._waking and self.is_running:
            self._waking = True
            self.call_after_refresh(self._woken)

    def _woken(self) -> None:
        self._waking = False
        if self.main.is_attached:
            self.paint()

    @property
    def playing(self) -> bool:
        """A recording runs."""
        return self.engine is None and not getattr(self.source, "paused", True)

    @property
    def now(self) -> float:
        """The display's clock: the engine's, or the recording's."""
        if self.frozen or self.engine is None:
            return self.state.t
        return max(self.state.t, self.engine.clock())

    def tick(self) -> None:
        """Drain, apply, and paint if anything on the screen may differ."""
        if not self.is_running or not self.main.is_attached:
            return
        moved = self._pull()
        wall = self.wall()
        self.motion.update(self.state, wall)
        standing, was = self.motion.standing, self._standing
        self._standing = standing
        self._set_pace()
        if self.main.has_class("-logs") and self.captured is not None:
            self.captured.poll()
            self.main.log_panel.stale = True
        if moved:
            self._moved_at = wall
        rest = wall - self._painted_at
        settling = rest >= 0.5 and (wall - self._moved_at < SETTLING or self.playing)
        ageing = self.main.selected is not None and rest >= 1.0 and not self.frozen
        if moved or standing or was or settling or ageing or self._owed or self.main.stale:
            self._frame(wall, every=False)

    def _set_pace(self) -> None:
        assert self._fast is not None
        if self.motion.moving:
            self._fast.resume()
        else:
            self._fast.pause()

    def _pull(self) -> bool:
        batches = self.source.drain()
        if self.frozen:
            self._held += batches
            return False
        if self._held:
            batches, self._held = self._held + batches, []
        state = self.state
        for batch in batches:
            state.apply(batch)
        if state.started is not None and not self._running_known:
            self._running_known = True
            self._started()
        if self.asker is not None:
            self.asker.tick()
        if self.play is not None and self.play.tick():
            self.main.caption.wake()
        self._watch_errors()
        before, self._applied = self._applied, (state.seq, state.generation)  # a source may jump by itself
        return self._applied != before

    def _started(self) -> None:
        assert self.state.started is not None
        if self.options.fps is None and self.state.started.device != "cpu" and self._clock is not None:
            self._clock.stop()
            self._clock = self.set_interval(1 / GPU_FPS, self.tick)
        if self.engine is not None and self.slow:
            self.engine.set_slow(self.slow)

    def _watch_errors(self) -> None:
        failure = self.engine.failure if self.engine is not None else None
        if failure is not None and self.state.started is None:
            self.failure = str(failure)
            self.exit(2, return_code=2)
            return
        errors = self.state.errors
        for error in errors[self._told_errors :]:
            # A fatal one stands in the hint; that of a request in the chat.
            if error.request_id is None and not (error.fatal and self.main.live):
                self.notify(
                    safe_text(error.message), title="Engine", severity="error", timeout=15, markup=False
                )
        self._told_errors = len(errors)

    def paint(self) -> None:
        """One frame of everything, at once."""
        self._frame(self.wall(), every=True)

    def _frame(self, wall: float, every: bool) -> None:
        main, state, now = self.main, self.state, self.now
        main.map.touch(state.take_dirty())
        main.header.badges = signs.badges(self)
        main.key_line.keys = signs.keys(self)
        signs.tell_next(self)
        self._owed = main.paint(state, now, wall, every)
        self._painted_at = wall
        self.frames += 1

    # ------------------------------------------------------------------------------------ keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what works now: help lists what this allows."""
        if action in ("step_back", "seek", "speed"):
            return self.engine is None
        if action in ("slow", "abort", "reset_cache"):
            return self.engine is not None
        if action == "new_conversation":
            return self.asker is not None
        if action == "ask":
            return self.asker is not None or self.play is not None
        return True

    @on(Prompt.Sent)
    def _sent(self, event: Prompt.Sent) -> None:
        if self.asker is not None:
            self.main.strip.picked = None
            self.main.chat.back = 0
            self.asker.send(event.text)
            self.main.hint.wake()

    @on(Prompt.Changed)
    def _typed(self) -> None:
        self.main.hint.wake()

    @on(KeyLine.Clicked)
    async def _key_clicked(self, event: KeyLine.Clicked) -> None:
        self.simulate_key(event.press)

    def action_ask(self) -> None:
        """Enter in key mode: the demo goes on, or the prompt gets the letters."""
        if self.play is not None:
            self.play.advance()
            self.main.caption.wake()
        elif self.asker is not None:
            self.main.prompt.focus()

    async def action_quit(self) -> None:
        """Leave; a demo's verdict decides the exit code."""
        verdict = self.play.verdict if self.play is not None else None
        code = 1 if verdict is not None and not verdict["ok"] else 0
        self.exit(code, return_code=code)

    def action_copy_or_quit(self) -> None:
        """ctrl+c."""
        text = self.main.prompt.selected_text if self.main.typing else ""
        text = text or self.screen.get_selected_text() or ""
        if text:
            self.copy_to_clipboard(text)
            self.screen.clear_selection()
            self.notify("copied", timeout=1.5)
        else:
            self.exit(130, return_code=130)

    def action_help(self) -> None:
        """What everything means."""
        self.push_screen(HelpScreen.over(self.screen))

    def action_next_view(self) -> None:
        """chat, ops, all, chat."""
        self.set_view(VIEWS[(VIEWS.index(self.main.view) + 1) % len(VIEWS)])

    def set_view(self, view: View) -> None:
        """Show this view."""
        self.main.show_view(view)
        self.wake()

    def action_logs(self) -> None:
        """Show or hide what was printed."""
        self.main.toggle_logs()
        self.wake()

    def action_next_theme(self) -> None:
        """The next of kvtop's and the user's themes."""
        names = self.own_themes
        place = names.index(self.theme) + 1 if self.theme in names else 0
        self.theme = names[place % len(names)]
        self.notify(self.theme, title="Theme", timeout=1.5)

    def action_new_conversation(self) -> None:
        """The next prompt starts anew."""
        if self.asker is not None:
            self.asker.new_conversation()
            self.main.hint.wake()

    def action_slow(self) -> None:
        """Slow motion on or off; runs on after single steps."""
        if self.engine is None or self.state.started is None:
            return
        if self.stepping:
            self.stepping = False
            self.engine.resume()
        else:
            self.slow = 0.0 if self.slow else self.options.slow or SLOW
            self.engine.set_slow(self.slow)
        self.wake()

    def action_step(self) -> None:
        """One engine step, or one batch of a recording."""
        if self.engine is None:
            self._replay("step", 1)
        elif self.state.started is not None:
            if not self.stepping:
                self.stepping = True
                self.engine.pause()
            self.engine.step_once()
            self.wake()

    def action_freeze(self) -> None:
        """The display only: batches are kept and shown later."""
        if self.engine is None:
            self._replay("toggle")
        else:
            self.frozen = not self.frozen
            self.wake()

    def action_step_back(self) -> None:
        """One batch back."""
        self._replay("step", -1)

    def action_seek(self, seconds: int) -> None:
        """Relative to the moment shown."""
        self._replay("seek", getattr(self.source, "t", self.state.t) + seconds)

    def action_speed(self, direction: int) -> None:
        """Twice or half as fast."""
        self._replay("change_speed", direction)

    def _replay(self, what: str, *args: float) -> None:
        control = getattr(self.source, what, None)
        if control is not None:
            control(*args)
            self.tick()
            self.paint()

    def action_abort(self) -> None:
        """The newest running request, or the one picked in the chat."""
        running = self.state.running
        picked = self.main.strip.picked
        if self.engine is not None and running:
            self.engine.abort(picked if picked in running else running[-1])

    def action_reset_cache(self) -> None:
        """Forget all hashes, unless blocks are in use."""
        if self.engine is not None:
            self.engine.reset_prefix_cache()

    def action_picture(self) -> None:
        """An SVG of the screen in the current folder."""
        from kvtop.picture import render

        path = Path(time.strftime("kvtop-%Y%m%d-%H%M%S.svg"))
        try:
            path.write_bytes(render(self, "svg"))
        except (OSError, ValueError) as error:
            self.notify(cut(safe_text(str(error)), 120), title="No picture", severity="error")
        else:
            self.notify(str(path), title="Picture saved")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What ctrl+p offers."""
        for name in self.own_themes:
            yield SystemCommand(f"Theme {name}", "Switch the colours", partial(setattr, self, "theme", name))
        yield SystemCommand("Theme: all", "Choose among all themes", self.action_change_theme)
        for view in VIEWS:
            yield SystemCommand(f"View {view}", "F2 goes round", partial(self.set_view, view))
        for title, about, action, name in (
            ("Help", "Keys, the map, every figure (F1)", self.action_help, "help"),
            ("Logs", "What the engine printed (F4)", self.action_logs, "logs"),
            ("Picture", "Save the screen as SVG (s)", self.action_picture, "picture"),
            ("Slow motion", "Let the engine wait between steps (F3)", self.action_slow, "slow"),
            ("Freeze", "Stop the display, not the engine (space)", self.action_freeze, "freeze"),
            ("One step", "Run a single engine step (.)", self.action_step, "step"),
            (
                "New conversation",
                "The next prompt starts anew (ctrl+n)",
                self.action_new_conversation,
                "new_conversation",
            ),
            ("Reset prefix cache", "Forget all hashes", self.action_reset_cache, "reset_cache"),
            ("Quit", "Leave (ctrl+q)", self.action_quit, "quit"),
        ):
            if self.check_action(name, ()):
                yield SystemCommand(title, about, action)


# ------------------------------------------------------------------------------------------ running


def run_live(engine: Engine, options: Options) -> int:
    """The dashboard over `engine`, which is started here after the first frame and stopped at the end.

    Returns the exit code: 0, 1 after a crash or a failed demo, 2 when the engine could not start (one
    line on stderr), 130 after ctrl+c. Raises SetupError for a theme that cannot be used.
    """
    from kvtop.sources import LiveSource

    try:
        return _run(LiveSource(engine), options, engine)
    finally:
        engine.stop()


def run_replay(source: Source, options: Options) -> int:
    """The dashboard over a recording. Exit codes as `run_live`."""
    return _run(source, options, None)


def _run(source: Source, options: Options, engine: Engine | None) -> int:
    themes.find(options.theme or themes.DEFAULT)  # wrong names are told before the terminal changes hands
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)  # a frame must not hold the interpreter back from the engine's thread
    capture = Capture(log_file())
    try:
        with capture as captured:
            app = KvtopApp(source, options, engine=engine, captured=captured)
            app.run()
            crash = getattr(app, "_exception", None)
    finally:
        sys.setswitchinterval(interval)
    if app.failure is not None:
        print(f"kvtop: {app.failure}"[:200], file=sys.stderr)
        return 2
    if crash is not None:
        print(f"kvtop crashed: {type(crash).__name__}: {crash}; see {capture.path}"[:200], file=sys.stderr)
        return 1
    return app.return_code or 0
