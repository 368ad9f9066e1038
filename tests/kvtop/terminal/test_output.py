"""Output: no call waits for the terminal, also one that stands still or goes away."""

from __future__ import annotations

import asyncio
import os
import pty
import time
import tty
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtop.terminal import output
from kvtop.terminal.output import Output

LONG = "0123456789" * 10_000
"""More than a pseudo-terminal keeps."""


class Reader:
    """The other end of a terminal."""

    def __init__(self) -> None:
        self.fd, self.theirs = pty.openpty()
        tty.setraw(self.theirs)
        os.set_blocking(self.fd, False)
        self.free = self.gone = 0
        self.out = Output(
            self.theirs, asyncio.get_running_loop(), on_free=self._is_free, on_gone=self._is_gone
        )

    def _is_free(self) -> None:
        self.free += 1

    def _is_gone(self) -> None:
        self.gone += 1

    async def read(self, seconds: float = 0.2, rate: float = 1e9) -> bytes:
        """What comes within this time, at most `rate` bytes a second."""
        got, begin = b"", time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            try:
                got += os.read(self.fd, max(1, min(4096, int(passed * rate) - len(got))))
            except BlockingIOError:
                pass
            await asyncio.sleep(0.001)
        return got


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    reader.out.close()
    os.close(reader.theirs)


async def test_what_is_written_arrives_without_a_flush(reader: Reader) -> None:
    reader.out.write("a")
    reader.out.write("é\ud800")
    assert await reader.read(0.05) == "aé?".encode()
    assert not reader.out.is_full and reader.out.limit is None


async def test_a_terminal_that_takes_nothing_holds_nobody_up(reader: Reader) -> None:
    begin = time.monotonic()
    reader.out.write(LONG)
    reader.out.flush()
    assert time.monotonic() - begin < 0.1 and reader.out.is_full
    assert await reader.read(1.0) == LONG.encode()
    assert reader.free == 1 and not reader.out.is_full
    assert reader.out.limit is None, "a short stop makes no slow terminal"


async def test_the_end_is_written_in_time_or_not_at_all(reader: Reader) -> None:
    reader.out.write(LONG)
    reader.out.flush()
    begin = time.monotonic()
    assert not reader.out.finish("bye", 0.2)
    assert time.monotonic() - begin < output.LAST_WORDS + output.GIVE_BACK + 1
    assert not (await reader.read(0.1)).endswith(LONG.encode())


async def test_the_end_comes_behind_all_that_waits(reader: Reader) -> None:
    reader.out.write(LONG)
    reader.out.flush()
    reading = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(reader.read(1.0))))
    assert await asyncio.to_thread(lambda: None) is None
    took = await asyncio.to_thread(reader.out.finish, "bye", 5.0)
    assert took and (await reading).endswith(b"89bye")


async def test_what_nobody_reads_is_not_kept_for_ever(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_WAITING", 50_000)
    for _ in range(20):
        reader.out.write(LONG)
        await asyncio.sleep(0)
    got = await reader.read(0.5)
    assert 10_000 < len(got) < 100_000 and reader.free == 1
    reader.out.write("after")
    assert (await reader.read(0.1)).endswith(b"after")


async def test_a_terminal_that_goes_away_is_told_once(reader: Reader) -> None:
    reader.out.write(LONG)
    reader.out.flush()
    os.close(reader.fd)
    await asyncio.sleep(0.1)
    reader.out.write("more")
    reader.out.flush()
    assert not reader.out.finish("bye")
    await asyncio.sleep(0.05)
    assert reader.gone == 1 and not reader.out.is_full


async def test_a_slow_terminal_is_left_time(reader: Reader) -> None:
    """At 40 kB/s: the next slice waits until the system's buffer is probably empty."""
    reading = asyncio.create_task(reader.read(4.5, rate=40_000))
    for n in range(2):
        reader.out.write(LONG[:70_000])
        reader.out.flush()
        while reader.free == n:
            await asyncio.sleep(0.005)
    limit = reader.out.limit
    assert limit is not None and 2000 < limit < 8000 and reader.out.is_full
    begin = time.monotonic()
    while reader.out.is_full:
        await asyncio.sleep(0.005)
    assert 0.1 < time.monotonic() - begin < 10
    await asyncio.sleep(0.05)
    assert reader.free > 2, "it says when"
    await reading


async def test_a_terminal_that_took_nothing_and_goes_away_ends_nothing(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its measured speed is never nothing, by which a time would be divided."""
    monkeypatch.setattr(output, "LEAST", 0.0)
    reader.out.write(LONG)
    await asyncio.sleep(0.05)
    reader.out._measure(time.monotonic(), 0)
    assert reader.out.limit is not None and reader.out.limit > 0
    os.close(reader.fd)
    await asyncio.sleep(0.1)
    assert reader.gone == 1


async def test_frames_that_fill_the_buffer_do_not_make_a_terminal_slow(reader: Reader) -> None:
    """It takes them at once; that few are written says nothing of how many it could take."""
    reading = asyncio.create_task(reader.read(2.0))
    for _ in range(8):
        reader.out.write(LONG[:40_000])
        await asyncio.sleep(0.2)
        assert reader.out.limit is None and not reader.out.is_full
    assert reader.free == 8, "each was more than fitted"
    await reading


async def test_a_file_is_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        out = Output(file.fileno(), asyncio.get_running_loop(), on_free=list, on_gone=list)
        out.write(LONG)
        out.flush()
        assert out.finish("bye")
        out.close()
    assert path.read_text() == LONG + "bye"
