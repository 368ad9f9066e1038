"""Clocks: virtual time is exact when nobody watches, in step with the wall when somebody does, and never goes back."""

from __future__ import annotations

import threading
import time

import pytest

from engine.clock import VirtualClock, WallClock


class Wall:
    """A wall clock that moves when somebody waits, by as long as they wait."""

    def __init__(self) -> None:
        self.t = 100.0

    def __call__(self) -> float:
        return self.t

    def event(self, set_after: float | None = None) -> Wait:
        return Wait(self, set_after)


class Wait(threading.Event):
    """An event on that wall; somebody sets it `set_after` seconds after a wait began."""

    def __init__(self, wall: Wall, set_after: float | None) -> None:
        super().__init__()
        self._wall, self._after = wall, set_after

    def wait(self, timeout: float | None = None) -> bool:
        early = self._after is not None and (timeout is None or self._after < timeout)
        passed = self._after if early else timeout
        assert passed is not None, "nobody would ever wake it"
        self._wall.t += passed
        return early


def paced(speed: float) -> tuple[VirtualClock, Wall]:
    wall = Wall()
    clock = VirtualClock(speed, wall=wall)
    clock._closed = wall.event()
    return clock, wall


def test_as_fast_as_possible_steps_take_no_time() -> None:
    clock = VirtualClock()
    clock.start(2.0)
    for _ in range(1000):
        clock.advance(0.5)
    assert clock.now() == 502.0
    clock.wait(threading.Event(), 600.0)
    assert clock.now() == 600.0
    clock.wait(threading.Event(), 10.0)
    assert clock.now() == 600.0, "what is due already is not waited for"


def test_as_fast_as_possible_it_stands_still_while_it_waits_for_somebody() -> None:
    clock, wake = VirtualClock(), threading.Event()
    threading.Timer(0.02, wake.set).start()
    clock.wait(wake, None)
    assert clock.now() == 0.0


def test_paced_steps_take_their_part_of_the_wall_whatever_else_takes_time() -> None:
    clock, wall = paced(100.0)
    for _ in range(20):
        clock.advance(0.5)
        wall.t += 0.001  # the engine's own work between two steps
    assert clock.now() == pytest.approx(10.0)
    assert wall.t == pytest.approx(100.101)


def test_paced_it_goes_on_while_it_waits_until_it_is_woken() -> None:
    clock, wall = paced(100.0)
    clock.wait(wall.event(set_after=0.05), None)
    assert clock.now() == pytest.approx(5.0)
    clock.wait(wall.event(set_after=0.05), 6.0)
    assert clock.now() == 6.0
    clock.wait(wall.event(set_after=0.05), 60.0)
    assert clock.now() == pytest.approx(11.0)
    assert wall.t == pytest.approx(100.11)


def test_a_reader_sees_a_step_under_way_and_time_never_goes_back() -> None:
    clock, over = VirtualClock(speed=200.0), threading.Event()
    seen: list[list[float]] = [[], []]

    def read(into: list[float]) -> None:
        while not over.is_set():
            into.append(clock.now())

    readers = [threading.Thread(target=read, args=(s,)) for s in seen]
    for reader in readers:
        reader.start()
    wake = threading.Event()
    for i in range(20):
        clock.advance(0.5)
        if i % 5 == 0:
            wake.clear()
            threading.Timer(0.003, wake.set).start()
            clock.wait(wake, None)
            here = clock.now()
            assert all(not s or s[-1] <= here for s in seen)
    over.set()
    for reader in readers:
        reader.join()
    for s in seen:
        assert s == sorted(s)
        assert len({round(t, 3) for t in s}) > 10, "time flows while a step is under way"


@pytest.mark.parametrize(("behind", "made_up"), [(60.0, 0.0), (0.05, 0.05)], ids=["a pause", "overhead"])
def test_little_is_caught_up_with_and_much_is_let_go(behind: float, made_up: float) -> None:
    clock, wall = paced(1.0)
    wall.t += behind
    clock.advance(0.07)
    assert clock.now() == 0.07
    assert wall.t == pytest.approx(100.07 + behind - made_up)


def test_an_engine_slower_than_its_pace_does_not_wait() -> None:
    clock, wall = paced(1000.0)
    for _ in range(10):
        wall.t += 0.02
        clock.advance(1.0)
    assert clock.now() == pytest.approx(10.0)
    assert wall.t == pytest.approx(100.2, abs=0.002)


def test_closed_it_holds_nobody_up() -> None:
    clock = VirtualClock(speed=1.0)
    threading.Timer(0.02, clock.close).start()
    start = time.perf_counter()
    clock.advance(3600.0)
    clock.advance(3600.0)
    assert time.perf_counter() - start < 5
    assert clock.now() == 7200.0


def test_the_walls_clock_waits_until() -> None:
    clock = WallClock()
    clock.wait(threading.Event(), 0.02)
    assert 0.02 <= clock.now() < 5
    wake = threading.Event()
    wake.set()
    clock.wait(wake, None)
