"""The policy: budget, chunks, admission, preemption. First come, first served, unless by priority."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.events import (
    AdmissionBlocked,
    BlocksAllocated,
    PrefixLookup,
    RequestAdmitted,
    RequestPreempted,
    StepCompleted,
    StepScheduled,
)
from engine.step.flight import Flights
from engine.step.sequence import Status
from tests.engine.rig import Rig, fork, new_flight, prompt, prune

# ------------------------------------------------------------------------- admission and budget


@pytest.mark.conformance(59)
def test_all_that_fits_runs_at_once_in_arrival_order_with_whole_prompts() -> None:
    rig = Rig()
    requests = [rig.add(prompt(n, n), 5) for n in (20, 33, 7)]
    assert list(rig.core.scheduler.waiting) == requests
    assert rig.step() == {0: 20, 1: 33, 2: 7}
    assert rig.core.scheduler.running == requests and not rig.core.scheduler.waiting
    assert [e.request_id for e in rig.events(RequestAdmitted)] == [0, 1, 2]


@pytest.mark.conformance(60)
def test_an_aborted_request_leaves_its_queue_and_an_unknown_one_is_ignored() -> None:
    rig = Rig(max_num_seqs=2)
    for i in range(4):
        rig.add(prompt(20, i), 5)
    rig.step()
    scheduler = rig.core.scheduler
    for gone, running, waiting in ((1, [0], [2, 3]), (3, [0], [2]), (0, [], [2]), (2, [], [])):
        assert rig.core.abort(gone)
        rig.check()
        assert [r.request_id for r in scheduler.running] == running
        assert [r.request_id for r in scheduler.waiting] == waiting
        assert len(rig.core.requests) == len(running) + len(waiting)
    assert not rig.core.abort(1) and not rig.core.abort(99) and not rig.core.has_work


@pytest.mark.conformance(61)
def test_max_num_seqs_caps_admission() -> None:
    rig = Rig(max_num_seqs=3)
    for i in range(10):
        rig.add(prompt(16, i), 3)
    rig.step()
    assert len(rig.core.scheduler.running) == 3 and len(rig.core.scheduler.waiting) == 7
    (blocked,) = rig.events(AdmissionBlocked)
    assert (blocked.request_id, blocked.need, blocked.free, blocked.reason) == (3, 1, 0, "max_num_seqs")
    rig.run()
    assert rig.ended == list(range(10))


@pytest.mark.conformance(62)
def test_long_prompts_share_the_budget_in_chunks_and_decodes_come_first() -> None:
    rig = Rig(num_blocks=200, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for i in range(3):
        rig.add(prompt(800, i), 5)
    assert rig.step() == {0: 400, 1: 400, 2: 224}
    assert rig.step() == {0: 400, 1: 400, 2: 224}
    assert rig.step() == {0: 1, 1: 1, 2: 352}
    done = rig.events(StepCompleted)[-1]
    assert (done.decode_tokens, done.prefill_tokens, done.budget) == (2, 352, 1024)


@pytest.mark.conformance(63)
def test_the_threshold_spares_a_lone_request_and_binds_as_soon_as_another_waits() -> None:
    rig = Rig(num_blocks=200, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    rig.add(prompt(2500), 5)
    assert rig.step() == {0: 1024}
    rig.add(prompt(10, 1), 5)
    assert rig.step() == {0: 400, 1: 10}


@pytest.mark.conformance(63)
def test_an_adaptive_threshold_is_at_least_an_equal_share_of_the_budget() -> None:
    knobs = {"long_prefill_token_threshold": 400, "long_prefill_token_threshold_adaptive": True}
    rig = Rig(num_blocks=700, max_num_batched_tokens=1024, **knobs)
    rig.add(prompt(2500), 5)
    rig.add(prompt(10, 1), 5)
    assert rig.step() == {0: 1024 // 2, 1: 10}
    for family in (2, 3):
        rig.add(prompt(2500, family), 5)
    assert rig.step() == {0: 400, 1: 1, 2: 400, 3: 1024 - 801}  # a share of four would be 256


@pytest.mark.conformance(64)
def test_without_chunks_a_prompt_waits_for_a_whole_step_and_nobody_overtakes_it() -> None:
    for chunked, first, second in ((True, {0: 800, 1: 224}, {0: 1, 1: 576, 2: 100}), (False, {0: 800}, None)):
        rig = Rig(
            num_blocks=200, max_model_len=1024, max_num_batched_tokens=1024, enable_chunked_prefill=chunked
        )
        for i, n in enumerate((800, 800, 100)):
            rig.add(prompt(n, i), 5)
        assert rig.step() == first
        assert rig.step() == (second or {0: 1, 1: 800, 2: 100})
    (blocked,) = rig.events(AdmissionBlocked)
    assert (blocked.request_id, blocked.need, blocked.free) == (1, 800, 224)
    assert blocked.reason == "max_num_batched_tokens"


@pytest.mark.conformance(64)
def test_without_chunks_the_threshold_does_not_chunk_either() -> None:
    rig = Rig(
        max_model_len=512,
        max_num_batched_tokens=600,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=50,
    )
    rig.add(prompt(300), 2)
    rig.add(prompt(200, 1), 2)
    assert rig.step() == {0: 300, 1: 200}


@pytest.mark.conformance(66)
def test_a_branch_that_cannot_have_its_turn_holds_nobody_up() -> None:
    """Without chunks a resumed sibling waits for a step that takes it whole; the others go on."""
    rig = Rig(
        num_blocks=60,
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    first = rig.add(prompt(8), 50)
    rig.step()
    children = [fork(rig.core, first.branches[0]) for _ in range(2)]
    for _ in range(31):
        rig.step()
    rig.core.reset_prefix_cache(reset_running=True)
    second, third = rig.add(prompt(20, 1), 12), rig.add(prompt(15, 2), 12)
    assert rig.step() == {0: 40, 1: 20}
    # The children share the prompt's 2 blocks again; 30 tokens are left for the second one's 32: it waits.
    assert rig.step() == {0: 1 + 32, 1: 1, 2: 15}
    assert children[0] and children[0].table and children[1] and not children[1].table
    assert rig.step() == {0: 1 + 1 + 32, 1: 1, 2: 1}
    rig.run()
    assert rig.answer(first) == rig.truth(first, 50)
    for request in (second, third):
        assert rig.answer(request) == rig.truth(request, 12)


@pytest.mark.conformance(67)
@pytest.mark.parametrize("budget", [5, 17, 64])
def test_a_step_never_takes_more_than_the_budget(budget: int) -> None:
    rig = Rig(max_num_batched_tokens=budget, max_num_seqs=4)
    for i in range(8):
        rig.add(prompt(30 + i, i), 6)
    rig.run()
    steps = rig.events(StepScheduled)
    assert all(sum(e.n) <= budget for e in steps)
    assert max(sum(e.n) for e in steps) == budget or budget == 64
    for e in steps:
        assert len(set(e.seq_ids)) == len(e.seq_ids)


@pytest.mark.conformance(68)
def test_the_step_tells_the_queues_as_they_are() -> None:
    """Nothing is deferred here: a waiting request is a new one or a preempted one."""
    rig = Rig(num_blocks=11, max_num_batched_tokens=1024)
    for i, n in enumerate((70, 70, 70, 20)):
        rig.add(prompt(n, i), 60)
    rig.step()
    assert rig.events(StepCompleted)[-1].queues == {"running": 2, "waiting": 2, "preempted": 0}
    while rig.events(StepCompleted)[-1].queues["preempted"] == 0:
        rig.step()
    assert rig.events(StepCompleted)[-1].queues == {"running": 1, "waiting": 3, "preempted": 1}
    assert [r.request_id for r in rig.core.scheduler.waiting] == [1, 2, 3]


@pytest.mark.conformance(33)
def test_two_equal_prompts_in_one_step_compute_the_common_blocks_once() -> None:
    rig = Rig()
    first, second = rig.add(prompt(100), 3), rig.add(prompt(100), 3)
    assert rig.step() == {0: 100, 1: 100 % 16}
    rig.run()
    assert rig.answer(first) == rig.answer(second) == rig.truth(first, 3)
    assert rig.usage(second).cached_tokens == 96


@pytest.mark.conformance(32)
def test_the_next_turn_computes_only_what_is_no_full_block_yet() -> None:
    rig = Rig()
    first = rig.add(prompt(37), 40)
    rig.run()
    tokens = prompt(37) + rig.answer(first)
    second = rig.add(tokens, 1)
    rig.run()
    assert rig.usage(second).computed_tokens == len(tokens) % 16
    assert rig.answer(second) == rig.truth(first, 41)[-1:]


# ------------------------------------------------------------------------------ the admission gate


@pytest.mark.conformance(48, 79)
def test_a_prompt_waits_until_all_of_it_fits_even_if_its_first_chunk_would() -> None:
    rig = Rig(num_blocks=11, max_num_batched_tokens=64)
    rig.add(prompt(80), 20)
    rig.step()
    long = rig.add(prompt(100, 1), 2)  # 7 blocks, 5 are left: its first chunk would take 4
    for _ in range(5):
        assert 1 not in rig.step()
    (blocked,) = rig.events(AdmissionBlocked)  # reported once, though tried at every step
    assert (blocked.request_id, blocked.need, blocked.reason) == (1, 7, "blocks")
    rig.run()
    assert rig.answer(long) == rig.truth(long, 2) and not rig.events(RequestPreempted)


@pytest.mark.conformance(79)
def test_a_cached_prompt_larger_than_what_is_free_is_tried_until_it_fits() -> None:
    rig = Rig(num_blocks=11)
    rig.add(prompt(144), 1)
    rig.run()
    holder = rig.add(prompt(30, 1), 30)
    rig.step()
    again = rig.add(prompt(144) + [5], 3)  # 9 hits that nobody holds and one new block: 10 of 8
    while rig.core.has_work:
        rig.step()
    assert rig.finished(holder).reason == rig.finished(again).reason == "length"
    assert rig.events(RequestAdmitted, again.request_id)[0].cached_tokens > 0
    assert rig.answer(again) == rig.truth(again, 3)


@pytest.mark.conformance(79)
def test_a_running_prompt_keeps_the_blocks_it_still_needs() -> None:
    """Two half-computed prompts that cannot both be finished would compute one of them twice."""
    rig = Rig(num_blocks=13, max_num_batched_tokens=512, long_prefill_token_threshold=64)
    rig.add(prompt(128), 2)
    rig.add(prompt(128, 1), 2)
    assert rig.step() == {0: 64}
    (blocked,) = rig.events(AdmissionBlocked)  # of 12 blocks 8 are free, but 4 of them are promised
    assert (blocked.need, blocked.free) == (8, 4)
    rig.run()
    assert not rig.events(RequestPreempted)


def test_a_prompt_that_another_shares_in_the_same_step_keeps_no_block_for_a_copy() -> None:
    """Its first block has two readers before its forward has run, but nobody will write it again."""
    rig = Rig(num_blocks=13, block_size=4)
    rig.add(prompt(32), 2)
    rig.add([*prompt(4), 501, 502], 2)
    rig.add(prompt(12, 1), 1)  # needs the last three of twelve blocks
    assert rig.step() == {0: 32, 1: 2, 2: 12}
    assert not rig.events(AdmissionBlocked)


def test_a_blocked_head_is_told_again_only_when_something_changed() -> None:
    rig = Rig(num_blocks=11, max_num_seqs=1)
    for i in range(3):
        rig.add(prompt(20, i), 4)
    rig.run()
    blocked = [(e.request_id, e.reason) for e in rig.events(AdmissionBlocked)]
    assert blocked == [(1, "max_num_seqs"), (2, "max_num_seqs")]


# -------------------------------------------------------------------------------------- preemption


@pytest.mark.conformance(71)
def test_a_dry_pool_preempts_the_youngest_and_the_oldest_goes_on() -> None:
    """Ten usable blocks, five for each prompt; the 81st token needs an eleventh."""
    rig = Rig(num_blocks=11)
    first, second = rig.add(prompt(80), 10), rig.add(prompt(80, 1), 10)
    rig.step()
    assert rig.pool.num_available == 0
    assert rig.step() == {0: 1}
    assert first.status is Status.RUNNING and second.status is Status.PREEMPTED
    assert second.num_output == 1  # what it had sampled is not lost
    (event,) = rig.events(RequestPreempted)
    assert (event.request_id, event.tokens_lost) == (1, 80)
    rig.run()
    assert rig.answer(first) == rig.truth(first, 10) and rig.answer(second) == rig.truth(second, 10)


@pytest.mark.conformance(54, 72)
def test_a_preempted_request_resumes_from_zero_at_the_front_with_all_its_tokens() -> None:
    rig = Rig(num_blocks=5)
    first, second = rig.add(prompt(31), 9), rig.add(prompt(30, 1), 9)
    late = rig.add(prompt(10, 2), 2)
    while not second.preemptions:
        rig.step()
    (branch,) = second.branches
    assert branch.num_computed == 0 and branch.table == [] and len(branch) == 30 + 2
    assert list(branch.tokens)[-1] == rig.truth(second, 2)[-1]
    assert list(rig.core.scheduler.waiting) == [second, late]
    rig.run()
    lookups = rig.events(PrefixLookup, second.request_id)
    assert [(e.prompt_tokens, e.resumed) for e in lookups] == [(30, False), (32, True)]
    assert [e.resumed for e in rig.events(RequestAdmitted, second.request_id)] == [False, True]
    assert rig.answer(second) == rig.truth(second, 9) and rig.answer(first) == rig.truth(first, 9)
    assert rig.usage(second).preemptions == 1


@pytest.mark.conformance(73)
def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    rig = Rig(num_blocks=11)
    rig.add(prompt(80), 10)
    rig.add(prompt(80, 1), 10)
    rig.step()
    rig.add(prompt(5, 2), 2)  # would fit into what the preemption frees
    seen = len(rig.batches)
    assert rig.step() == {0: 1}
    assert "RequestPreempted" in rig.names(seen) and "RequestAdmitted" not in rig.names(seen)


def test_a_victim_that_had_its_turn_gives_its_row_and_its_budget_back() -> None:
    """Decodes come first, also those of the younger; then the older's chunk needs their blocks."""
    rig = Rig(num_blocks=12, block_size=4, max_num_seqs=4, long_prefill_token_threshold=4)
    old, young = rig.add(prompt(40), 2), rig.add(prompt(4, 1), 12)
    for _ in range(8):
        assert rig.step() == {0: 4, 1: 1} or rig.core.log.step == 1
    assert len(old.branches[0].table) == 8 and len(young.branches[0].table) == 3
    assert rig.pool.num_available == 0
    assert rig.step() == {0: 4} and young.status is Status.PREEMPTED
    rig.run()
    assert rig.answer(old) == rig.truth(old, 2) and rig.answer(young) == rig.truth(young, 12)


