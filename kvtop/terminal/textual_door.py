"""Everything private of Textual that kvtop uses, so that an upgrade of Textual is a change of this file.

Owns the terminal driver, the compositor that draws frames, and the order in which input is handled. The contract
test in tests/kvtop/terminal checks each private name against the pinned series; another one keeps them out of
every other file. Invariants: nothing here waits for the terminal; an input event is handled completely, with all
that its handlers posted to the widgets around them, before the next one is delivered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text
from textual import events
from textual._compositor import Compositor, CompositorMap, CompositorUpdate
from textual._context import visible_screen_stack
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.command import CommandPalette
from textual.constants import DISABLE_KITTY_KEY
from textual.css.query import NoMatches
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.strip import Strip
from textual.theme import ThemeProvider
from textual.widget import Widget
from textual.widgets import Input

from kvtop.terminal.front import Front, PlacedStrip
from kvtop.terminal.input_bytes import InputDecoder
from kvtop.terminal.output import Output
from kvtop.text import symbols

if TYPE_CHECKING:
    from textual.driver import Driver

SETTLED = 0.5
"""Seconds that the next input waits at most for the handlers of the one before."""

BURST = 0.1
"""Seconds between two frames while input waits: a burst of keys is handled first and drawn after."""

MOST_COLUMNS, MOST_ROWS = 2000, 1000
"""Of a terminal; what is further right or below is not drawn."""

KEYS_WHOLE = "\x1b[>25u"
"""The kitty protocol's flags 1, 8 and 16: keys as sequences that tell all of them apart, with their text."""

# ---------------------------------------------------------------------------------------- input


class _Parser(XTermParser):
    """Textual's, which takes each number in a key's sequence for a character."""

    def _parse_extended_key(self, sequence: str) -> list[events.Key] | None:  # type: ignore[override]
        try:
            keys = super()._parse_extended_key(sequence)
        except (ValueError, OverflowError):
            return None
        return None if keys and any(_is_surrogate(key.character) for key in keys) else keys

    def parse_mouse_code(self, code: str) -> Message | None:
        """In cells, where the terminal said a size of nothing: there is no telling how large a cell is."""
        if not (self.terminal_size and self.terminal_pixel_size):
            self.mouse_pixels = False
        return super().parse_mouse_code(code)


def _is_surrogate(character: str | None) -> bool:
    return character is not None and any("\ud800" <= c <= "\udfff" for c in character)


class KeyReader:
    """Bytes from the terminal to Textual's events."""

    def __init__(self) -> None:
        self._decoder, self._parser = InputDecoder(), _Parser()

    def feed(self, data: bytes) -> list[Message]:
        """The events that these bytes complete."""
        text = self._decoder.decode(data)
        return [message for message in self._parser.feed(text) if _can_be(message)] if text else []

    def tick(self) -> list[Message]:
        """The events that have become complete because nothing followed: a single Esc."""
        return list(self._parser.tick())

    @property
    def due(self) -> bool:
        """`tick` has to be called: a sequence has begun."""
        return self._parser._timeout_time is not None


def _can_be(message: Message) -> bool:
    """False for a size that no terminal has: one of millions of cells would be laid out for minutes."""
    if not isinstance(message, events.Resize):
        return True
    return 0 < message.size.width <= MOST_COLUMNS and 0 < message.size.height <= MOST_ROWS


class SafeInput(Input):
    """A line of input that may hold any character and shows symbols for those that could act on the terminal."""

    @property
    def _value(self) -> Text:
        return Text(symbols(self.value), no_wrap=True, overflow="ignore", end="")

    def _position_to_cell(self, position: int) -> int:
        return cell_len(symbols(self.value)[:position])

    def _cell_offset_to_index(self, offset: int) -> int:
        cells = 0
        for index, character in enumerate(symbols(self.value)):
            cells += cell_len(character)
            if cells > offset:
                return index
        return len(self.value)


