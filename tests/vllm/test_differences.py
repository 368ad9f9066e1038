"""Shows every intended difference: with its switch off the two sides differ, with all switches on they agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.differences import DIFFERENCES, as_table, laid_over
from tests.vllm.storm import Pair
from tests.vllm.terms import Ask, Setup, Step
from tests.vllm.theirs import Theirs


def prompt(length: int, family: int = 0) -> list[int]:
    return [(family * 131 + i * 7 + 1) % 1000 for i in range(length)]


class Duel:
    """Both engines without the comparison, to see what each side does."""

    def __init__(self, setup: Setup, models: tuple[type, ...]) -> None:
        self.pair = Pair(setup, models)
        self.ours, self.theirs = self.pair.ours, self.pair.theirs

    def add(self, *asks: Ask) -> None:
        for ask in asks:
            self.pair.add(ask)

    def step(self, abort: int | None = None) -> tuple[Step, Step]:
        ours, theirs = self.ours.begin(), self.theirs.begin()
        if abort is not None:
            self.pair.abort(abort)
        self.theirs.finish(self.ours.finish())
        return ours, theirs

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


Scenario = Callable[[Duel], bool]
"""Plays it. True if both did the same. Otherwise asserts what each side did."""

SCENARIOS: dict[str, tuple[Setup, Scenario]] = {}


def scenario(name: str, setup: Setup) -> Callable[[Scenario], Scenario]:
    def keep(play: Scenario) -> Scenario:
        SCENARIOS[name] = (setup, play)
        return play

    return keep


@scenario("refuses", Setup(num_blocks=5, block_size=4, caching=False))
def refuses(duel: Duel) -> bool:
    """16 slots, a prompt of 20 tokens and then one of 4."""
    duel.add(Ask(0, prompt(20)), Ask(1, prompt(4, 1)))
    ours, theirs = duel.step()
    assert ours.scheduled == [(1, 0, 4)] and duel.ours.state().finished == {0: "refused"}
    assert theirs == ours or theirs.scheduled == [(0, 0, 20)]  # 20 tokens into four blocks of 4
    return theirs == ours


@scenario("decodes first", Setup(num_blocks=40, block_size=1, budget=8, max_num_seqs=2, threshold=4))
def decodes_first(duel: Duel) -> bool:
    """A step with a budget of four tokens: on a CPU the budget shrinks as contexts grow."""
    duel.add(Ask(0, prompt(30)), Ask(1, prompt(2, 1)))
    duel.step()
    duel.ours.runner.step_budget = lambda budget, context: 4  # type: ignore[method-assign]
    duel.theirs.scheduler.max_num_scheduled_tokens = 4
    ours, theirs = duel.step()
    assert ours.scheduled == [(1, 2, 1), (0, 4, 3)]  # the answer goes on
    assert theirs == ours or theirs.scheduled == [(0, 4, 4)]  # the prompt takes it all
    return theirs == ours


@scenario("goes on", Setup(num_blocks=8, block_size=4, budget=20, threshold=4))
def goes_on(duel: Duel) -> bool:
    """Seven blocks: five hold chunks of a prompt, two hold an answer that needs a third one."""
    duel.add(Ask(0, prompt(24), 4), Ask(1, prompt(4, 1), 12))
    duel.steps(5)
    ours, theirs = duel.step()
    assert ours.preempted == theirs.preempted == [1]
    assert ours.scheduled == [(0, 20, 4)]
    assert theirs == ours or theirs.scheduled == []
    return theirs == ours


@scenario("promises", Setup(num_blocks=13, budget=512, threshold=64))
def promises(duel: Duel) -> bool:
    """Twelve blocks, two prompts of eight, both cut into chunks."""
    duel.add(Ask(0, prompt(128), 2), Ask(1, prompt(128, 1), 2))
    ours, theirs = duel.step()
    assert ours.scheduled == [(0, 0, 64)]
    if theirs == ours:
        return True
    assert theirs.scheduled == [(0, 0, 64), (1, 0, 64)]
    assert duel.step()[1].preempted == [1]  # 64 tokens for nothing
    return False


@scenario("stores computed", Setup(num_blocks=20, block_size=4))
def stores_computed(duel: Duel) -> bool:
    """A prompt arrives in the step in which another request's sampled token fills the same first block."""
    duel.add(Ask(0, prompt(3), 9))
    duel.step()
    duel.add(Ask(1, duel.ours.text_of(0) + [5], 1))
    ours, theirs = duel.step()
    assert ours.admitted == [(1, 0, False)]
    assert theirs == ours or theirs.admitted == [(1, 4, False)]
    duel.add(Ask(2, duel.ours.text_of(0)[:4] + [6], 1))
    after = [side.admitted for side in duel.step()]
    assert after == [[(2, 4, False)]] * 2  # a step later it is known to both
    return theirs == ours