def test_the_budget_of_a_dropped_row_is_free_for_whoever_comes_later_in_the_step() -> None:
    rig = Rig(max_num_batched_tokens=100)
    rig.add(prompt(60), 2)
    victim = rig.add(prompt(30, 1), 2)
    plan = rig.core.begin()
    assert plan is not None and rig.core.flights[-1].left == 10
    rig.core.scheduler.preempt(victim, rig.core.flights)
    assert rig.core.flights[-1].left == 40
    prune(rig.core, plan)
    rig.core.finish(plan, rig.runner.execute(plan))
    rig.run()


def test_a_resumed_request_waits_until_all_its_branches_fit() -> None:
    rig = Rig(num_blocks=21, block_size=4, max_num_seqs=4)
    request = rig.add(prompt(18), 10)
    rig.step()
    child = fork(rig.core, request.branches[0])
    for _ in range(6):
        rig.step()
    assert child is not None and [len(s) for s in request.branches] == [25, 25]
    rig.core.reset_prefix_cache(reset_running=True)
    rig.core.scheduler.waiting.clear()
    other = rig.add(prompt(44, 1), 8)  # 11 of 20 blocks
    rig.step()
    rig.core.scheduler.add(request)
    rig.step()
    # 25 tokens are 7 blocks; of the child's 7 the first 4 are the same 16 tokens.
    (blocked,) = rig.events(AdmissionBlocked)
    assert (blocked.need, blocked.reason) == (7 + 3, "blocks")
    rig.run()
    assert rig.answer(request) == rig.truth(request, 10) and rig.answer(other) == rig.truth(other, 8)