class TerminalDriver(LinuxDriver):
    """Textual's driver without its threads: the event loop reads, and writes only what the terminal takes."""

    def __init__(self, app: App[Any], **given: Any) -> None:
        super().__init__(app, **given)
        for number in (signal.SIGTSTP, signal.SIGCONT):  # set anew in start_application_mode
            signal.signal(number, signal.SIG_DFL)
        self.output: Output | None = None
        self._keys = KeyReader()
        self._ticks = False

    def start_application_mode(self) -> None:
        """Take the terminal; again after it was given back."""
        app = self._app
        if self.output is None:
            assert isinstance(app, OrderedApp) and self._file is not None
            self.output = Output(
                self._file.fileno(), self._loop, on_free=app.output_is_free, on_gone=app.terminal_is_gone
            )
            self._watch_signals()
            self._loop.set_exception_handler(self._failed)
        self._keys = KeyReader()
        self._set_raw()
        self.write("\x1b[?1049h\x1b[2J\x1b[?25l\x1b[?1004h" + ("" if DISABLE_KITTY_KEY else KEYS_WHOLE))
        self._enable_mouse_support()
        self._request_terminal_sync_mode_support()
        self._query_in_band_window_resize()
        self._enable_bracketed_paste()
        self._disable_line_wrap()
        with suppress(OSError):  # a file, or /dev/null: there are no keys
            self._loop.add_reader(self.fileno, self._read)
        self._send_size()

    def _set_raw(self) -> None:
        with suppress(termios.error):
            if self.attrs_before is None:
                self.attrs_before = termios.tcgetattr(self.fileno)
            attrs = termios.tcgetattr(self.fileno)
            attrs[0], attrs[3] = self._patch_iflag(attrs[0]), self._patch_lflag(attrs[3])
            attrs[6][termios.VMIN] = 1
            termios.tcsetattr(self.fileno, termios.TCSANOW, attrs)

    def _watch_signals(self) -> None:
        for number, handle in (
            (signal.SIGWINCH, self._resized),
            (signal.SIGTSTP, self._stop),
            (signal.SIGCONT, self._go_on),
        ):
            self._loop.add_signal_handler(number, handle)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the event loop raised: reading, writing, or a signal's handler."""
        error = context.get("exception")
        if isinstance(error, Exception) and "handle" in context:
            self._app._handle_exception(error)
        else:
            loop.default_exception_handler(context)

    def _resized(self) -> None:
        if not self._in_band_window_resize:
            self._send_size()

    def _send_size(self) -> None:
        width, height = self._get_terminal_size()
        size = min(width, MOST_COLUMNS), min(height, MOST_ROWS)
        self.send_message(events.Resize.from_dimensions(size, None))

    def _stop(self) -> None:
        """SIGTSTP: the shell gets the terminal as it was."""
        self.stop_application_mode()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self) -> None:
        """SIGCONT, whatever stopped the process: the shell has used the terminal meanwhile."""
        self.start_application_mode()
        self._app.call_later(self._app.refresh, layout=True)

    def write(self, data: str) -> None:
        """Never waits."""
        if self.output is not None:
            self.output.write(data)

    def flush(self) -> None:
        """As far as the terminal takes it."""
        if self.output is not None:
            self.output.flush()

    def send_message(self, message: Message) -> None:
        """In the order of reading."""
        self._app.post_message(message)

    def _read(self) -> None:
        try:
            data = os.read(self.fileno, 1 << 14)
        except BlockingIOError:
            return
        except OSError:  # hung up
            data = b""
        if not data:
            self._loop.remove_reader(self.fileno)
            if self.input_tty:
                self._app.terminal_is_gone()  # type: ignore[attr-defined]
            return
        self._deliver(self._keys.feed(data))

    def _deliver(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
        if self._keys.due and not self._ticks:
            self._ticks = True
            self._loop.call_later(0.05, self._tick)

    def _tick(self) -> None:
        self._ticks = False
        self._deliver(self._keys.tick())

    def disable_input(self) -> None:
        """No key is read any more."""
        with suppress(OSError, ValueError):
            self._loop.remove_reader(self.fileno)
        with suppress(termios.error):
            termios.tcflush(self.fileno, termios.TCIFLUSH)

    def stop_application_mode(self) -> None:
        """Give the terminal back as it was, in a fraction of a second also if it takes nothing."""
        self.disable_input()
        if self.output is not None:
            mouse = "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"
            resize = "\x1b[?2048l" if self._in_band_window_resize else ""
            self.output.finish(
                f"\x1b[?2026l\x1b[?2004l\x1b[?7h{resize}{mouse}\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"
            )
        if self.attrs_before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)

    def close(self) -> None:
        """The end."""
        for number in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT):
            self._loop.remove_signal_handler(number)
        if self.output is not None:
            self.output.close()
            self.output = None


