"""Asynchronous scheduling: the next step is planned and launched before the tokens of the one in flight are known.

The toy runner computes as late as it may, or at once (`late`), so that whatever the host changes between a
launch and its output would show as a wrong token. Storms are in test_storm.py, the law in tests/kvtop.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.model.torch_runner import TorchRunner
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.flight import Flights
from engine.step.sequence import Request, Status
from tests.engine.rig import Rig, fork, prompt
from tests.engine.tiny import CPU64, QWEN3, random_weights
from tests.toy_runner import ToyFault

LATE = pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])


def scheduled(rig: Rig) -> list[dict[int, int]]:
    """Tokens by sequence of each step that was reported."""
    return [dict(zip(e.seq_ids, e.n, strict=True)) for e in rig.events(ev.StepScheduled)]


# --------------------------------------------------------------------------------- what may go ahead


@pytest.mark.conformance(65)
def test_two_steps_are_in_flight_and_a_new_request_joins_the_second() -> None:
    rig = Rig(ahead=1)
    first = rig.add(prompt(20), 3)
    one = rig.core.begin()
    assert one is not None and [(r.start, r.n) for r in one.rows] == [(0, 20)]
    one_ticket = rig.runner.launch(one)
    second = rig.add(prompt(9, 1), 3)
    two = rig.core.begin()
    assert two is not None
    owners = [seq.request.request_id for seq in rig.core.flights[1].seqs]
    assert owners == [0, 1] and [(r.start, r.n) for r in two.rows] == [(20, 1), (0, 9)]
    assert list(two.rows[0].tokens) == [], "its token is not known"
    two_ticket = rig.runner.launch(two)
    with pytest.raises(RuntimeError, match="not finished"):
        rig.core.begin()
    with pytest.raises(ValueError, match="order"):
        rig.core.finish(two, rig.runner.collect(two_ticket))
    rig.core.finish(one, rig.runner.collect(one_ticket))
    assert rig.answer(first) == rig.truth(first, 1) and rig.answer(second) == []
    rig.core.finish(two, rig.runner.collect(two_ticket))
    rig.run()
    assert rig.answer(first) == rig.truth(first, 3) and rig.answer(second) == rig.truth(second, 3)


@pytest.mark.conformance(65)
@pytest.mark.parametrize(
    "needs",
    [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"min_tokens": 2}, {"beam_width": 3}, {"n": 2}],
    ids=lambda d: next(iter(d)),
)
def test_nothing_goes_ahead_of_a_token_that_must_be_seen(needs: dict[str, Any]) -> None:
    rig = Rig(ahead=1)
    plain, other = rig.add(prompt(20), 6), rig.add(prompt(20, 1), 6, **needs)
    one = rig.core.begin()
    assert one is not None and rig.core.begin() is None
    rig.core.finish(one, rig.runner.execute(one))
    two = rig.core.begin()
    assert two is not None and len(two.rows) == 1 + len(other.branches), "both go on together"
    rig.core.finish(two, rig.runner.execute(two))
    rig.run()
    assert rig.answer(plain) == rig.truth(plain, 6)
    assert all(len(s.output_ids) == 6 for s in other.branches)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("plain", [False, True], ids=["alone", "beside a plain one"])
def test_those_that_wait_for_each_token_decode_in_the_same_steps(plain: bool, speculate: int) -> None:
    """They come one step apart and yet neither take turns nor get every second step beside one that need not
    wait."""
    rig = Rig(ahead=1, speculate=speculate)
    needs: dict[str, Any] = {} if speculate else {"logprobs": 1}
    if plain:
        rig.add(prompt(20, 2), 30)
    requests = []
    for i in range(3):
        requests.append(rig.add(prompt(20, i + 3), 20, **needs))
        rig.step()
    rig.run()
    decoded = [e.decode_tokens for e in rig.events(ev.StepCompleted)]
    assert sum(n >= 3 for n in decoded) >= 17
    assert len(decoded) <= (30 if plain else 20) + 5
    assert all(rig.answer(r) == rig.truth(r, 20) for r in requests)


def test_drafts_are_read_off_known_tokens_so_nothing_goes_ahead_of_them() -> None:
    rig = Rig(ahead=1, speculate=3, vocab=2)
    rig.add(prompt(20, vocab=2), 20)
    one = rig.core.begin()
    assert one is not None and rig.core.begin() is None
    rig.core.finish(one, rig.runner.execute(one))
    rig.run()


def test_nothing_is_launched_ahead_where_steps_are_looked_at_one_by_one() -> None:
    rig = Rig(ahead=1)
    request = rig.add(prompt(20), 8)
    assert rig.core.step() is None, "launched, not finished"
    rig.core.one_at_a_time = True
    for n in range(1, 5):
        assert rig.core.step() is not None and len(request.branches[0].output_ids) == n
    rig.core.one_at_a_time = False
    rig.run()
    assert rig.answer(request) == rig.truth(request, 8)


def test_an_audit_lets_no_step_go_ahead() -> None:
    rig = Rig(ahead=1, audit=1)
    rig.add(prompt(40), 2)
    rig.run()
    rig.add(prompt(40), 2)
    rig.run()
    assert rig.core.ahead == 0 and [e.bad for e in rig.events(ev.HitAudited)] == [[]]


# ------------------------------------------------------------------------------------ exact numbers


@pytest.mark.conformance(85)
@LATE
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_step_more_than_prompt_and_output_need(max_tokens: int, late: bool) -> None:
    reported = []
    for ahead in (0, 1):
        rig = Rig(ahead=ahead, late=late, max_num_batched_tokens=32)
        request = rig.add(prompt(70), max_tokens)
        rig.run()
        assert sum(sum(step.values()) for step in scheduled(rig)) == 70 + max_tokens - 1
        assert rig.core.log.step == 3 + max_tokens - 1
        assert sum(e.overrun for e in rig.events(ev.StepCompleted)) == 0
        assert rig.answer(request) == rig.truth(request, max_tokens)
        reported.append(rig.usage(request))
    assert reported[0] == reported[1]


@pytest.mark.conformance(85)
def test_the_context_ends_a_request_without_a_step_too_many() -> None:
    rig = Rig(ahead=1, max_model_len=25)
    request = rig.add(prompt(20), 100)
    rig.run()
    assert sum(sum(step.values()) for step in scheduled(rig)) == 24
    assert sum(e.overrun for e in rig.events(ev.StepCompleted)) == 0
    assert rig.answer(request) == rig.truth(request, 5)


def test_nobody_forks_off_a_sequence_whose_step_still_writes() -> None:
    rig = Rig(ahead=1)
    request = rig.add(prompt(20), 8)
    rig.step()
    rig.step()
    assert rig.core.flights.newest(request.branches[0]) and fork(rig.core, request.branches[0]) is None
    rig.core.settle()
    assert fork(rig.core, request.branches[0]) is not None
    rig.run()


@pytest.mark.conformance(85)
def test_an_end_that_shows_late_costs_one_token_which_is_told_and_delivered_to_nobody() -> None:
    rig = Rig(ahead=1)
    says = rig.truth(Request(0, prompt(20), SamplingParams(), 0.0), 9)
    at = next(i for i, token in enumerate(says) if token not in says[:i] and i > 2)
    request = rig.add(prompt(20), 50, stop_token_ids=(says[at],))
    rig.run()
    assert rig.answer(request) == says[: at + 1] and request.finish_reason == "stop"
    assert rig.usage(request).output_tokens == at + 1
    completed = rig.events(ev.StepCompleted)
    assert [e.overrun for e in completed] == [0] * (at + 1) + [1]
    assert completed[-1].decode_tokens == 0 and scheduled(rig)[-1] == {}
    assert sum(map(len, (e.token_ids for e in rig.events(ev.TokensSampled)))) == at + 1


@pytest.mark.conformance(47)
def test_only_computed_tokens_are_findable_while_a_step_is_in_flight() -> None:
    """Blocks of 4: the block that the token in flight completes has no hash before the step that writes its
    last slot is finished."""
    rig = Rig(block_size=4, ahead=1)
    request = rig.add(prompt(7), 9)
    seq = None
    while rig.core.has_work:
        rig.step()
        seq = seq or request.branches[0]
        hashed = [b for b in seq.table if rig.pool.hash_of(b) is not None]
        assert len(hashed) <= max(seq.num_computed, 7) // 4


@pytest.mark.conformance(86)
@LATE
def test_under_pressure_every_token_is_delivered_once_and_in_order(late: bool) -> None:
    rig = Rig(num_blocks=12, block_size=4, ahead=1, late=late)
    requests = [rig.add(prompt(9, i), 20) for i in range(4)]
    rig.run()
    assert len(rig.events(ev.RequestPreempted)) >= 2
    for request in requests:
        truth = rig.truth(request, 20)
        assert rig.answer(request) == truth
        seq = request.branches[0].seq_id
        reported = [
            token
            for e in rig.events(ev.TokensSampled)
            for i, token in zip(
                [s for s, n in zip(e.seq_ids, e.counts, strict=True) for _ in range(n)],
                e.token_ids,
                strict=True,
            )
            if i == seq
        ]
        assert reported == truth


@pytest.mark.conformance(86)
@LATE
def test_a_reset_with_steps_in_flight_loses_no_token_and_doubles_none(late: bool) -> None:
    rig = Rig(ahead=1, late=late)
    requests = [rig.add(prompt(30, i), 25) for i in range(3)]
    for n in range(20):
        rig.step()
        if n % 4 == 3:
            assert rig.core.reset_prefix_cache(reset_running=True)
            assert all(r.status is Status.PREEMPTED for r in rig.core.scheduler.waiting)
            rig.check()
    rig.run()
    assert all(rig.answer(r) == rig.truth(r, 25) for r in requests)
    assert rig.pool.num_active == 0


@pytest.mark.conformance(86)
def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    rig = Rig(num_blocks=7, block_size=4, ahead=1)
    for i in range(3):
        rig.add(prompt(5, i), 12)
    scheduler, preempt = rig.core.scheduler, rig.core.scheduler.preempt
    in_flight: list[int] = []

    def watched(request: Request, flights: Flights, at: int = 0) -> None:
        in_flight.append(len(flights) - 1)  # without the step that is being planned
        preempt(request, flights, at)

    scheduler.preempt = watched  # type: ignore[method-assign]
    rig.run()
    assert len(in_flight) >= 2 and set(in_flight) == {0}


@pytest.mark.conformance(84)
@LATE
@pytest.mark.parametrize("seed", range(5))
def test_aborts_in_any_order_end_with_exactly_the_tokens_that_were_told(seed: int, late: bool) -> None:
    r = random.Random(seed)
    rig = Rig(ahead=1, late=late, max_num_seqs=8)
    requests = [rig.add(prompt(r.randint(1, 60), i), 100) for i in range(10)]
    order = requests[:]
    r.shuffle(order)
    for request in order:
        for _ in range(r.randint(0, 3)):
            rig.step()
        reported = request.num_output
        assert rig.core.abort(request.request_id)
        assert not rig.core.abort(request.request_id)
        rig.check()
        assert rig.usage(request).output_tokens == reported
    rig.run()
    for request in requests:
        assert request.finish_reason == "abort"
        assert rig.answer(request) == rig.truth(request, request.num_output)
    assert rig.pool.num_active == 0 and not rig.core.flights


@pytest.mark.conformance(87)
@LATE
def test_blocks_of_an_end_that_showed_late_are_written_by_their_new_holder_last(late: bool) -> None:
    """The row in flight of who ended still writes into its block, which the very next step hands on: steps are
    computed in order, so what the new holder stores is what stays."""
    rig = Rig(num_blocks=6, block_size=4, ahead=1, late=late)
    says = rig.truth(Request(0, prompt(6), SamplingParams(), 0.0), 9)
    stop = next(t for i, t in enumerate(says) if i >= 3 and t not in says[:i])
    first = rig.add(prompt(6), 14, stop_token_ids=(stop,))
    second = rig.add(prompt(13, 1), 4)
    assert rig.step() == {} and second.status is Status.WAITING, "the pool holds one of them"
    while first.finish_reason is None:
        rig.step()
    late = [seq for flight in rig.core.flights for seq in flight.seqs]
    freed = set(range(1, 6)) - {b for s in second.branches for b in s.table}
    assert late == [first.branches[0]] and freed
    rig.run()
    taken = {
        b for e in rig.events(ev.BlocksAllocated) if e.seq_id == second.branches[0].seq_id for b in e.ids
    }
    assert taken & freed
    assert rig.answer(second) == rig.truth(second, 4)


# ------------------------------------------------------------------------------------------- faults


@LATE
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_takes_its_requests_and_whoever_reads_what_it_did_not_write(
    when: str, late: bool
) -> None:
    fail = False

    def fault(step: int, at: str) -> None:
        if fail and at == when and step == 2:
            raise ToyFault(when)

    rig = Rig(ahead=1, late=late, fault=fault, block_size=4)
    old = rig.add(prompt(9, 5), 12)
    rig.step()
    rig.step()  # steps 0 and 1 are launched, 0 is finished
    fail = True
    rig.core.abort(old.request_id)
    sick = rig.add(prompt(17), 5)
    rig.step()  # step 2
    reader = rig.add(prompt(20), 5)
    bystander = rig.add(prompt(11, 1), 5)
    rig.run()
    assert sick.finish_reason == "error" and "ToyFault" in (sick.error or "")
    assert reader.finish_reason == bystander.finish_reason == "length"
    assert rig.answer(reader) == rig.truth(reader, 5) and rig.answer(bystander) == rig.truth(bystander, 5)


def test_who_was_planned_on_kv_that_proves_bad_computes_its_own() -> None:
    bad: set[int] = set()
    rig = Rig(ahead=1, block_size=4, bad=bad.__contains__)
    sick = rig.add(prompt(17), 5)
    bad.add(sick.branches[0].seq_id)
    rig.step()
    reader, bystander = rig.add(prompt(20), 5), rig.add(prompt(20, 1), 5)
    rig.step()
    assert sick.finish_reason == "error" and rig.events(ev.PrefixLookup, reader.request_id)[0].hit_blocks == 4
    rig.run()
    assert (reader.preemptions, bystander.preemptions) == (1, 0)
    assert rig.events(ev.PrefixLookup, reader.request_id)[1].hit_blocks == 0
    assert rig.answer(reader) == rig.truth(reader, 5) and rig.answer(bystander) == rig.truth(bystander, 5)


def test_who_goes_on_behind_unwritten_blocks_and_then_gets_no_row_falls_with_their_step() -> None:
    """Planning ahead takes what the step in flight publishes, meets an empty pool and comes to nothing."""

    def fault(step: int, at: str) -> None:
        if step == 4 and at == "before":
            raise ToyFault(at)

    rig = Rig(
        num_blocks=12, block_size=4, ahead=1, fault=fault,
        max_num_batched_tokens=12, long_prefill_token_threshold=4, max_num_seqs=6,
    )  # fmt: skip
    for i in range(4):
        rig.add(prompt(1, i + 1), 5)  # each takes a second block in step 4, which is its last
    for _ in range(3):
        rig.step()
    reader, publisher = rig.add(prompt(20), 4), rig.add(prompt(12), 1)
    rig.step()
    rig.step()
    (flight,) = rig.core.flights
    published = publisher.branches[0].table[2]
    assert [row.n for row in flight.plan.rows] == [1, 1, 1, 1, 4] and rig.pool.num_available == 0
    assert rig.core.begin() is None and reader.branches[0].table[2] == published
    rig.run()
    assert publisher.finish_reason == "error" and reader.preemptions == 1
    assert rig.answer(reader) == rig.truth(reader, 4)


def test_a_step_that_cannot_be_launched_lets_the_one_in_flight_finish() -> None:
    rig = Rig(ahead=1)
    request = rig.add(prompt(20), 10)
    launch, calls = rig.runner.launch, 0

    def fails(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("no room")
        return launch(plan)

    rig.runner.launch = fails  # type: ignore[method-assign]
    rig.run()
    assert request.finish_reason == "error" and "MemoryError: no room" in (request.error or "")
    assert rig.answer(request) == rig.truth(request, 3), "of the three steps that ran"
    assert calls == 4, "and nothing is launched behind the step that was not"
    again = rig.add(prompt(20), 3)
    rig.run()
    assert rig.answer(again) == rig.truth(again, 3)


# ---------------------------------------------------------------------------------- with a real model


@pytest.mark.conformance(85)
@pytest.mark.parametrize(
    "knobs", [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 5}], ids=["whole", "chunks"]
)
def test_a_model_says_the_same_with_its_tokens_kept_on_the_device(knobs: dict[str, Any]) -> None:
    """Greedy and sampled, several samples of a prompt, beams, penalties, ends by a token, a small pool."""
    weights = random_weights(QWEN3, 3)
    said: list[list[list[int]]] = []
    for ahead in (False, True):
        config = EngineConfig(
            device="cpu", dtype="float64", ops="reference", num_blocks=26, block_size=8, threads=1,
            async_scheduling=ahead, **({"max_num_batched_tokens": 256, "max_num_seqs": 8} | knobs),
        )  # fmt: skip
        runner = TorchRunner.from_weights(QWEN3, dict(weights), config)
        assert runner.ahead == ahead
        batches: list[ev.StepBatch] = []
        core = EngineCore(config, runner, EventLog(iter(range(10**6)).__next__, batches.append), hash_seed=1)
        ways: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 0.9, "seed": 4, "n": 2},
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
            {"temperature": 0.0, "beam_width": 2},
            {"temperature": 1.3, "seed": 5, "stop_token_ids": tuple(range(0, 199, 9))},
        ]
        requests = [
            core.add_request(
                i, [(3 * i + 7 * j) % 199 for j in range(5 + 9 * i)], SamplingParams(max_tokens=14, **w)
            )
            for i, w in enumerate(ways)
        ]
        while core.has_work:
            core.step()
        said.append([list(s.output_ids) for r in requests for s in r.branches])
        assert not any(isinstance(e, ev.EngineError) for b in batches for e in b.events)
    assert said[0] == said[1]


def test_collecting_computes_nothing_that_would_queue_behind_the_step_in_flight() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    calls: list[str] = []
    runner = TorchRunner.from_weights(QWEN3, dict(random_weights(QWEN3, 1)), CPU64)
    core = EngineCore(CPU64, runner, EventLog(iter(range(10**6)).__next__, lambda b: None), hash_seed=1)
    for ways in ({"logprobs": 3}, {"beam_width": 2}, {"repetition_penalty": 1.2}):
        core.add_request(len(core.requests), list(range(9)), SamplingParams(**{"temperature": 0.0} | ways))
    plan = core.begin()
    assert plan is not None
    ticket = runner.launch(plan)
    with Seen():
        output = runner.collect(ticket)
    views = {"aten::resolve_conj", "aten::resolve_neg"}  # what tolist() is made of
    assert set(calls) <= views and [len(reported.top) for (reported,) in output.logprobs.values()] == [3, 4]


def test_what_a_step_takes_is_all_of_it_taken_at_its_launch() -> None:
    """Tables and tokens may change on the host before the device gets there: one upload carries them."""
    runner = TorchRunner.from_weights(QWEN3, dict(random_weights(QWEN3, 1)), CPU64)
    rows = runner._rows
    meta = torch.zeros_like(rows._host)
    rows._device = meta  # as on a GPU: a copy of its own, which gets what changed
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8)
    core = EngineCore(config, runner, EventLog(iter(range(10**6)).__next__, lambda b: None), hash_seed=1)
    for i in range(5):
        core.add_request(i, [(i + j) % 199 for j in range(30)], SamplingParams(max_tokens=40, temperature=0))
    for _ in range(25):
        core.step()
        running = [s for q in core.scheduler.running for s in q.branches]
        live = [s for s in running if core.flights.newest(s) or s.num_computed]
        for seq in live:
            row = rows._rows.get(seq.seq_id)
            if row is not None:
                n = seq.table_sent
                assert meta[row, :n].tolist() == rows._host[row, :n].tolist() == seq.table[:n]
    assert live