@pytest.mark.conformance(111)
@pytest.mark.parametrize("early", [True, False])
def test_a_preemption_between_scheduling_and_commit_takes_the_sharers_along_in_order(early: bool) -> None:
    rig = Rig(num_blocks=40)
    requests = [rig.add(prompt(50, f), 4) for f in (0, 0, 1, 0)]
    plan = rig.core.begin()
    assert plan is not None
    output = None if early else rig.runner.execute(plan)
    rig.core.scheduler.preempt(requests[0], rig.core.flights)
    assert list(rig.core.scheduler.waiting) == [requests[i] for i in (0, 1, 3)]
    if early:
        prune(rig.core, plan)
    rig.core.finish(plan, output or rig.runner.execute(plan))
    rig.check()
    assert rig.pool.num_hashes == 3 and [len(r.branches[0]) for r in requests] == [50, 50, 51, 50]
    rig.run()
    for request in requests:
        assert rig.answer(request) == rig.truth(request, 4)


def test_a_head_that_is_blocked_a_second_time_is_told_a_second_time() -> None:
    rig = Rig(num_blocks=11)
    rig.add(prompt(90), 2)
    rig.add(prompt(16, 1), 100)
    head = rig.add(prompt(70, 2), 60)
    rig.run()
    assert head.preemptions == 1
    assert [(e.request_id, e.reason) for e in rig.events(AdmissionBlocked)] == [(2, "blocks")] * 2