# ------------------------------------------------------------------------------------ the screen


class _Spans(CompositorUpdate):
    """Strips, each with its place."""

    def __init__(self, strips: Sequence[PlacedStrip]) -> None:
        self.strips = strips

    def render_segments(self, console: Console) -> str:
        """What is written to the terminal."""
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self.strips])


class FrameCompositor(Compositor):
    """Textual's, with a shorter way to the few lines that differ in a frame. While the terminal
    is full, what is dirty stays so; a slow one gets a frame in slices, the focused line first."""

    def __init__(self, screen: Screen[Any] | None = None) -> None:
        super().__init__()
        self._of = screen
        self._front: Front | None = None
        self._drawn_at = -inf
        """Clock of the latest frame."""
        self._next_line = 0
        """Where the next slice of a frame begins."""

    @property
    def _output(self) -> Output | None:
        app = None if self._of is None else self._of.app
        return app.output if isinstance(app, OrderedApp) else None

    @property
    def full_map(self) -> CompositorMap:
        """Where every widget is. Textual computes it anew when somebody asks between two layouts, and the next
        layout then finds nothing changed: what a toast covered would never be drawn again."""
        before = self._full_map
        after = super().full_map
        if after is not before:
            regions = (place.clip.intersection(place.region) for _, place in after.items() ^ before.items())
            self._dirty_regions |= {region for region in regions if region}
        return after

    @property
    def is_dirty(self) -> bool:
        """Something has to be drawn."""
        return bool(self._dirty_regions)

    def render_update(
        self, full: bool = False, screen_stack: list[Screen[Any]] | None = None, simplify: bool = False
    ) -> RenderableType | None:
        """What to send, or None if that is nothing now."""
        now, app = monotonic(), None if self._of is None else self._of.app
        if isinstance(app, OrderedApp) and app.input_waits and now - self._drawn_at < BURST:
            if full:
                self._dirty_regions.add(self.size.region)
            return None
        self._drawn_at = now
        output = self._output
        if output is None:
            return super().render_update(full, screen_stack, simplify)
        if full:
            self._dirty_regions.add(self.size.region)
        if output.is_full:
            return None
        limit = output.limit
        if limit is None:
            return super().render_update(full, screen_stack, simplify)
        visible_screen_stack.set([] if screen_stack is None else screen_stack)
        strips = self.strips_for(self._dirty_regions) if self._dirty_regions else None
        if strips is None:
            return super().render_update(full, screen_stack, simplify)
        return self._slice(strips, limit)

    def render_partial_update(self) -> Any:
        """The lines that are dirty."""
        regions = self._dirty_regions.copy()
        strips = self.strips_for(regions) if regions else None
        if strips is None:
            return super().render_partial_update()
        self._dirty_regions.clear()
        return _Spans(strips)

    def _slice(self, strips: list[PlacedStrip], limit: int) -> Any:
        """The first `limit` bytes: where the keys go, then the lines that have waited longest."""
        assert self._of is not None
        focused = self._of.focused
        first = focused.region.line_range if isinstance(focused, Input) else range(0)
        height, console = max(1, self.size.height), self._of.app.console
        strips.sort(
            key=lambda placed: (placed[1] not in first, (placed[1] - self._next_line) % height, placed[0])
        )
        taken = size = 0
        for _, y, strip in strips:
            size += len(strip.render(console))
            if taken and size > limit:
                self._next_line = y
                break
            taken += 1
        self._dirty_regions.clear()
        self._dirty_regions |= {Region(x, y, strip.cell_length, 1) for x, y, strip in strips[taken:]}
        return _Spans(strips[:taken])

    def strips_for(self, regions: set[Region]) -> list[PlacedStrip] | None:
        """What has to be sent for these regions; None where only Textual's way can tell."""
        cuts = self.cuts
        if self._front is None or self._front.cuts is not cuts:  # Textual drops them with every layout
            self._front = Front(cuts, self.visible_widgets)
        return self._front.strips(self._regions_to_spans(regions))


