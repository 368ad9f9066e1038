"""On a real terminal (a pty): the first frame, what is shown, how it ends, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from kvtop.record.verify import verify

PROGRAM = Path(__file__).parent.with_name("on_terminal.py")
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"
CURSOR_ON, MOUSE_OFF = b"\x1b[?25h", b"\x1b[?1003l"


class Terminal:
    """A child process on a pty of width x height, its output kept and drawn."""

    def __init__(
        self,
        *args: str,
        size: tuple[int, int] = (100, 30),
        env: dict[str, str] | None = None,
        stderr: Path | None = None,
    ) -> None:
        self.raw = b""
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)
        self.begin = time.monotonic()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
            # Readline, where pytest loads it, plants COLUMNS and LINES: a program on a terminal must not care.
            if stderr is not None:
                os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
            own = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})}
            os.execve(sys.executable, [sys.executable, str(PROGRAM), *args], own)

    @property
    def text(self) -> str:
        """What a reader sees."""
        return "\n".join(self.screen.display)

    def send(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._fd, keys)

    def read(self, seconds: float, most: int = 1 << 16) -> bool:
        """Take output for at most this long; False once the program is gone."""
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, most)
            except OSError:
                return False
            self.raw += data
            # The emulator does not know the queries of newer terminals.
            self._stream.feed(re.sub(rb"\x1b\[[>=<][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$[a-z]", b"", data))
            return bool(data)
        return True

    def until(self, done: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for the screen to say something."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end and self.read(0.05), self.text

    def wait(self) -> int:
        """Exit code."""
        end = time.monotonic() + 30
        while self.read(0.1):
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def gone_within(self, seconds: float) -> int:
        """Exit code of a program whose output nobody reads."""
        end = time.monotonic() + seconds
        while (done := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError("it still runs")
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(done[1])

    def close(self) -> None:
        """The window is closed."""
        os.close(self._fd)

    @property
    def is_raw(self) -> bool:
        """Keys go to the program one by one, as it asked for."""
        return not termios.tcgetattr(self._fd)[3] & termios.ICANON

    def make_cooked(self) -> None:
        """As a shell sets the terminal for itself."""
        attrs = termios.tcgetattr(self._fd)
        attrs[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(self._fd, termios.TCSANOW, attrs)

    def assert_restored(self) -> None:
        """Main screen, cursor and mouse are back; nothing but `talk` follows."""
        assert self.raw.count(ALTERNATE_ON) == self.raw.count(ALTERNATE_OFF) == 1
        tail = self.raw[self.raw.rindex(ALTERNATE_OFF) :]
        assert CURSOR_ON in tail and MOUSE_OFF in self.raw

    @property
    def talk(self) -> str:
        """What was said after the screen was given back, without control sequences."""
        tail = self.raw[self.raw.rindex(ALTERNATE_OFF) :] if ALTERNATE_OFF in self.raw else self.raw
        return re.sub(rb"\x1b\[[?<>=]?[0-9;]*[a-zA-Z]", b"", tail).decode().strip()


@pytest.mark.parametrize(
    ("keys", "code"), [(b"\x11", 0), (b"\x03", 130), (b"\x1bq", 0)], ids=["ctrl+q", "ctrl+c", "Esc q"]
)
def test_it_shows_and_gives_the_terminal_back(keys: bytes, code: int) -> None:
    terminal = Terminal("plain")
    terminal.until(lambda: "Enter sends example 1 of 5" in terminal.text)
    assert "KV pool · 1 cell = 1 physical block = 16 tokens" in terminal.text
    assert terminal.text.count("·" * 50) >= 9, "every block is visible"
    if keys.startswith(b"\x1b"):  # alone it is Esc, with a letter close behind it would be Alt
        terminal.send(b"\x1b")
        terminal.until(lambda: "i prompt" in terminal.text)
    terminal.send(keys[-1:])
    if keys == b"\x03":
        terminal.until(lambda: "ctrl+c again quits" in terminal.text)
        terminal.send(keys)
    assert terminal.wait() == code
    terminal.assert_restored()
    assert terminal.talk == ""


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b"\xff", "› \ufffd"),
        (b"\x80", "› \ufffd"),
        (b"caf\xe9 au lait", "› caf\ufffd au lait"),
        (b"\x1b[M\x20\x98\x30", "key mode: letters act"),
        (b"\x1b[99999999999;1u", "› [99999999999;1u"),
    ],
    ids=["ff", "80", "Latin-1", "X10 mouse", "a key beyond Unicode"],
)
def test_odd_bytes_are_replaced(sent: bytes, shown: str) -> None:
    terminal = Terminal("plain", size=(130, 40))
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(sent)
    terminal.until(lambda: shown in terminal.text)
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    assert terminal.talk == ""


@pytest.mark.parametrize("where", ["crash", "crash-input", "crash-output", "crash-worker", "crash-panic"])
def test_whatever_dies_says_one_line_and_ends_with_1(where: str) -> None:
    terminal = Terminal(where)
    terminal.until(lambda: "Enter sends example 1" in terminal.text or ALTERNATE_OFF in terminal.raw)
    if where == "crash-input":
        terminal.send(b"x")
    assert terminal.wait() == 1
    terminal.assert_restored()
    assert terminal.talk.startswith("kvtop crashed: ") and "\n" not in terminal.talk


def test_two_enters_and_the_sentence_stands() -> None:
    terminal = Terminal("plain", size=(80, 24))
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(b"\r\r")
    terminal.until(lambda: "READ " in terminal.text and "(cold" in terminal.text)
    assert re.search(r"READ [\d,]+ of [\d,]+ tokens", terminal.text)
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    terminal.assert_restored()


def test_a_paste_with_an_escape_sends_nothing() -> None:
    terminal = Terminal("plain", size=(120, 40))
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(b"\x1b[200~one \x1b[31mtwo\nthree\n\x1b[201~")
    terminal.until(lambda: "› one ␛[31mtwo three" in terminal.text)
    assert "Nothing was asked yet" in terminal.text
    terminal.send(b"\x11")
    assert terminal.wait() == 0


def test_with_stderr_in_a_file_it_draws_on_the_terminal(tmp_path: Path) -> None:
    """`kvtop 2>log`"""
    log = tmp_path / "log"
    terminal = Terminal("plain", stderr=log)
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    terminal.assert_restored()
    assert log.read_bytes() == b""


def test_what_is_printed_never_reaches_the_screen() -> None:
    terminal = Terminal("noisy")
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    assert b"C writes" not in terminal.raw and b"python prints" not in terminal.raw
    terminal.send(b"\x1bOS")  # F4
    printed = ("C writes to stderr", "C writes to stdout", "a library warns")
    terminal.until(lambda: all(line in terminal.text for line in printed))
    assert "python prints" in terminal.text
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    assert terminal.talk == ""


def test_a_start_that_fails_says_one_line() -> None:
    terminal = Terminal("broken")
    assert terminal.wait() == 2
    terminal.assert_restored()
    assert terminal.talk == "kvtop: no such model; try --model Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
@pytest.mark.parametrize("stalled", [False, True], ids=["read", "stalled"])
def test_signals_give_the_terminal_back(
    number: signal.Signals, code: int, stalled: bool, tmp_path: Path
) -> None:
    """Also when it takes nothing, while a load runs; what is recorded is whole."""
    recording = tmp_path / "a.jsonl"
    terminal = Terminal("load", str(recording))
    terminal.until(lambda: " running" in terminal.text)
    assert terminal.is_raw
    if stalled:
        time.sleep(1.5)
    os.kill(terminal.pid, number)
    begin = time.monotonic()
    if stalled:
        assert terminal.gone_within(5) == code
    else:
        assert terminal.wait() == code
        terminal.assert_restored()
    assert time.monotonic() - begin < 5
    assert not terminal.is_raw
    assert verify(recording).ok


def wipe(terminal: Terminal) -> None:
    """What somebody else's output does to the screen."""
    terminal.screen.reset()
    assert "KV pool" not in terminal.text


