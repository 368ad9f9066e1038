"""A plan is data: a ToyRunner in another process, which gets pickled plans alone, says and proves the same."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from engine.step.runner import Plan, StepOutput
from tests.engine.step.test_storm import Storm
from tests.toy_runner import ToyFault, ToyRunner


def serve(pipe: Connection) -> None:
    """The other process: makes runners and carries out what comes through the pipe."""
    fail, fired = "", False
    nan: set[int] = set()

    def fault(step: int, when: str) -> None:
        nonlocal fail, fired
        if fail == when:
            fail, fired = "", True
            raise ToyFault(f"{when} the writes of step {step}")

    runner = ToyRunner()
    tickets: dict[int, Any] = {}
    while True:
        what, fail, now_bad, *args = pipe.recv()
        fired, answer = False, None
        nan |= now_bad
        try:
            if what == "make":
                nan.clear()
                runner = ToyRunner(*args[0], fault=fault, bad=nan.__contains__, **args[1])
            elif what == "launch":
                tickets[args[0].step] = runner.launch(args[0])
            elif what == "collect":
                answer = runner.collect(tickets.pop(args[0]))
            else:
                return
        except ToyFault as error:
            answer = error
        pipe.send((answer, fired))


class Piped(ToyRunner):
    """A ToyRunner whose memory and work are in another process."""

    storm: Storm

    def __init__(self, pipe: Connection, *args: Any, fault: Any, bad: Any, ahead: int, late: bool) -> None:
        super().__init__(*args, fault=fault, bad=bad, ahead=ahead, late=late)
        self._pipe = pipe
        self.sent = 0
        pipe.send(("make", "", frozenset[int](), args, {"ahead": ahead, "late": late}))
        pipe.recv()

    def _ask(self, what: str, payload: Any) -> Any:
        self._pipe.send((what, self.storm.fail or "", frozenset(self.storm.nan), payload))
        answer, fired = self._pipe.recv()
        if fired:
            self.storm.fail = None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def launch(self, plan: Plan) -> Any:
        self.sent += len(plan.rows)
        self._ask("launch", plan)
        return plan.step

    def collect(self, ticket: Any) -> StepOutput:
        output: StepOutput = self._ask("collect", ticket)
        return output


@pytest.fixture(scope="module")
def pipe() -> Iterator[Connection]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that reading ends if the other process does
    yield ours
    ours.send(("end", "", frozenset()))
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_storms_over_a_pipe_give_the_same_results_and_events(pipe: Connection, ahead: int) -> None:
    """With preemption, forks, aborts, faults and drafts; every token is proved by the KV that was really read."""

    def over_there(*args: Any, **options: Any) -> Piped:
        return Piped(pipe, *args, **options)

    kinds: set[str] = set()
    for seed in (3, 6, 7, 12, 15):
        here, there = Storm(seed, ahead=ahead), Storm(seed, ahead=ahead, make=over_there)
        runner = there.core.runner
        assert isinstance(runner, Piped)
        runner.storm = there
        for storm in (here, there):
            for _ in range(400):
                storm.act()
            storm.drain()
            storm.judge()
        assert there.batches == here.batches and runner.sent > 0
        kinds |= here.kinds
    assert kinds > {
        "RequestPreempted", "SequenceForked", "BlocksCopied", "DraftVerified", "BeamPruned", "EngineError",
        "BlocksEvicted:unwritten", "BlocksEvicted:invalid",
    }  # fmt: skip