def draw_frames(screen: Screen[Any]) -> None:
    """Let a new screen draw by a FrameCompositor. Call it in the screen's `__init__`."""
    screen._compositor = FrameCompositor(screen)


def draw_regions(screen: Screen[Any], regions: Iterable[Region]) -> None:
    """Draw these parts of a screen with its next frame. Not by `refresh`: a screen that has to be drawn takes
    itself for all that is dirty, and where the prompt's cursor went at the same moment would not be drawn."""
    screen._set_dirty(*regions)
    screen._dirty_widgets.add(screen)
    screen.check_idle()


def shown_strips(app: App[Any]) -> list[Strip]:
    """What the running app would show now, modal screens and the dimmed ones behind them included."""
    token = visible_screen_stack.set(app._background_screens)
    try:
        return app.screen._compositor.render_strips()
    finally:
        visible_screen_stack.reset(token)


# ----------------------------------------------------------------------------------- the application


class Palette(CommandPalette):
    """The command palette, which runs one command and closes once."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        draw_frames(self)

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, if that has not happened yet."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()

    def run_worker(self, work: Any, *args: Any, **given: Any) -> Any:
        """A search, which may go on for a moment after the palette or the application has closed."""
        return super().run_worker(partial(self._while_open, work), *args, **given)

    async def _while_open(self, work: Any) -> None:
        try:
            await (work() if callable(work) else work)
        except NoMatches:
            if self.app.is_running and self.app.screen is self:
                raise

    def _action_command_list(self, action: str) -> None:
        with suppress(KeyError):  # a page of a list that has no height yet
            super()._action_command_list(action)

    def _select_or_command(self, event: Any = None) -> None:
        if self.app.screen is self:
            super()._select_or_command(event)
        elif event is not None:
            event.stop()


class OrderedApp(App[int]):
    """An application on a terminal that may be slow, may go away, and whose input comes in bursts."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._input: deque[Message] = deque()
        """Read, and waiting for the event before it to be handled."""
        self._settling: asyncio.Task[None] | None = None

    def get_driver_class(self) -> type[Driver]:
        """For a real terminal; tests and pictures have their own."""
        return TerminalDriver

    @property
    def crash(self) -> Exception | None:
        """The exception that ended the application."""
        return self._exception

    def fail(self, error: Exception) -> None:
        """End with this error."""
        self._handle_exception(error)

    def panic(self, *renderables: RenderableType) -> None:
        """Textual's way out without an exception, which it would count as success."""
        if self._exception is None:
            self._exception = RuntimeError("Textual gave up; the log says why")
            self._return_code = 1
        super().panic(*renderables)

    # ------------------------------------------------------------------------------------- output

    @property
    def output(self) -> Output | None:
        """The terminal, if this application is on one."""
        return self._driver.output if isinstance(self._driver, TerminalDriver) else None

    @property
    def draws_at_once(self) -> bool:
        """What is painted now would be drawn now: the terminal has taken all that was dirty before."""
        output = self.output
        if output is None or (output.limit is None and not output.is_full):
            return True
        compositor = self.screen._compositor
        return not output.is_full and not (isinstance(compositor, FrameCompositor) and compositor.is_dirty)

    def output_is_free(self) -> None:
        """The terminal has taken what waited: draw what became dirty meanwhile."""
        self.call_later(self._draw_held)

    def _draw_held(self) -> None:
        if self.is_running and self._screen_stack:
            screen = self.screen
            if isinstance(screen._compositor, FrameCompositor) and screen._compositor.is_dirty:
                screen._compositor_refresh()

    def terminal_is_gone(self) -> None:
        """The terminal was closed, which a signal may or may not have said."""
        code = 128 + signal.SIGHUP
        self.exit(code, return_code=code)

    def repaint(self) -> None:
        """Draw every cell, whatever the terminal shows now."""
        if self._driver is not None:
            self._driver.write("\x1b[0m\x1b[2J\x1b[?25l")
        self.refresh(layout=True)

    def stop_process(self) -> None:
        """Give the terminal back and stop, until the shell's `fg`; the rest of the job stops as by ctrl+z."""
        if isinstance(self._driver, TerminalDriver):
            os.killpg(os.getpgrp(), signal.SIGTSTP)

    # -------------------------------------------------------------------------------------- input

    @property
    def input_waits(self) -> bool:
        """Input was read that is not handled yet."""
        return bool(self._input)

    def post_message(self, message: Message) -> bool:
        """Input is held back while the handlers of the input before it run: they may change what has the focus,
        which screen is in front, or what is selected."""
        if not isinstance(message, events.InputEvent | events.Paste) or message.is_forwarded:
            return super().post_message(message)
        if isinstance(message, events.Paste) and not isinstance(self.focused, SafeInput):
            message.text = symbols(
                message.text
            )  # Textual's own lines of input send it to the terminal as it is
        if self._settling is not None:
            if isinstance(message, events.MouseMove) and self._input:
                last = self._input[-1]
                if isinstance(last, events.MouseMove) and last.button == message.button:
                    self._input.pop()
            self._input.append(message)
            return True
        return self._pass_on(message)

    def _pass_on(self, message: Message) -> bool:
        sent = super().post_message(message)
        if sent and self._needs_order(message):
            task = asyncio.get_running_loop().create_task(self._settle(message))
            self._settling = None if task.done() else task
        return sent

    def _needs_order(self, message: Message) -> bool:
        if isinstance(message, events.Key):
            return not (message.is_printable and isinstance(self.focused, Input))
        return isinstance(message, events.MouseDown | events.MouseUp | events.Paste)

    async def _settle(self, message: Message) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLED):
                    # A key goes up to the application, which runs its action; what that posts goes up once more.
                    for _ in range(2):
                        await _reached(self)
                        for node in self._handlers(message):
                            await _reached(node)
                    await _reached(self.screen)
        except Exception as error:
            if self.is_running:
                self.fail(error)
        finally:
            self._settling = None
        waited = bool(self._input)
        while self._input and self._settling is None and self.is_running:
            self._pass_on(self._input.popleft())
        if waited and not self._input:
            self.call_later(self._draw_held)

    def _handlers(self, message: Message) -> list[MessagePump]:
        """Who handles this input, from the inside out."""
        start: Widget | None = self.focused
        if isinstance(message, events.MouseEvent):
            with suppress(Exception):  # there is nothing under the mouse
                start, _ = self.get_widget_at(message.x, message.y)
        if start is None:
            return []
        return [node for node in start.ancestors_with_self if isinstance(node, Widget)]

    # ------------------------------------------------------------------------------------- palette

    def action_command_palette(self) -> None:
        """ctrl+p."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(Palette(id="--command-palette"))

    def search_themes(self) -> None:
        """Choose among all themes."""
        self.push_screen(Palette(providers=[ThemeProvider], placeholder="Search for themes…"))


async def _reached(pump: MessagePump) -> None:
    """Return once `pump` has handled everything that is in its queue now."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if pump.call_later(_release, done):
        await done


def _release(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