def test_what_the_pool_gives_a_preempted_request_is_told_before_who_takes_it() -> None:
    rig = Rig(num_blocks=11)
    rig.add(prompt(80), 10)
    rig.add(prompt(80, 1), 10)
    rig.step()
    seen = len(rig.batches)
    rig.step()
    names = rig.names(seen)
    assert names.index("BlocksReleased") < names.index("RequestPreempted") < names.index("BlocksAllocated")
    assert rig.events(BlocksAllocated)[-1].seq_id == 0


def test_retired_sequences_reach_the_runner_even_if_the_next_plan_is_empty() -> None:
    rig = Rig()
    rig.add(prompt(20), 5)
    rig.step()
    rig.core.abort(0)
    nothing = Flights([new_flight()])
    rig.core.scheduler.schedule(nothing)
    assert not nothing[-1].live
    rig.add(prompt(20, 1), 5)
    plan = rig.core.begin()
    assert plan is not None and plan.retired == [0]
    rig.core.finish(plan, rig.runner.execute(plan))


def test_a_branch_that_ends_before_its_siblings_is_retired() -> None:
    rig = Rig()
    request = rig.add(prompt(20), 8)
    rig.step()
    child = fork(rig.core, request.branches[0])
    assert child is not None
    child.finish_reason = None
    request.branches[0].tokens.extend(prompt(5))  # closer to max_tokens than its child
    rig.step()
    rig.step()
    assert request.branches[0].finish_reason == "length" and child.finish_reason is None
    assert request.branches[0].table == [] and rig.core.scheduler._retired == [0]
    plan = rig.core.begin()
    assert plan is not None and plan.retired == [0] and rig.core.flights[-1].seqs == [child]
    rig.core.finish(plan, rig.runner.execute(plan))
    rig.check()


