"""One request never ends another: whatever raises while it is taken, planned, sampled or committed ends it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import events as ev
from engine.params import SamplingParams
from engine.step.detok import Detokenizer
from engine.step.runner import Plan, StepOutput
from engine.step.sequence import Request
from tests.engine.rig import Rig, prompt


def letters(token: int) -> bytes:
    return bytes([97 + token % 26])


def bent(**wrong: Any) -> SamplingParams:
    """Parameters as nobody may build them: past every check."""
    params = SamplingParams(max_tokens=6, temperature=0)
    for name, value in wrong.items():
        object.__setattr__(params, name, value)
    return params


def good_one_goes_on(rig: Rig, bad: Callable[[], Request]) -> Request:
    """A sound request before and one after the bad one end as they would alone, with every token."""
    before = rig.add(prompt(20, 1), 6)
    sick = bad()
    after = rig.add(prompt(20, 2), 6)
    rig.run()
    for request in (before, after):
        assert (request.finish_reason, rig.answer(request)) == ("length", rig.truth(request, 6))
    assert rig.pool.num_active == 0 and sorted(rig.ended) == [0, 1, 2]
    return sick


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 1.5}, {"n": "2"}, {"beam_width": 1.5}, {"stop": (b"x",)}, {"stop": (5,)}, {"stop": 5},
        {"max_tokens": "many"}, {"logprobs": 1.5}, {"min_tokens": None}, {"temperature": "hot"},
        {"stop_token_ids": ("x",)}, {"bad_word_ids": ((1.5,),)},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_of_a_wrong_type_end_their_request_and_no_other(wrong: dict[str, Any], ahead: int) -> None:
    rig = Rig(ahead=ahead, token_bytes=letters)
    sick = good_one_goes_on(rig, lambda: rig.core.add_request(next(rig._ids), prompt(20, 3), bent(**wrong)))
    assert sick.finish_reason in ("error", "refused") and sick.error
    queued = rig.events(ev.RequestQueued, sick.request_id)[0]
    assert (queued.n, queued.position) == (1, -1), "nothing that a reader cannot read is in the event"


def test_a_salt_or_a_priority_of_a_wrong_type_ends_its_request() -> None:
    for wrong in ({"salt": 5}, {"priority": "high"}):
        rig = Rig(scheduling_policy="priority")
        sick = good_one_goes_on(rig, lambda w=wrong, r=rig: r.add(prompt(9, 3), 6, **w))  # type: ignore[misc]
        assert sick.finish_reason == "error"


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_token_that_cannot_become_text_ends_its_request_alone(at: int, n: int, ahead: int) -> None:
    rig = Rig(ahead=ahead, token_bytes=letters)
    calls = 0

    class Broken(Detokenizer):
        __slots__ = ()

        def push(self, token_id: int, may_stop: bool = True) -> str:
            nonlocal calls
            calls += 1
            if calls > at * n:
                raise UnicodeError("no such bytes")
            return super().push(token_id, may_stop)

        def fork(self) -> Detokenizer:
            return Broken(letters)

    def bad() -> Request:
        request = rig.add(prompt(20, 3), 6, n=n)
        request.branches[0].detok = Broken(letters)
        return request

    sick = good_one_goes_on(rig, bad)
    assert (sick.finish_reason, sick.error) == ("error", "UnicodeError: no such bytes")
    reported = sum(len(e.token_ids) for e in rig.events(ev.TokensSampled)) - 12
    assert rig.usage(sick).output_tokens == reported == at * n, (
        "what was sampled, reported and counted is the same"
    )


def test_drafts_before_a_token_that_cannot_become_text_are_kept() -> None:
    rig = Rig(vocab=2, speculate=3, token_bytes=letters)
    request = rig.add([0, 1] * 10, 30)
    while rig.step() and not rig.events(ev.DraftVerified):
        pass

    class Broken(Detokenizer):
        __slots__ = ()

        def push(self, token_id: int, may_stop: bool = True) -> str:
            raise UnicodeError("no such bytes")

    request.branches[0].detok = Broken(letters)
    rig.run()
    assert request.finish_reason == "error" and rig.pool.num_active == 0
    assert rig.usage(request).output_tokens == sum(len(e.token_ids) for e in rig.events(ev.TokensSampled))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("running", [False, True], ids=["admitted", "running"])
def test_what_raises_while_a_request_is_planned_ends_it_alone(
    running: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(ahead=ahead)
    paging = rig.core.paging
    name = "grow" if running else "lookup"
    real, sick = getattr(paging, name), -1

    def fails(seq: Any, *rest: Any) -> Any:
        if seq.request.request_id == sick and (not running or seq.num_computed > 20):
            raise KeyError("lost")
        return real(seq, *rest)

    monkeypatch.setattr(paging, name, fails)

    def bad() -> Request:
        nonlocal sick
        request = rig.add(prompt(20, 3), 6)
        sick = request.request_id
        return request

    request = good_one_goes_on(rig, bad)
    assert (request.finish_reason, request.error) == ("error", "KeyError: 'lost'")
    assert bool(request.num_output) == running


def test_a_beam_without_its_offers_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    execute = rig.runner.execute

    def forgetful(plan: Plan) -> StepOutput:
        output = execute(plan)
        output.logprobs.clear()
        return output

    monkeypatch.setattr(rig.runner, "execute", forgetful)
    monkeypatch.setattr(rig.core, "_async", None)
    sick = good_one_goes_on(rig, lambda: rig.add(prompt(20, 3), 6, beam_width=3))
    assert sick.finish_reason == "error" and "KeyError" in (sick.error or "")


def test_what_a_runner_says_of_one_row_ends_that_request_and_keeps_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(block_size=4)
    collect = rig.runner.collect

    def refuses(ticket: Any) -> StepOutput:
        output = collect(ticket)
        for i, row in enumerate(ticket.plan.rows):
            if row.seq_id == 1:
                output.errors[i] = "nothing can be drawn"
        return output

    monkeypatch.setattr(rig.runner, "collect", refuses)
    sick = good_one_goes_on(rig, lambda: rig.add(prompt(20, 3), 6))
    assert (sick.finish_reason, sick.error, sick.num_output) == ("error", "nothing can be drawn", 0)
    again = rig.add(prompt(20, 3), 2)
    rig.run()
    assert again.cached_tokens == 16 and rig.answer(again) == rig.truth(again, 2), "its KV was sound"


def test_a_callback_that_raises_stops_nobody() -> None:
    rig = Rig()

    def broken(request: Request) -> None:
        rig.ended.append(request.request_id)
        raise RuntimeError("no reader")

    rig.core._ending._on_finished = broken
    good_one_goes_on(rig, lambda: rig.add(prompt(20, 3), 6))
    assert [e.message for e in rig.events(ev.EngineError)] == ["after its end: RuntimeError: no reader"] * 3


def test_the_runner_hears_of_retired_sequences_although_their_step_was_not_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.add(prompt(20), 1)
    rig.run()
    heard: list[list[int]] = []
    launch = rig.runner.launch

    def fails_once(plan: Plan) -> Any:
        heard.append(plan.retired)
        if len(heard) == 1:
            raise MemoryError("no room")
        return launch(plan)

    monkeypatch.setattr(rig.runner, "launch", fails_once)
    for family in (1, 2):
        rig.add(prompt(20, family), 1)
        rig.run()
    assert heard == [[0], [0, 1]]


# ------------------------------------------------------------------------------- the waiting order


def test_the_place_in_the_waiting_queue_is_in_the_events() -> None:
    """A reader that inserts where the events say has the queue, step by step, by arrival and by priority."""
    for policy in ("fcfs", "priority"):
        rig = Rig(num_blocks=12, block_size=4, scheduling_policy=policy, max_num_seqs=4)
        for i in range(9):
            rig.add(prompt(9 - i % 3, i % 4), 14, priority=-i % 4)
        seen, queue, preempted = 0, [], 0
        while rig.core.has_work:
            rig.step()
            for event in (e for b in rig.batches[seen:] for e in b.events):
                if isinstance(event, ev.RequestQueued | ev.RequestPreempted):
                    assert 0 <= event.position <= len(queue)
                    queue.insert(event.position, event.request_id)
                    preempted += isinstance(event, ev.RequestPreempted)
                elif isinstance(event, ev.RequestAdmitted):
                    queue.remove(event.request_id)
            seen = len(rig.batches)
            assert queue == [r.request_id for r in rig.core.scheduler.waiting]
        assert preempted > 3


def test_who_shares_what_a_preempted_writer_will_not_write_stands_behind_it() -> None:
    rig = Rig(block_size=4, max_num_seqs=8)
    writer, *readers = (rig.add(prompt(20), 5) for _ in range(4))
    assert rig.core.begin() is not None
    rig.core.scheduler.preempt(writer, rig.core.flights)
    order = [r.request_id for r in (writer, *readers)]
    assert [r.request_id for r in rig.core.scheduler.waiting] == order
    rig.core.flush()
    queue: list[int] = []
    for event in rig.events(ev.RequestPreempted):
        queue.insert(event.position, event.request_id)
    assert queue == order
