"""Writing to the terminal without ever waiting for it.

Owns the bytes that the terminal has not taken yet and an estimate of how fast it takes them. Invariants: no
call blocks, so a terminal that stands still holds up neither keys nor signals; the file's own description is
opened anew, so that nothing else that shares the terminal becomes non-blocking.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

LAST_WORDS = 0.15
"""Seconds that the terminal is given at the end to take what is left of a frame."""
GIVE_BACK = 0.45
"""Seconds that it is given after that for what restores it: a reader that is only busy must not miss this."""
MOST_WAITING = 4 << 20
"""Bytes after which what waits is thrown away: nobody reads this terminal."""
MOST_AT_ONCE = 1 << 16
"""Bytes of one write, more than a pseudo-terminal takes."""
FORGET = 60.0
"""Seconds without a full buffer after which a slow terminal is taken for a fast one again."""
FAST = 2.5e5
"""Bytes a second from which on a terminal is not slow: it takes the largest frames in a few tenths of a second."""
SLOWEST = 100.0
"""Bytes a second that every terminal is taken to be worth, also one that has taken nothing for a while."""
SLICE = 0.1
"""Seconds for which a slow terminal is given work at once: a key's echo comes behind it."""
LEAST, MOST = 0.2, 3.0
"""Seconds for which the buffer has to have been full without a break, and between two writes at most, so that the
terminal's speed can be told. A frame that did not fit at once says nothing of it."""
BUFFER = 20_000
"""Bytes that Linux keeps for a pseudo-terminal before a write fails."""


class Output:
    """The terminal behind `fd`. `on_free` is called when `is_full` has ended, `on_gone` once when there is no terminal
    any more; both from the event loop."""

    def __init__(
        self,
        fd: int,
        loop: asyncio.AbstractEventLoop,
        *,
        on_free: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._loop, self._on_free, self._on_gone = loop, on_free, on_gone
        self._fd, self._blocks = _own_description(fd)
        self._left = bytearray()
        self._watching = self._is_gone = self._is_flush_due = False
        self._rate: float | None = None
        """Bytes a second that the terminal takes; None: no limit was met."""
        self._empty_at = 0.0
        """When what was written has probably been shown."""
        self._full_at = float("-inf")
        """When the system's buffer was last found full."""
        self._measured_from = 0.0
        self._taken_since = 0
        """Bytes that the buffer has taken since then. It was full all the time: the terminal has taken as many."""
        self._wakes: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """What is drawn now would only come later: the terminal is busy with what was written last."""
        return self._watching or (self._rate is not None and time.monotonic() < self._empty_at)

    @property
    def limit(self) -> int | None:
        """Bytes of a frame that a slow terminal is given at once; None: it takes all of it."""
        return None if self._rate is None else max(1000, int(self._rate * SLICE))

    def write(self, text: str) -> None:
        """Hand `text` over; it leaves with the next `flush`, which comes by itself."""
        if self._is_gone:
            return
        self._left += text.encode("utf-8", "replace")
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write as much as the terminal takes now."""
        self._is_flush_due = False
        if self._left and not self._watching:
            self._push()

    def finish(self, text: str, seconds: float = LAST_WORDS) -> bool:
        """Write `text` as the last thing. What waited before it is thrown away if the terminal does not take it
        in time. Returns whether the terminal took it."""
        self._stop_watching()
        end = time.monotonic() + seconds
        drained = self._drain(end)
        if not drained:
            self._left[:] = b"\x18"  # CAN ends a control sequence of which only half was taken
        self._left += text.encode()
        return self._drain(end + GIVE_BACK) and drained

    def close(self) -> None:
        """Give the descriptor back."""
        self._stop_watching()
        if self._wakes is not None:
            self._wakes.cancel()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._is_gone = -1, True

    # ------------------------------------------------------------------------------------- inside

    def _drain(self, end: float) -> bool:
        while self._left and not self._is_gone:
            left = end - time.monotonic()
            if not self._write_some() and (
                left <= 0 or not select.select([], [self._fd], [], max(0.0, left))[1]
            ):
                return False
        return not self._is_gone

    def _write_some(self) -> int:
        """Bytes that were taken; 0 if the terminal is full."""
        if self._blocks and not select.select([], [self._fd], [], 0)[1]:
            return 0
        try:
            # A copy: a bytearray cannot be cut while a write in another thread still holds it.
            taken = os.write(self._fd, bytes(self._left[: 256 if self._blocks else MOST_AT_ONCE]))
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # hung up
            self._left.clear()
            self._is_gone = True
            self._loop.call_soon(self._on_gone)
            return 0
        del self._left[:taken]
        return taken

    def _push(self) -> None:
        taken = 0
        while self._left and (some := self._write_some()):
            taken += some
        if self._is_gone:
            self._stop_watching()
            return
        now = time.monotonic()
        if self._watching:
            self._measure(now, taken)
        if self._left:
            self._full_at = now
            if not self._watching:
                self._measured_from, self._taken_since = now, 0
                self._watching = True
                self._loop.add_writer(self._fd, self._push)
            if len(self._left) > MOST_WAITING:
                self._left[:] = b"\x18"
        elif self._watching:
            self._stop_watching()
            if self._rate is not None:
                self._empty_at = now + min(1.0, BUFFER / self._rate)
                self._wake(self._empty_at)
            self._on_free()
        elif self._rate is not None:
            self._empty_at = max(now, self._empty_at) + taken / self._rate
            self._wake(self._empty_at)
            if now - self._full_at > FORGET:
                self._rate = None

    def _measure(self, now: float, taken: int) -> None:
        """The terminal has made room for `taken` bytes. After a long time without any it had stood still."""
        if now - self._full_at > MOST:
            self._measured_from, self._taken_since = now, 0
            return
        self._taken_since += taken
        since = now - self._measured_from
        if since >= LEAST:
            rate = max(SLOWEST, self._taken_since / since)
            self._rate = rate if rate < FAST else None
            self._measured_from, self._taken_since = now, 0

    def _wake(self, at: float) -> None:
        if self._wakes is not None:
            self._wakes.cancel()
        self._wakes = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_free)

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)


def _own_description(fd: int) -> tuple[int, bool]:
    """(descriptor of the same terminal, whether a write to it may wait)."""
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), False
    except OSError:  # no terminal, or its name means nothing here
        return os.dup(fd), True
