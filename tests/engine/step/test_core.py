"""EngineCore: lives of requests, statistics, stops, refusals, faults, and that no setting changes a token."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from engine import events as ev
from engine.errors import SetupError
from engine.step.sequence import Status
from tests.engine.rig import Rig, fork, prompt, prune
from tests.toy_runner import ToyFault, expected

# ------------------------------------------------------------------------------ worked examples


@pytest.mark.conformance(109)
def test_1024_tokens_and_10_computed_take_65_blocks_with_6_slots_unused() -> None:
    rig = Rig(num_blocks=200)
    request = rig.add(prompt(1024), 50)
    for _ in range(11):  # the eleventh step computes the tenth output and samples the eleventh
        rig.step()
    (branch,) = request.branches
    assert (branch.num_computed, request.num_output) == (1034, 11)
    assert len(branch.table) == 65
    slots = len(branch.table) * 16
    unused = slots - branch.num_computed
    assert unused == 6
    assert f"{unused / slots:.1%}" == "0.6%" and f"{(2048 - 1034) / 2048:.1%}" == "49.5%"


@pytest.mark.conformance(109)
def test_a_2000_token_system_prompt_is_125_blocks_and_the_next_message_computes_13() -> None:
    rig = Rig(num_blocks=400)
    rig.add(prompt(2000) + prompt(200, 1), 1)
    rig.run()
    second = rig.add(prompt(2000) + prompt(200, 2), 1)
    seen = len(rig.batches)
    rig.run()
    lookup = rig.events(ev.PrefixLookup, second.request_id)[0]
    assert (lookup.hit_blocks, lookup.hit_tokens, lookup.prompt_tokens) == (125, 2000, 2200)
    fresh = [e for b in rig.batches[seen:] for e in b.events if isinstance(e, ev.BlocksAllocated)]
    assert sum(len(e.ids) for e in fresh) == 13
    assert rig.usage(second).computed_tokens == 200


@pytest.mark.conformance(109)
def test_a_10000_token_prompt_beside_a_decode_takes_chunks_of_2047() -> None:
    rig = Rig(num_blocks=800)
    rig.add(prompt(16, 1), 50)
    rig.step()
    rig.add(prompt(10_000), 1)
    assert [rig.step() for _ in range(5)] == [{0: 1, 1: 2047}] * 4 + [{0: 1, 1: 1812}]


# ----------------------------------------------------------------------------------- statistics


@pytest.mark.conformance(30, 57)
@pytest.mark.parametrize(("length", "cached"), [(17, 16), (32, 16), (48, 32), (55, 48), (1000, 992)])
def test_the_same_prompt_again_is_cached_but_for_its_last_token_or_block(length: int, cached: int) -> None:
    rig = Rig(num_blocks=130)
    first, second = (rig.add(prompt(length), 2), rig.run(), rig.add(prompt(length), 2))[::2]
    rig.run()
    cold, hit = rig.usage(first), rig.usage(second)
    assert (cold.prompt_tokens, cold.cached_tokens, cold.computed_tokens) == (length, 0, length)
    assert (hit.prompt_tokens, hit.cached_tokens, hit.computed_tokens) == (length, cached, length - cached)
    assert cold.cache_write_tokens == length // 16 * 16
    assert hit.cache_write_tokens == length // 16 * 16 - cached  # the duplicate of an aligned last block
    assert rig.answer(first) == rig.answer(second) == rig.truth(first, 2)


@pytest.mark.conformance(57)
def test_cache_write_counts_prompt_tokens_also_in_the_block_that_the_answer_fills() -> None:
    rig = Rig()
    request = rig.add(prompt(20), 20)
    rig.run()
    usage = rig.usage(request)
    assert (usage.cache_write_tokens, usage.output_tokens) == (20, 20)


@pytest.mark.conformance(53)
def test_a_lookup_is_told_once_however_often_admission_was_tried() -> None:
    rig = Rig(num_blocks=11)
    rig.add(prompt(100), 30)
    rig.step()
    waiting = rig.add(prompt(90, 1), 1)
    for _ in range(10):
        rig.step()
    assert rig.events(ev.PrefixLookup, waiting.request_id) == []
    rig.run()
    (lookup,) = rig.events(ev.PrefixLookup, waiting.request_id)
    assert (lookup.queried_blocks, lookup.prompt_tokens, lookup.resumed) == (5, 90, False)


@pytest.mark.conformance(54)
def test_a_resumed_lookup_says_so_and_leaves_cached_tokens_as_they_were() -> None:
    rig = Rig()
    request = rig.add(prompt(40), 10)
    rig.step()
    rig.core.scheduler.preempt(request, rig.core.flights)
    rig.run()
    first, again = rig.events(ev.PrefixLookup)
    assert (first.resumed, first.hit_tokens) == (False, 0)
    assert (again.resumed, again.hit_tokens, again.prompt_tokens) == (True, 32, 41)
    usage = rig.usage(request)
    assert (usage.cached_tokens, usage.computed_tokens) == (0, 40)
    assert (usage.preemptions, usage.recomputed_tokens) == (1, 40 - 32)
    assert usage.cache_write_tokens == 40  # its third block was published later; nothing is counted twice


@pytest.mark.conformance(55)
def test_with_caching_off_no_lookup_is_told() -> None:
    rig = Rig(enable_prefix_caching=False)
    for _ in range(2):
        request = rig.add(prompt(40), 2)
        rig.run()
    assert rig.events(ev.PrefixLookup) == rig.events(ev.BlocksStored) == []
    usage = rig.usage(request)
    assert (usage.cached_tokens, usage.computed_tokens, usage.cache_write_tokens) == (0, 40, 0)


def test_cached_and_computed_make_up_the_prompt_whatever_happens() -> None:
    rig = Rig(num_blocks=20, max_num_batched_tokens=50)
    for i in range(40):
        rig.add(prompt(20 + 13 * i % 200, i % 3), 1 + 17 * i % 90)
        if i % 5 == 0:
            rig.step()
            rig.core.abort(i)
    rig.run()
    assert rig.events(ev.RequestPreempted)
    for done in rig.events(ev.RequestFinished):
        u = done.usage
        assert u.cached_tokens + u.computed_tokens == (
            u.prompt_tokens if done.timings.t_admitted is not None else 0
        )
        assert u.cached_tokens + u.cache_write_tokens <= u.prompt_tokens


def test_a_resume_that_computes_everything_again_counts_it() -> None:
    rig = Rig(enable_prefix_caching=False)
    request = rig.add(prompt(40), 10)
    for _ in range(4):
        rig.step()
    rig.core.scheduler.preempt(request, rig.core.flights)
    rig.run()
    assert rig.usage(request).recomputed_tokens == 43
    assert rig.events(ev.RequestPreempted)[0].tokens_lost == 43


@pytest.mark.conformance(20)
def test_when_all_is_done_every_block_is_back() -> None:
    rig = Rig(num_blocks=20)
    for i in range(6):
        rig.add(prompt(60, i % 2), 9)
    rig.run()
    assert rig.pool.num_active == 0 and rig.pool.num_available == 19
    assert rig.core.requests == {} and not rig.core.scheduler.running and not rig.core.scheduler.waiting
    assert rig.snapshot().refs == rig.snapshot().tables == []
    assert rig.pool.num_hashes > 0  # lazily: what was computed stays findable
    assert sorted(rig.ended) == list(range(6))


# ------------------------------------------------------------------------------------ publication


@pytest.mark.conformance(105)
def test_a_block_filled_in_the_last_step_of_a_request_stays_findable() -> None:
    rig = Rig()
    request = rig.add(prompt(15), 2)
    rig.run()
    assert rig.events(ev.BlocksEvicted) == []
    again = rig.add([*prompt(15), *rig.answer(request)], 1)
    rig.run()
    assert rig.usage(again).cached_tokens == 16


@pytest.mark.conformance(47)
def test_the_newest_sampled_token_has_no_kv_and_its_block_no_hash() -> None:
    rig = Rig()
    request = rig.add(prompt(14), 3)
    for computed, hashes in ((14, 0), (15, 0), (16, 1)):
        rig.step()
        assert len(request.branches[0]) == computed + 1 and rig.pool.num_hashes == hashes


@pytest.mark.conformance(105)
def test_what_a_stop_string_cut_from_the_text_stays_in_the_cache() -> None:
    rig = Rig(vocab=200, token_bytes=lambda t: b"<%d>" % t)
    tokens = expected(prompt(20, vocab=200), 12, 200)
    stop = f"<{tokens[9]}><{tokens[10]}><{tokens[11]}>"
    request = rig.add(prompt(20, vocab=200), 50, stop=(stop,))
    rig.run()
    assert rig.answer(request) == tokens and rig.finished(request).reason == "stop"
    text = "".join(t for e in rig.events(ev.TokensSampled) for t in e.text)
    assert text == "".join(f"<{t}>" for t in tokens[:9]) == request.branches[0].detok.text  # type: ignore[union-attr]
    again = rig.add(prompt(20, vocab=200) + tokens, 1)
    rig.run()
    assert rig.usage(again).cached_tokens == 16  # 31 of 32 tokens had KV


# ----------------------------------------------------------------------------------------- stops


@pytest.mark.conformance(81)
def test_eos_stops_and_shows_nothing_of_itself() -> None:
    tokens = expected(prompt(20), 8, 1000)
    rig = Rig(eos_ids=[tokens[5]], token_bytes=lambda t: b"%d." % t)
    request, deaf = rig.add(prompt(20), 8), rig.add(prompt(20), 8, ignore_eos=True)
    rig.run()
    assert rig.answer(request) == tokens[:6] and rig.finished(request).reason == "stop"
    assert request.branches[0].detok.text == "".join(f"{t}." for t in tokens[:5])  # type: ignore[union-attr]
    assert rig.answer(deaf) == tokens and rig.finished(deaf).reason == "length"


@pytest.mark.conformance(81)
def test_a_stop_token_ends_the_output_beside_eos() -> None:
    tokens = expected(prompt(20), 8, 1000)
    rig = Rig()
    request = rig.add(prompt(20), 8, stop_token_ids=(tokens[3],), ignore_eos=True)
    rig.run()
    assert rig.answer(request) == tokens[:4] and rig.finished(request).reason == "stop"


@pytest.mark.conformance(82)
def test_the_end_of_the_context_is_length() -> None:
    """There is no min_tokens here; max_tokens and the context are the only lengths."""
    rig = Rig(num_blocks=3)
    request = rig.add(prompt(20), 500)
    rig.run()
    assert rig.finished(request).reason == "length" and len(request.branches[0]) == 32


@pytest.mark.conformance(85)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_token_is_computed_beyond_the_last_that_is_asked_for(count: int) -> None:
    rig = Rig()
    rig.add(prompt(20), count)
    rig.run()
    assert sum(sum(e.n) for e in rig.events(ev.StepScheduled)) == 20 + count - 1


# ------------------------------------------------------------------------------- refusal and abort


@pytest.mark.conformance(48, 106)
def test_what_can_never_fit_is_refused_with_the_numbers_and_disturbs_nothing() -> None:
    rig = Rig(num_blocks=11, vocab=100)
    running = rig.add(prompt(40, vocab=100), 10)
    rig.step()
    before = rig.snapshot()
    for tokens, words in (
        (prompt(160, vocab=100), ["160 tokens", "context 160", "10 blocks of 16"]),
        ([], ["empty"]),
        ([1, 2, 100], ["100 is outside", "vocabulary of 100"]),
        ([1, -1], ["-1 is outside"]),
        ([1, 2**70], [str(2**70)]),
    ):
        request = rig.add(tokens, 1)
        done = rig.finished(request) if rig.core.flush() else None
        assert done and done.reason == "refused" and done.usage.output_tokens == 0
        assert done.error and all(w in done.error for w in words) and len(done.error) <= 200
        assert request.branches == []
    assert rig.snapshot() == before
    for batch in rig.batches:
        assert ev.decode_batch(ev.encode_batch(batch)) == batch
    last = rig.add(prompt(159, vocab=100), 10)  # the longest that fits: one token of output
    rig.run()
    assert len(rig.answer(last)) == 1 and rig.finished(last).reason == "length"
    assert rig.answer(running) == rig.truth(running, 10)


@pytest.mark.conformance(106)
def test_the_smallest_pool_serves_200_requests_in_arrival_order() -> None:
    rig = Rig(num_blocks=2, max_num_batched_tokens=40)
    requests = [rig.add(prompt(1 + i % 15, i % 3), 1 + i % 20) for i in range(200)]
    rig.run()
    assert rig.ended == [r.request_id for r in requests]  # of one length limit, one at a time
    assert all(rig.answer(r) == rig.truth(r, len(rig.answer(r))) for r in requests)


@pytest.mark.conformance(106)
def test_the_oldest_is_never_preempted_for_another() -> None:
    rig = Rig(num_blocks=8, block_size=4, max_num_batched_tokens=20, max_num_seqs=6)
    for i in range(30):
        rig.add(prompt(1 + 7 * i % 20, i % 4), 1 + 5 * i % 20)
    while rig.core.has_work:
        oldest = (rig.core.scheduler.running or [None])[0]
        seen = len(rig.batches)
        rig.step()
        preempted = [e for b in rig.batches[seen:] for e in b.events if isinstance(e, ev.RequestPreempted)]
        assert oldest is None or oldest.request_id not in [e.request_id for e in preempted]
    assert rig.events(ev.RequestPreempted)


@pytest.mark.conformance(84, 107)
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_moment_returns_all_blocks_and_ends_once(steps: int) -> None:
    """Waiting, mid-chunk, decoding, finished; the other request never notices."""
    rig = Rig(num_blocks=20, max_num_batched_tokens=20)
    other = rig.add(prompt(10, 1), 12)
    request = rig.add(prompt(50), 3)
    for _ in range(steps):
        rig.step()
    alive = request.status is not Status.FINISHED
    assert rig.core.abort(request.request_id) is alive and not rig.core.abort(request.request_id)
    rig.check()
    assert rig.finished(request).reason == ("abort" if alive else "length")
    assert rig.pool.num_active == len(other.branches[0].table)
    rig.run()
    assert rig.answer(other) == rig.truth(other, 12)
    assert rig.finished(request).usage.output_tokens == request.num_output


@pytest.mark.conformance(84, 107, 111)
@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("early", [True, False])
def test_an_abort_between_scheduling_and_commit_leaves_no_unwritten_hash(steps: int, early: bool) -> None:
    """Before the forward or after it. Those that shared its blocks in this step come out right, too."""
    rig = Rig(num_blocks=30, max_num_batched_tokens=64)
    request, sharer = rig.add(prompt(50), 4), rig.add(prompt(60), 4)
    for _ in range(steps):
        rig.step()
    plan = rig.core.begin()
    if plan is not None and early:
        rig.core.abort(request.request_id)
        prune(rig.core, plan)
        rig.core.finish(plan, rig.runner.execute(plan))
    elif plan is not None:
        output = rig.runner.execute(plan)
        rig.core.abort(request.request_id)
        rig.core.finish(plan, output)
    rig.check()
    rig.run()
    assert rig.answer(sharer) == rig.truth(sharer, 4)
    again = rig.add(prompt(50), 4)
    rig.run()
    assert rig.answer(again) == rig.truth(again, 4)


@pytest.mark.conformance(84)
def test_ten_aborted_in_any_order_end_aborted_with_exact_token_counts() -> None:
    rig = Rig()
    requests = [rig.add(prompt(10 + i, i), 50) for i in range(10)]
    for _ in range(4):
        rig.step()
    for i in (3, 9, 0, 5, 1, 8, 2, 7, 6, 4):
        assert rig.core.abort(i)
        rig.check()
    for r in requests:
        done = rig.finished(r)
        assert (done.reason, done.usage.output_tokens) == ("abort", 4)
        assert rig.answer(r) == rig.truth(r, 4)
    assert rig.pool.num_active == 0 and rig.core.step() is None


@pytest.mark.conformance(107)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_between_fork_and_first_token_returns_all_blocks(steps: int) -> None:
    rig = Rig()
    request = rig.add(prompt(40), 20)
    rig.step()
    child = fork(rig.core, request.branches[0])
    assert child is not None and child.table
    rig.check()
    for _ in range(steps):
        rig.step()
    rig.core.abort(0)
    rig.check()
    assert rig.pool.num_active == 0


# ------------------------------------------------------------------------------- failed forwards


@pytest.mark.conformance(111)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_failed_forward_fails_its_requests_only_and_leaves_no_hash_of_unwritten_kv(
    when: str, at: int
) -> None:
    def fault(step: int, moment: str) -> None:
        if step == at and moment == when:
            raise ToyFault(f"lost the\ndevice in step {step}")

    rig = Rig(num_blocks=30, max_num_batched_tokens=40, max_num_seqs=2, fault=fault)
    requests = [rig.add(prompt(60), 5), rig.add(prompt(50, 1), 5), rig.add(prompt(60), 5)]
    rig.run()
    failed = [r for r in requests if rig.finished(r).reason == "error"]
    assert failed and requests[2] not in failed
    (reported,) = rig.events(ev.EngineError)
    assert reported.message == f"a step failed: ToyFault: lost the device in step {at}" and not reported.fatal
    for r in requests:
        if r not in failed:
            assert rig.finished(r).reason == "length" and rig.answer(r) == rig.truth(r, 5)
    again = rig.add(prompt(60), 5)
    rig.run()
    assert rig.answer(again) == rig.truth(again, 5)
    done = rig.events(ev.StepCompleted)[at]
    assert done.decode_tokens == done.prefill_tokens == 0  # nothing was computed in that step


@pytest.mark.conformance(111)
def test_the_prompt_of_a_failed_first_forward_gives_the_cold_answer() -> None:
    broken = [True]

    def fault(step: int, moment: str) -> None:
        if broken and broken.pop():
            raise ToyFault("once")

    rig = Rig(fault=fault)
    first = rig.add(prompt(50), 3)
    rig.run()
    assert rig.finished(first).reason == "error" and rig.usage(first).cache_write_tokens == 0
    (gone,) = rig.events(ev.BlocksEvicted)
    assert (gone.why, len(gone.ids)) == ("unwritten", 3)
    again = rig.add(prompt(50), 3)
    rig.run()
    assert rig.usage(again).cached_tokens == 0 and rig.answer(again) == rig.truth(again, 3)


@pytest.mark.conformance(111)
def test_logits_that_are_not_finite_drop_every_block_that_the_request_stored() -> None:
    bad = {0}
    rig = Rig(bad=lambda seq_id: seq_id in bad, max_num_batched_tokens=40)
    first, other = rig.add(prompt(50), 9), rig.add(prompt(50, 1), 9)
    rig.run()
    assert rig.finished(first).reason == "error" and "NaN" in (rig.finished(first).error or "")
    assert first.num_output == 0 and rig.answer(other) == rig.truth(other, 9)
    gone = [e for e in rig.events(ev.BlocksEvicted) if e.why == "invalid"]
    assert sum(len(e.ids) for e in gone) == 3
    again = rig.add(prompt(50), 9)
    rig.run()
    assert rig.usage(again).cached_tokens == 0 and rig.answer(again) == rig.truth(again, 9)


def test_a_bad_row_that_was_dropped_meanwhile_counts_as_not_executed() -> None:
    rig = Rig(bad=lambda seq_id: True)
    request = rig.add(prompt(20), 3)
    plan = rig.core.begin()
    assert plan is not None
    output = rig.runner.execute(plan)
    rig.core.reset_prefix_cache(reset_running=True)
    rig.core.finish(plan, output)
    rig.check()
    assert output.bad_rows == [0] and request.status is Status.PREEMPTED


@pytest.mark.conformance(111)
def test_a_step_that_was_never_executed_is_undone() -> None:
    rig = Rig()
    request = rig.add(prompt(50), 3)
    plan = rig.core.begin()
    assert plan is not None
    with pytest.raises(RuntimeError, match="in flight was not finished"):
        rig.core.begin()
    rig.core.finish(plan, None)
    rig.check()
    assert rig.finished(request).error == "the step was not executed" and rig.pool.num_hashes == 0


# -------------------------------------------------------------------------------- reset and events


@pytest.mark.conformance(43, 92)
def test_a_reset_fails_while_blocks_are_in_use_and_clears_everything_when_none_are() -> None:
    rig = Rig()
    rig.add(prompt(50), 5)
    rig.step()
    hashes = rig.pool.num_hashes
    assert not rig.core.reset_prefix_cache() and rig.pool.num_hashes == hashes == 3
    rig.run()
    assert rig.events(ev.CacheCleared) == []
    assert rig.core.reset_prefix_cache()
    rig.check()
    assert rig.batches[-1].events[-1] == ev.CacheCleared()
    assert rig.pool.num_hashes == 0 and rig.snapshot().hashed_ids == []


@pytest.mark.conformance(43)
def test_a_reset_with_running_requests_takes_them_back_in_their_order() -> None:
    rig = Rig(max_num_seqs=3)
    requests = [rig.add(prompt(30, i), 5) for i in range(5)]
    rig.step()
    assert rig.core.reset_prefix_cache(reset_running=True)
    rig.check()
    assert list(rig.core.scheduler.waiting) == requests and rig.pool.num_hashes == 0


@pytest.mark.conformance(44, 100)
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_reset_in_the_middle_changes_no_token(steps: int) -> None:
    rig = Rig(max_num_batched_tokens=25)
    requests = [rig.add(prompt(30 + i, i % 2), 6) for i in range(3)]
    for _ in range(steps):
        rig.step()
    rig.core.reset_prefix_cache(reset_running=True)
    rig.run()
    for r in requests:
        assert rig.answer(r) == rig.truth(r, 6)


@pytest.mark.conformance(89, 95)
def test_every_stored_block_of_a_run_has_the_hash_of_its_tokens() -> None:
    from tests.engine.kv.test_hashing import chain

    rig = Rig(block_size=4)
    rig.add(prompt(21), 9, salt="s")
    rig.run()
    salt = rig.events(ev.RequestQueued)[0].salt
    stored = rig.events(ev.BlocksStored)
    tokens = [t for e in stored for t in e.token_ids]
    hashes = [h for e in stored for h in e.hashes]
    assert salt is not None
    assert hashes == [h.hex() for h in chain(tokens, 4, 7, bytes.fromhex(salt))] and len(hashes) == 7
    assert [e.salt for e in stored] == [salt] + [None] * (len(stored) - 1)
    for before, after in pairwise(stored):
        assert after.parent == before.hashes[-1] and after.start_index == before.start_index + len(before.ids)


def test_a_snapshot_is_the_last_event_of_a_batch_of_its_own() -> None:
    rig = Rig()
    rig.add(prompt(40), 5)
    rig.step()
    rig.core.abort(0)
    seen = len(rig.batches)
    rig.core.snapshot()
    rig.core.snapshot()
    pending, first, second = rig.batches[seen:]
    assert isinstance(pending.events[-1], ev.RequestFinished)
    assert first.events == second.events == [rig.snapshot()] and first.seq + 1 == second.seq


def test_a_token_is_spelled_at_its_first_use_only() -> None:
    rig = Rig(vocab=50, token_bytes=lambda t: b"%d" % t)
    for _ in range(3):
        rig.add(prompt(20, vocab=50), 9)
        rig.run()
    pieces = rig.events(ev.TokenPieces)
    ids = [t for e in pieces for t in e.ids]
    used = {t for e in rig.events(ev.RequestQueued) for t in e.prompt_token_ids}
    used |= {t for e in rig.events(ev.TokensSampled) for t in e.token_ids}
    assert len(ids) == len(set(ids)) and set(ids) == used
    assert all(e.bytes == [b"%d" % t for t in e.ids] for e in pieces)


def test_instants_are_in_order_and_the_counts_add_up() -> None:
    rig = Rig(num_blocks=20)
    for i in range(5):
        rig.add(prompt(40, i), 6)
    rig.run()
    for done in rig.events(ev.RequestFinished):
        t = done.timings
        assert None not in (t.t_admitted, t.t_first_token, t.t_last_token, t.t_finished)
        assert t.t_arrival <= t.t_admitted <= t.t_first_token <= t.t_last_token <= t.t_finished  # type: ignore[operator]
    for step in rig.events(ev.StepCompleted):
        assert step.free + step.active + step.cached == 19


def test_model_defaults_fill_what_a_request_leaves_open() -> None:
    rig = Rig(defaults={"do_sample": True, "temperature": 0.6, "top_k": 20})
    request = rig.add(prompt(5), 1, temperature=None)
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.6, 20, 1.0)
    assert rig.add(prompt(5), 1, temperature=0).params.temperature == 0
    with pytest.raises(SetupError, match="sampling defaults are wrong: top_k must be"):
        Rig(defaults={"do_sample": True, "top_k": -1})


# --------------------------------------------------------------------------- forks in the engine


@pytest.mark.conformance(102)
def test_branches_hold_the_prompt_once_and_copy_at_their_first_write() -> None:
    rig = Rig()
    request = rig.add(prompt(40), 6)
    rig.step()
    children = [fork(rig.core, request.branches[0]) for _ in range(3)]
    assert all(children) and rig.pool.ref(1) == rig.pool.ref(3) == 4 and rig.pool.num_active == 3
    forked = rig.events(ev.SequenceForked) if rig.core.flush() else []
    assert [(e.parent, e.child) for e in forked] == [(0, 1), (0, 2), (0, 3)]
    rig.step()
    assert len(rig.events(ev.BlocksCopied)) == 3 and rig.pool.num_active == 6
    rig.run()
    assert rig.pool.num_active == 0
    for branch in request.branches:
        tokens = branch.tokens.tolist()
        assert tokens[41:] == expected(tokens[:41], 5, 1000, branch.branch)


@pytest.mark.conformance(112)
def test_a_fork_that_could_not_grow_to_its_end_is_not_made() -> None:
    rig = Rig(num_blocks=11, max_num_seqs=3)
    request = rig.add(prompt(40), 20)  # 4 blocks a branch: two fit, a third does not
    assert fork(rig.core, request.branches[0]) is None  # it does not run yet
    rig.step()
    assert fork(rig.core, request.branches[0]) is not None
    assert fork(rig.core, request.branches[0]) is None
    rig.run()
    assert len(request.branches) == 2 and not rig.events(ev.RequestPreempted)
    wide = Rig(num_blocks=200, max_num_seqs=2)
    request = wide.add(prompt(40), 20)
    wide.step()
    assert fork(wide.core, request.branches[0]) is not None
    assert fork(wide.core, request.branches[0]) is None  # no place among max_num_seqs


@pytest.mark.conformance(112)
def test_the_budget_must_exceed_the_sequences() -> None:
    with pytest.raises(SetupError, match="must exceed --max-num-seqs"):
        Rig(max_num_batched_tokens=16, max_num_seqs=16)
    with pytest.raises(SetupError, match="without chunked prefill"):
        Rig(num_blocks=65, max_num_batched_tokens=1000, enable_chunked_prefill=False)


# -------------------------------------------------------------------------------- same tokens always


@pytest.mark.conformance(100, 110)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [2, 7, 15, 16, 17, 64, 2048])
def test_no_chunk_size_cache_or_company_changes_a_token(budget: int, caching: bool) -> None:
    rig = Rig(num_blocks=40, max_num_batched_tokens=budget, max_num_seqs=1, enable_prefix_caching=caching)
    alone = [rig.add(prompt(n, f), 7) for n, f in ((50, 0), (33, 1), (50, 0), (90, 0))]
    rig.run()
    rig = Rig(
        num_blocks=40,
        max_num_batched_tokens=max(budget, 5),
        max_num_seqs=4,
        enable_prefix_caching=caching,
    )
    together = [rig.add(prompt(n, f), 7) for n, f in ((50, 0), (33, 1), (50, 0), (90, 0))]
    rig.run()
    for a, b in zip(alone, together, strict=True):
        assert rig.answer(a) == rig.answer(b) == rig.truth(a, 7)


@pytest.mark.conformance(100, 110)
@pytest.mark.parametrize(("step", "caching", "budget"), list(product(range(1, 12), [True, False], [17, 512])))
def test_a_preemption_at_any_step_changes_no_token(step: int, caching: bool, budget: int) -> None:
    rig = Rig(num_blocks=30, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    requests = [rig.add(prompt(40, i), 6) for i in range(2)]
    for _ in range(step):
        rig.step()
    for request in rig.core.scheduler.running[:1]:
        rig.core.scheduler.preempt(request, rig.core.flights)
        rig.check()
    rig.run()
    for request in requests:
        assert rig.answer(request) == rig.truth(request, 6)


@pytest.mark.conformance(100)
@pytest.mark.parametrize("at", range(1, 6))
def test_a_fork_at_any_step_leaves_its_parent_alone(at: int) -> None:
    rig = Rig(num_blocks=40, max_num_batched_tokens=17)
    request = rig.add(prompt(40), 8)
    for _ in range(at):
        rig.step()
    child = fork(rig.core, request.branches[0])
    rig.run()
    assert child is not None
    assert rig.answer(request) == rig.truth(request, 8)