# ------------------------------------------------------------------------------------ by priority


def by_priority(**knobs: Any) -> Rig:
    return Rig(scheduling_policy="priority", **knobs)


@pytest.mark.conformance(74)
def test_admission_goes_by_priority_then_by_arrival() -> None:
    rig = by_priority()
    for i, priority in enumerate((2, 0, 1)):
        rig.add(prompt(20, i), 2, priority=priority)
    rig.run()
    assert [e.request_id for e in rig.events(RequestAdmitted)] == [1, 2, 0]


@pytest.mark.conformance(74)
def test_limited_places_go_to_the_best_and_the_rest_stays_in_order() -> None:
    rig = by_priority(max_num_seqs=2)
    for i, priority in enumerate((4, -3, 0, 0, -3, 2)):
        rig.add(prompt(20, i), 3, priority=priority)
    rig.step()
    assert [r.request_id for r in rig.core.scheduler.running] == [1, 4]
    assert [r.request_id for r in rig.core.scheduler.waiting] == [2, 3, 5, 0]
    rig.run()
    assert rig.ended == [1, 4, 2, 3, 5, 0]


@pytest.mark.conformance(74)
def test_a_drain_over_many_priorities_admits_in_order() -> None:
    rig, r = by_priority(max_num_seqs=1), random.Random(5)
    requests = [rig.add(prompt(5, i), 1, priority=r.randint(-3, 4)) for i in range(60)]
    rig.run()
    want = sorted(requests, key=lambda q: (q.priority, q.request_id))
    assert rig.ended == [q.request_id for q in want]


