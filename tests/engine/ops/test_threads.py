"""ThreadChoice: finds the faster number of threads, and gives it up when it no longer is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.ops.cpu.threads import SMALL, FreeCores, ThreadChoice, TorchThreads


def choice(most: int) -> ThreadChoice:
    """On a machine that others leave alone."""
    return ThreadChoice(lambda: most, free=lambda: most)


def run(choice: ThreadChoice, steps: int, cost: Callable[[int], float], tokens: int = 1) -> list[int]:
    used = []
    for _ in range(steps):
        used.append(choice.choose(tokens))
        choice.took(cost(used[-1]))
    return used


def test_a_quiet_machine_keeps_all_threads_and_tries_less_and_less_often() -> None:
    used = run(choice(2), 4000, lambda n: 1 / n)
    assert used[0] == 2
    assert used.count(1) <= 13, "a trial that is hopeless costs one slow step, not four"


def test_where_barriers_are_dear_one_thread_wins_soon_and_loses_when_that_ends() -> None:
    two = choice(2)
    busy = run(two, 200, lambda n: 1.0 if n == 1 else 4.0)
    assert busy[25:].count(1) > 160
    quiet = run(two, 2000, lambda n: 1 / n)
    assert quiet[-500:].count(2) > 450


def test_many_cores_are_searched_step_by_step() -> None:
    cost = {1: 8.0, 2: 4.0, 4: 3.0, 8: 5.0, 16: 9.0}
    used = run(choice(16), 3000, cost.__getitem__)
    assert sum(used[-300:]) / 300 < 4.6


def test_large_steps_and_single_cores_are_left_alone() -> None:
    assert set(run(choice(4), 500, lambda n: n, tokens=SMALL + 1)) == {4}
    assert set(run(choice(1), 500, lambda n: n)) == {1}


class Busy:
    """A machine of `cores` cores on which others want some; its clock goes on with every step.

    A step of n threads takes 1 / n seconds of work in a hundred parts. Where more is wanted than there is, every
    part waits for the slice of another process.
    """

    def __init__(self, cores: int) -> None:
        self.cores, self.now, self.others = cores, 0.0, 0
        self._seen = 0.0
        self._busy = 0.0
        free = FreeCores(self.load, lambda: self.now, cores)
        self.choice = ThreadChoice(lambda: cores, free)
        self.used: list[int] = []

    def load(self) -> float:
        """The mean since the last call, like ForeignLoad."""
        mean, passed = self._busy, self.now - self._seen
        self._busy, self._seen = 0.0, self.now
        return mean / passed

    def pass_time(self, seconds: float, threads: int) -> None:
        wanted = self.others + threads
        self._busy += seconds * self.others * min(1.0, self.cores / max(1, wanted))
        self.now += seconds

    def cost(self, threads: int) -> float:
        alone = 0.01 / threads
        return alone if threads + self.others <= self.cores else alone + 0.25 * (threads > 1) + 0.002

    def step(self, tokens: int = 6) -> float:
        threads = self.choice.choose(tokens)
        seconds = self.cost(threads)
        self.pass_time(seconds, threads)
        self.choice.took(seconds)
        self.used.append(threads)
        return seconds


@pytest.mark.parametrize("tokens", [1, 6, 102, 512])
def test_foreign_load_is_noticed_within_a_second_and_forgotten_within_one(tokens: int) -> None:
    m = Busy(2)
    for _ in range(100):
        m.step(tokens)
    assert m.used[-1] == 2
    m.others, start = 2, m.now
    while m.step(tokens) > 0.1:
        pass
    assert m.now - start < 1
    assert sum(m.step(tokens) for _ in range(500)) < 1.2 * 500 * m.cost(1)
    m.others, start = 0, m.now
    while m.used[-1] != 2:
        m.step(tokens)
    assert m.now - start < 1
    assert [m.step(tokens) for _ in range(5)] == [m.cost(2)] * 5


def test_after_a_pause_the_load_of_the_pause_counts_for_a_moment_only() -> None:
    m = Busy(2)
    m.step()
    m.pass_time(600, 0)
    m.others = 2
    start = m.now
    while m.step() > 0.1:
        pass
    assert m.now - start < 1


def test_many_cores_give_way_one_by_one() -> None:
    """Three busy processes on eight cores leave five, and nothing flips between two numbers."""
    m = Busy(8)
    m.others = 3
    for _ in range(600):
        m.step(512)
    assert set(m.used[-200:]) == {5}


def test_a_load_at_the_border_does_not_flip() -> None:
    now, load = 0.0, 0.3
    free = FreeCores(lambda: load, lambda: now, 2)

    def look() -> int:
        nonlocal now
        now += 0.25
        return free()

    assert look() == 2
    load = 0.4
    assert look() == 1
    load = 0.3
    assert look() == 1
    load = 0.1
    assert look() == 2
    assert FreeCores(lambda: None, lambda: 1e9, 2)() == 2, "a system that does not say leaves all"
    assert FreeCores(lambda: 99.0, iter([0.0, 1.0]).__next__, 2)() == 1


def test_torchs_own_threads_follow_and_come_back() -> None:
    before = torch.get_num_threads()
    free = 4
    try:
        torch.set_num_threads(3)
        threads = TorchThreads(lambda: free)
        threads.follow()
        assert torch.get_num_threads() == 3
        free = 1
        threads.follow()
        assert torch.get_num_threads() == 1
        free = 4
        threads.follow()
        assert torch.get_num_threads() == 3
        torch.set_num_threads(2)
        threads.follow()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