@pytest.mark.parametrize("by", ["ctrl+z", "SIGTSTP"])
def test_it_stops_and_comes_back_whole(by: str) -> None:
    terminal = Terminal("plain")
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(b"half")
    terminal.until(lambda: "› half" in terminal.text)
    if by == "ctrl+z":
        terminal.send(b"\x1a")
    else:
        os.kill(terminal.pid, signal.SIGTSTP)
    terminal.until(lambda: ALTERNATE_OFF in terminal.raw)
    _, status = os.waitpid(terminal.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and not terminal.is_raw
    wipe(terminal)
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.until(lambda: "KV pool" in terminal.text and "› half" in terminal.text)
    assert terminal.is_raw
    terminal.send(b"!")
    terminal.until(lambda: "› half!" in terminal.text)
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    assert not terminal.is_raw and terminal.raw.count(ALTERNATE_ON) == terminal.raw.count(ALTERNATE_OFF) == 2


def test_after_a_stop_that_it_did_not_see_it_comes_back_whole() -> None:
    terminal = Terminal("plain")
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    os.kill(terminal.pid, signal.SIGSTOP)
    os.waitpid(terminal.pid, os.WUNTRACED)
    wipe(terminal)
    terminal.make_cooked()
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.until(lambda: "KV pool" in terminal.text and "Enter sends example 1" in terminal.text)
    assert terminal.is_raw
    terminal.send(b"\x11")
    assert terminal.wait() == 0
    assert not terminal.is_raw


def test_ctrl_l_draws_everything_again() -> None:
    terminal = Terminal("plain")
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    wipe(terminal)
    terminal.send(b"\x0c")
    terminal.until(lambda: "KV pool" in terminal.text and "Enter sends example 1" in terminal.text)
    terminal.send(b"\x11")
    assert terminal.wait() == 0


def test_a_key_echoes_at_once_on_a_slow_line(tmp_path: Path) -> None:
    """20 kB/s, while a load runs that would send twice as much."""
    terminal = Terminal("load", str(tmp_path / "a.jsonl"), size=(120, 40))
    terminal.until(lambda: " running" in terminal.text)
    slow = Slow(terminal, 20_000)
    slow.read(4)
    typed, waits = "", []
    for letter in "abcdefgh":
        typed += letter
        begin = time.monotonic()
        terminal.send(letter.encode())
        while f"› {typed}" not in terminal.text:
            slow.read(0.02)
            assert time.monotonic() < begin + 10, terminal.text
        waits.append(time.monotonic() - begin)
        slow.read(0.2)
    assert sorted(waits)[-2] < 0.5, waits
    terminal.send(b"\x11")
    assert terminal.wait() == 0


class Slow:
    """Reads a terminal's output at `rate` bytes a second."""

    def __init__(self, terminal: Terminal, rate: float) -> None:
        self.terminal, self.rate = terminal, rate
        self._spent = time.monotonic()
        """Up to when the rate is used up."""

    def read(self, seconds: float) -> None:
        """For so long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._spent = max(self._spent, now - 0.05)
            room = int((now - self._spent) * self.rate)
            before = len(self.terminal.raw)
            if room > 100:
                self.terminal.read(0.005, room)
            else:
                time.sleep(0.002)
            self._spent += (len(self.terminal.raw) - before) / self.rate


def test_a_terminal_that_is_closed_ends_the_program(tmp_path: Path) -> None:
    recording = tmp_path / "a.jsonl"
    terminal = Terminal("load", str(recording))
    terminal.until(lambda: " running" in terminal.text)
    time.sleep(1.5)  # nothing is read: it stalls
    terminal.close()
    assert terminal.gone_within(5) == 129
    assert verify(recording).ok


def test_without_colour_and_in_a_poor_terminal() -> None:
    terminal = Terminal("plain", env={"NO_COLOR": "1", "TERM": "tmux-256color", "COLORTERM": ""})
    terminal.until(lambda: "Enter sends example 1" in terminal.text)
    terminal.send(b"\r\r")
    terminal.until(lambda: "◆◆◆" in terminal.text)
    assert not re.search(rb"\x1b\[[0-9;]*[34]8;[25]", terminal.raw)
    terminal.send(b"\x11")
    assert terminal.wait() == 0