@scenario("drops unwritten", Setup(num_blocks=20, block_size=4))
def drops_unwritten(duel: Duel) -> bool:
    """A prompt is aborted between its scheduling and its forward. Then it is sent again."""
    duel.add(Ask(0, prompt(10)))
    ours, theirs = duel.step(abort=0)
    assert ours.scheduled == theirs.scheduled == [(0, 0, 10)]
    assert (duel.ours.runner._kv == -1).all()  # nothing was ever written
    duel.add(Ask(1, prompt(10)))
    ours, theirs = duel.step()
    assert ours.admitted == [(1, 0, False)]
    assert theirs == ours or theirs.admitted == [(1, 8, False)]
    return theirs == ours


@scenario("looks again", Setup(num_blocks=40, budget=64, threshold=32))
def looks_again(duel: Duel) -> bool:
    """The same 128 tokens twice, in chunks of 32: the second reads the chunk of the first and continues after it."""
    duel.add(Ask(0, prompt(128)), Ask(1, prompt(128)))
    ours, theirs = duel.step()
    assert ours.scheduled == theirs.scheduled == [(0, 0, 32), (1, 32, 32)]
    ours, theirs = duel.step()
    assert ours.scheduled == [(0, 64, 32), (1, 96, 32)]  # each reads what the other has just computed
    assert theirs == ours or theirs.scheduled == [(0, 32, 32), (1, 64, 32)]
    return theirs == ours


@scenario("youngest copy", Setup(num_blocks=9, block_size=4))
def youngest_copy(duel: Duel) -> bool:
    """A prompt of whole blocks three times: its last block is computed each time and exists as block 2, 3 and 4."""
    for i in range(3):
        duel.add(Ask(i, prompt(8), 1))
        duel.step()
    assert duel.ours.state().queue == [5, 6, 7, 8, 2, 3, 4, 1]
    duel.add(Ask(3, prompt(17, 1), 1))  # five blocks: takes 2, which the hash finds
    duel.step()
    duel.add(Ask(4, prompt(9), 3))
    duel.step()
    ours, theirs = duel.ours.state().tables[4], duel.theirs.state().tables[4]
    assert ours[:2] == [1, 4]
    assert theirs == ours or theirs[:2] == [1, 3]
    return theirs == ours


@scenario("usable blocks", Setup(num_blocks=10, block_size=4, watermark=0.2))
def usable_blocks(duel: Duel) -> bool:
    """A fifth of nine blocks is one block, of ten it is two. Eight are free, seven are needed."""
    duel.add(Ask(0, prompt(4)), Ask(1, prompt(28, 1)))
    ours, theirs = duel.step()
    assert ours.scheduled == [(0, 0, 4), (1, 0, 28)]
    assert theirs == ours or theirs.scheduled == [(0, 0, 4)]
    return theirs == ours


@scenario("whole without chunks", Setup(max_model_len=512, budget=600, chunked=False, threshold=50))
def whole_without_chunks(duel: Duel) -> bool:
    """Two prompts that fit into one step as a whole."""
    duel.add(Ask(0, prompt(300), 2), Ask(1, prompt(200, 1), 2))
    ours, theirs = duel.step()
    assert ours.scheduled == [(0, 0, 300), (1, 0, 200)]
    assert theirs == ours or theirs.scheduled == [(0, 0, 50), (1, 0, 50)]
    return theirs == ours


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_shows_without_its_switch_and_is_gone_with_it(name: str) -> None:
    setup, play = SCENARIOS[name]
    assert play(Duel(setup, laid_over(without=name))) is False
    modelled = Duel(setup, laid_over())
    assert play(modelled) is True
    modelled.pair.compare(modelled.ours.state(), modelled.theirs.state())


@pytest.mark.parametrize("modelled", [False, True])
def test_by_priority_vllm_reads_blocks_that_nothing_wrote(modelled: bool) -> None:
    """A prompt of low priority has its turn, and the blocks of its chunk are stored. Then an older answer needs a
    block, and the prompt is preempted. When it resumes, only 24 of its tokens were ever computed."""
    theirs = Theirs(
        Setup(num_blocks=11, block_size=4, budget=20, threshold=8, priority=True),
        (DIFFERENCES["drops unwritten"].model,) if modelled else (),
    )
    theirs.add(Ask(0, prompt(40), 4, priority=9))
    theirs.add(Ask(1, prompt(1, 3), 1, priority=9))  # without it nobody would be cut short
    steps = []
    for i in range(6):
        if i == 1:
            theirs.add(Ask(2, prompt(7, 1), 4))
        step = theirs.begin()
        steps.append(step)
        theirs.finish({r: [7] for r, start, n in step.scheduled if r or start + n >= 40})
    computed = {at + i for s in steps[:5] for r, at, n in s.scheduled if r == 0 for i in range(n)}
    assert computed == set(range(24))
    assert [s.preempted for s in steps] == [[], [], [], [0], [], []]
    assert steps[5].admitted == [(0, 24 if modelled else 28, True)]


def test_every_difference_has_its_scenario() -> None:
    assert SCENARIOS.keys() == DIFFERENCES.keys()


def test_the_documentation_has_the_list_as_it_is() -> None:
    assert as_table() in (Path(__file__).parents[2] / "docs" / "beside-vllm.md").read_text(encoding="utf-8")
