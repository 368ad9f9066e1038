"""ThreadChoice: finds the faster number of threads, and gives it up when it no longer is."""

from __future__ import annotations

from collections.abc import Callable

from engine.ops.cpu.threads import SMALL, ThreadChoice


def run(choice: ThreadChoice, steps: int, cost: Callable[[int], float], tokens: int = 1) -> list[int]:
    used = []
    for _ in range(steps):
        used.append(choice.choose(tokens))
        choice.took(cost(used[-1]))
    return used


def test_a_quiet_machine_keeps_all_threads_and_tries_less_and_less_often() -> None:
    used = run(ThreadChoice(lambda: 2), 4000, lambda n: 1 / n)
    assert used[0] == 2
    assert used.count(1) <= 13, "a trial that is hopeless costs one slow step, not four"


def test_where_barriers_are_dear_one_thread_wins_soon_and_loses_when_that_ends() -> None:
    choice = ThreadChoice(lambda: 2)
    busy = run(choice, 200, lambda n: 1.0 if n == 1 else 4.0)
    assert busy[25:].count(1) > 160
    quiet = run(choice, 2000, lambda n: 1 / n)
    assert quiet[-500:].count(2) > 450


def test_many_cores_are_searched_step_by_step() -> None:
    cost = {1: 8.0, 2: 4.0, 4: 3.0, 8: 5.0, 16: 9.0}
    used = run(ThreadChoice(lambda: 16), 3000, cost.__getitem__)
    assert sum(used[-300:]) / 300 < 4.6


def test_large_steps_and_single_cores_are_left_alone() -> None:
    assert set(run(ThreadChoice(lambda: 4), 500, lambda n: n, tokens=SMALL + 1)) == {4}
    assert set(run(ThreadChoice(lambda: 1), 500, lambda n: n)) == {1}
