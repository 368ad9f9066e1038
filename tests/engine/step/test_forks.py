"""n samples of one prompt: shared blocks, copies, seeds, preemption, abort, refusal, the figures at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import events as ev
from engine.params import SamplingParams
from engine.step.sequence import Request, Status
from tests.engine.rig import Rig, prompt, prune
from tests.toy_runner import expected


def samples(request: Request) -> list[list[int]]:
    return [list(s.output_ids) for s in request.branches]


def truth(request: Request, count: int, vocab: int = 1000) -> list[list[int]]:
    """What the toy language says in each branch, without any paging."""
    return [
        expected(list(request.prompt_token_ids), count, vocab, branch) for branch in range(request.params.n)
    ]


@pytest.mark.conformance(102)
def test_four_samples_hold_the_prompt_once_and_copy_only_its_partial_block() -> None:
    """40 tokens are 2 full blocks and 8 slots of a third. The last writer of the third block keeps it."""
    rig = Rig()
    request = rig.add(prompt(40), 20, n=4)
    rig.step()
    assert [e.child for e in rig.events(ev.SequenceForked)] == [1, 2, 3]
    tables = [s.table[:] for s in request.branches]
    assert (
        tables[0] == tables[1] == tables[2] == tables[3] and [rig.pool.ref(b) for b in tables[0]] == [4] * 3
    )
    assert rig.pool.num_active == 3 and len({s[0] for s in samples(request)}) == 4
    rig.step()
    copies = rig.events(ev.BlocksCopied)
    assert [(e.seq_id, e.index, e.src) for e in copies] == [(i, 2, tables[0][2]) for i in (0, 1, 2)]
    assert rig.pool.num_active == 2 + 4 and [rig.pool.ref(s.table[2]) for s in request.branches] == [1] * 4
    assert [rig.pool.ref(b) for b in request.branches[0].table[:2]] == [4, 4]
    rig.run()
    assert samples(request) == truth(request, 20) and rig.pool.num_active == 0
    assert rig.usage(request).output_tokens == 80 and rig.usage(request).computed_tokens == 40
    assert rig.finished(request).reason == "length" and rig.events(ev.RequestQueued)[0].n == 4


@pytest.mark.conformance(102)
def test_a_prompt_that_ends_with_its_block_is_never_copied() -> None:
    rig = Rig()
    request = rig.add(prompt(48), 20, n=3)
    rig.run()
    assert rig.events(ev.BlocksCopied) == [] and samples(request) == truth(request, 20)


def test_a_fork_comes_before_the_first_tokens_in_one_batch() -> None:
    rig = Rig()
    rig.add(prompt(40), 5, n=2)
    rig.step()
    names = [n for n in rig.names() if n in ("SequenceForked", "BlocksTouched", "TokensSampled")]
    assert names == ["SequenceForked", "BlocksTouched", "TokensSampled"]
    (sampled,) = rig.events(ev.TokensSampled)
    assert (sampled.seq_ids, sampled.counts, sampled.num_computed) == ([0, 1], [1, 1], [40, 40])


@pytest.mark.conformance(100, 102, 108)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [7, 17, 2048])
def test_samples_are_the_same_whatever_the_chunks_the_cache_and_the_company(
    budget: int, caching: bool
) -> None:
    rig = Rig(num_blocks=60, max_num_batched_tokens=budget, max_num_seqs=6, enable_prefix_caching=caching)
    requests = [
        rig.add(prompt(n, f), 20, n=k) for n, f, k in ((40, 0, 4), (33, 1, 1), (40, 0, 2), (16, 2, 3))
    ]
    rig.run()
    for request in requests:
        assert samples(request) == truth(request, 20)


@pytest.mark.conformance(72, 102)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("step", range(9))
def test_a_preemption_at_any_step_changes_no_sample_and_shares_again(step: int, caching: bool) -> None:
    """The blocks are shared again, with the cache or without, so four need no more than before."""
    rig = Rig(num_blocks=40, max_num_batched_tokens=25, enable_prefix_caching=caching)
    request = rig.add(prompt(40), 30, n=4)
    for _ in range(step):
        rig.step()
    if request.status is Status.RUNNING:
        rig.core.scheduler.preempt(request, rig.core.flights)
        rig.check()
    most = 0
    while rig.core.has_work:
        rig.step()
        most = max(most, rig.pool.num_active)
    assert samples(request) == truth(request, 30) and rig.pool.num_active == 0
    assert most <= 2 + 4 * 3
    assert rig.usage(request).output_tokens == 120


@pytest.mark.conformance(102, 106, 112)
@pytest.mark.parametrize("caching", [True, False])
def test_samples_that_just_fit_run_to_their_ends_beside_others(caching: bool) -> None:
    """A pool that holds exactly the prompt's 2 blocks and 4 tails of 3: they come and go, and all end."""
    rig = Rig(num_blocks=1 + 2 + 4 * 3, max_num_seqs=8, enable_prefix_caching=caching)
    requests = [rig.add(prompt(40, i), 38, n=4) for i in range(3)] + [rig.add(prompt(30, 5), 20)]
    rig.run()
    for request in requests:
        assert rig.finished(request).reason == "length"
        assert samples(request) == truth(request, request.params.max_tokens)
    assert rig.events(ev.RequestPreempted) or rig.events(ev.AdmissionBlocked)