@pytest.mark.conformance(75)
def test_priority_preempts_nobody_merely_to_admit() -> None:
    rig = by_priority(num_blocks=11, max_num_seqs=2)
    rig.add(prompt(70), 4, priority=5)
    rig.add(prompt(70, 1), 4, priority=5)
    rig.step()
    rig.add(prompt(5, 2), 2, priority=-5)  # no place, and of ten blocks none is free
    rig.step()
    assert not rig.events(RequestPreempted)
    rig.run()
    assert not rig.events(RequestPreempted) and rig.ended == [0, 1, 2]


@pytest.mark.conformance(76)
def test_the_victim_is_the_last_by_priority_and_arrival_wherever_it_runs() -> None:
    rig = by_priority(num_blocks=17)
    worst = rig.add(prompt(80), 10, priority=9)
    rig.step()
    good, best = rig.add(prompt(80, 1), 10, priority=1), rig.add(prompt(80, 2), 10)
    rig.step()
    assert [r.request_id for r in rig.core.scheduler.running] == [
        0,
        2,
        1,
    ]
    assert rig.pool.num_available == 0
    while not rig.events(RequestPreempted):
        rig.step()
    assert [e.request_id for e in rig.events(RequestPreempted)] == [worst.request_id]
    rig.run()
    for request in (worst, good, best):
        assert rig.answer(request) == rig.truth(request, 10)


@pytest.mark.conformance(76)
def test_a_victim_that_had_its_turn_costs_nobody_his() -> None:
    """A (the worst) is scheduled, B needs a block and takes A's; C after B still gets its turn."""
    rig = by_priority(num_blocks=11, block_size=4)
    a = rig.add(prompt(13), 20, priority=9)
    rig.step()
    b, c = rig.add(prompt(12, 1), 20, priority=1), rig.add(prompt(9, 2), 20, priority=1)
    rig.step()
    assert rig.pool.num_available == 0
    assert rig.step() == {1: 1, 2: 1} and a.status is Status.PREEMPTED
    rig.run()
    for request in (a, b, c):
        assert rig.answer(request) == rig.truth(request, 20)


@pytest.mark.conformance(77)
def test_who_preempts_itself_does_not_stop_the_others() -> None:
    rig = by_priority(num_blocks=9, block_size=4)
    self_victim = rig.add(prompt(15), 9, priority=9)
    rig.step()
    other = rig.add(prompt(14, 1), 9)
    rig.step()
    assert rig.pool.num_available == 0
    assert rig.step() == {1: 1}  # the first in line needs a ninth block and is the last by priority
    assert self_victim.status is Status.PREEMPTED
    rig.run()
    assert rig.answer(other) == rig.truth(other, 9) and rig.answer(self_victim) == rig.truth(self_victim, 9)