@pytest.mark.conformance(107)
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("moment", ["between", "scheduled", "executed"])
def test_an_abort_at_any_moment_returns_all_blocks(steps: int, moment: str) -> None:
    rig = Rig(num_blocks=40, max_num_batched_tokens=20)
    request, other = rig.add(prompt(40), 9, n=3), rig.add(prompt(40), 9, n=2)
    for _ in range(steps):
        rig.step()
    if moment == "between":
        rig.core.abort(request.request_id)
    elif (plan := rig.core.begin()) is not None:
        output = rig.runner.execute(plan) if moment == "executed" else None
        rig.core.abort(request.request_id)
        if output is None:
            prune(rig.core, plan)
            output = rig.runner.execute(plan)
        rig.core.finish(plan, output)
    rig.check()
    rig.run()
    assert samples(other) == truth(other, 9) and rig.pool.num_active == 0
    assert rig.finished(request).usage.output_tokens == request.num_output


@pytest.mark.conformance(112)
def test_samples_whose_tails_can_never_fit_are_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=15)  # 14 usable
    fits = rig.add(prompt(40), 38, n=4)
    wide, many = rig.add(prompt(40), 42, n=4), rig.add(prompt(4), 1, n=17)
    rig.check()
    assert rig.finished(wide).reason == "refused"
    assert rig.finished(wide).error == (
        "n = 4 samples take 18 blocks (2 of the prompt and 4 x 4 of their own), the pool has 14: "
        "ask for fewer or lower max_tokens"
    )
    assert rig.finished(many).error == (
        "n = 17 samples run at once, --max-num-seqs is 16: ask for fewer or raise it"
    )
    rig.run()
    assert samples(fits) == truth(fits, 38) and not rig.events(ev.RequestPreempted)


@pytest.mark.conformance(61)
def test_samples_count_as_sequences_before_they_part() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=64)
    rig.add(prompt(40), 9, n=3)
    rig.add(prompt(40, 1), 9, n=2)
    rig.step()
    (blocked,) = rig.events(ev.AdmissionBlocked)
    assert (blocked.request_id, blocked.need, blocked.free, blocked.reason) == (1, 2, 1, "max_num_seqs")
    rig.run()


def test_a_sample_that_ends_gives_its_own_blocks_back_at_once() -> None:
    """Token 7 ends a branch; the request ends with its last branch."""
    rig = Rig(vocab=40, num_blocks=100)
    request = rig.add(prompt(20, vocab=40), 60, n=6, stop_token_ids=(7,))
    ends = [t.index(7) + 1 if 7 in t else 60 for t in truth(request, 60, 40)]
    assert len(set(ends)) > 2
    for step in range(1, max(ends) + 1):
        assert rig.core.has_work
        rig.step()
        assert [len(s.table) > 0 for s in request.branches] == [end > step for end in ends]
    assert not rig.core.has_work and rig.usage(request).output_tokens == sum(ends)


@pytest.mark.conformance(111)
def test_a_failed_forward_or_bad_logits_where_samples_part_fail_the_request_alone() -> None:
    def fault(step: int, when: str) -> None:
        if step == 0 and when == "after":
            raise RuntimeError("lost")

    makers: list[Callable[[], Rig]] = [lambda: Rig(fault=fault), lambda: Rig(bad=lambda seq_id: seq_id == 0)]
    for rig in (make() for make in makers):
        request = rig.add(prompt(40), 5, n=4)
        rig.run()
        assert rig.finished(request).reason == "error" and len(request.branches) == 1
        assert rig.pool.num_active == rig.pool.num_hashes == 0
        again = rig.add(prompt(40), 5, n=4)
        rig.run()
        assert samples(again) == truth(again, 5)


def test_n_samples_of_nobodys_temperature_are_not_n_times_the_same() -> None:
    assert SamplingParams(n=4).resolved({}, 0).temperature == 0.7
    assert SamplingParams(n=4, temperature=0).resolved({}, 0).temperature == 0.0
    assert SamplingParams(n=4).resolved({"do_sample": True, "temperature": 0.6}, 0).temperature == 0.6
    assert SamplingParams().resolved({}, 0).temperature == 0.0
    with pytest.raises(ValueError, match="n must be between"):
        SamplingParams(n=0)


@pytest.mark.conformance(108)
def test_a_seed_gives_the_same_sample_alone_and_among_siblings() -> None:
    """On a real model's runner: branch 0 is what the seed gives alone; four are the first four of six."""
    from engine.config import EngineConfig
    from engine.event_log import EventLog
    from engine.model.torch_runner import TorchRunner
    from engine.step.core import EngineCore
    from tests.engine.tiny import CPU64, LLAMA, random_weights

    runner = TorchRunner.from_weights(LLAMA, random_weights(LLAMA), CPU64)
    core = EngineCore(
        EngineConfig(max_num_batched_tokens=512, max_num_seqs=16),
        runner,
        EventLog(iter(range(10**6)).__next__, lambda batch: None),
        hash_seed=1,
    )

    def ask(n: int, number: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=n)
        request = core.add_request(number, prompt(37, vocab=199), params)
        while core.has_work:
            assert core.step() is not None
        return samples(request)

    one, four, six = ask(1, 1), ask(4, 2), ask(6, 3)
    assert one[0] == four[0] and four == six[:4] and len({tuple(s) for s in six}) == 6