# ------------------------------------------------------------------------- watermark and the queue


@pytest.mark.conformance(80)
def test_an_admission_leaves_the_watermark_unless_nothing_runs() -> None:
    rig = Rig(num_blocks=11, watermark=0.3)
    rig.add(prompt(16 * 8), 40)  # eight of ten blocks: nothing runs, the watermark does not count
    assert rig.step() == {0: 128}
    late = rig.add(prompt(5, 1), 2)
    for _ in range(30):
        rig.step()
        assert late in rig.core.scheduler.waiting
    blocked = rig.events(AdmissionBlocked)[0]  # one is free, three are kept
    assert (blocked.need, blocked.free, blocked.reason) == (1, 0, "watermark")
    assert not rig.events(RequestPreempted)  # what runs may use what is kept free
    rig.run()
    assert rig.answer(late) == rig.truth(late, 2)


def test_a_full_queue_refuses_and_says_so() -> None:
    rig = Rig(max_num_seqs=1, max_num_queued_requests=2, max_num_queued_tokens=60)
    first = rig.add(prompt(20), 2)
    rig.step()
    second, third = rig.add(prompt(30, 1), 2), rig.add(prompt(31, 2), 2)
    rig.check()
    assert rig.finished(third).reason == "refused"
    assert rig.finished(third).error == (
        "the queue is full: 30 tokens wait, with 31 more they would exceed --max-num-queued-tokens (60)"
    )
    fourth, fifth = rig.add(prompt(5, 3), 2), rig.add(prompt(5, 4), 2)
    rig.check()
    assert rig.finished(fifth).error == "the queue is full: 2 requests wait, --max-num-queued-requests is 2"
    rig.run()
    for request in (first, second, fourth):
        assert rig.answer(request) == rig.truth(request, 2)


# ----------------------------------------------------------------------- a running prefill looks again


def test_two_equal_long_prompts_compute_and_hold_their_blocks_once() -> None:
    rig = Rig(num_blocks=200, max_num_batched_tokens=512, long_prefill_token_threshold=100)
    first, second = rig.add(prompt(900), 3), rig.add(prompt(900), 3)
    computed = 0
    while not first.num_output or not second.num_output:
        computed += sum(rig.step().values())
    assert computed < 900 + 3 * 16 + 4  # each lacks only blocks that were cut by a chunk's end
    a, b = (r.branches[0].table for r in (first, second))
    assert sum(x != y for x, y in zip(a, b, strict=True)) == 1
    rig.run()
    assert rig.answer(first) == rig.answer(second) == rig.truth(first, 3)
    assert len(rig.events(PrefixLookup)) == 2  # only admissions are reported, so the hit rate stays
    assert rig.usage(first).cached_tokens == 0 and rig.usage(second).cached_tokens == 96


def test_without_looking_again_they_do_not() -> None:
    rig = Rig(num_blocks=200, max_num_batched_tokens=512, long_prefill_token_threshold=100)
    rig.core.scheduler.looks_again = False
    requests = [rig.add(prompt(900), 3) for _ in range(2)]
    computed = 0
    while not all(r.num_output for r in requests):
        computed += sum(rig.step().values())
    assert computed > 1700


@pytest.mark.parametrize("early", [True, False])
def test_who_found_blocks_that_will_not_be_written_goes_with_their_writer(early: bool) -> None:
    rig = Rig(num_blocks=200, max_num_batched_tokens=512, long_prefill_token_threshold=100)
    first, second = rig.add(prompt(900), 3), rig.add(prompt(900), 3)
    rig.step()
    plan = rig.core.begin()
    assert plan is not None and len(plan.rows) == 2
    writer = rig.core.flights[-1].seqs[0].request
    output = None if early else rig.runner.execute(plan)
    rig.core.abort(writer.request_id)
    if early:
        prune(rig.core, plan)
    rig.core.finish(plan, output or rig.runner.execute(plan))
    rig.check()
    other = second if writer is first else first
    rig.run()
    assert rig.answer(other) == rig.truth(other, 3)
