"""Beam search: transformers' hypotheses and scores; blocks, preemption, abort; the search alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.model.torch_runner import TorchRunner
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.sequence import Request, Status
from tests.engine.rig import Rig, best_beam, prompt
from tests.engine.tiny import CPU64, LLAMA, QWEN3, hf_model, random_weights

ENDS = (3, 5, 11, 17, 29, 33, 48, 50, 60, 77, 81, 93, 101, 120, 144, 150, 171, 190)
"""Enough that hypotheses end early and better ones replace them."""


def judge(rig: Rig, request: Request) -> None:
    """The answer and the scores are those of a search without paging."""
    p = request.params
    ends = frozenset(p.stop_token_ids)
    tokens, scores = best_beam(
        list(request.prompt_token_ids),
        p.beam_width,
        p.max_tokens,
        rig.vocab,
        ends=ends,
        length_penalty=p.length_penalty,
        early_stopping=p.early_stopping,
    )
    assert rig.answer(request) == tokens and len(request.branches) == 1
    assert request.search is not None
    assert [h.score for h in request.search.hypotheses] == pytest.approx(scores)
    assert rig.finished(request).reason == ("stop" if tokens[-1] in ends else "length")
    assert rig.usage(request).output_tokens == len(tokens)


# ------------------------------------------------------------------------------------- transformers


@pytest.mark.conformance(103)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_hypotheses_and_scores_are_those_of_transformers(model: str) -> None:
    """Every width, penalty and way of stopping, with many end tokens and with none, in float64."""
    shape = {"llama": LLAMA, "qwen3": QWEN3}[model]
    weights = {k: v * (0.6 if "embed" in k else 1.0) for k, v in random_weights(shape, 3).items()}
    reference = hf_model(shape, weights, torch.float64)
    runner = TorchRunner.from_weights(shape, dict(weights), replace(CPU64, max_num_seqs=16))
    core = EngineCore(
        EngineConfig(max_num_batched_tokens=64, max_num_seqs=16),
        runner,
        EventLog(iter(range(10**6)).__next__, lambda batch: None),
        hash_seed=1,
    )
    cases = product((2, 4), (1.0, 0.0, 2.0, -0.5), ("no", "yes", "never"), (ENDS, ()))
    seen = set()
    for number, (width, penalty, early, ends) in enumerate(cases):
        tokens = [(7 * i + 13 * number) % 199 for i in range(19)]
        params = SamplingParams(
            max_tokens=14,
            beam_width=width,
            length_penalty=penalty,
            early_stopping=early,  # type: ignore[arg-type]
            stop_token_ids=ends,
        )
        request = core.add_request(number, tokens, params)
        while core.has_work:
            assert core.step() is not None
        theirs = reference.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=14,
            length_penalty=penalty,
            early_stopping={"no": False, "yes": True, "never": "never"}[early],
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        output = theirs.sequences[0, 19:].tolist()
        mine = list(request.branches[0].output_ids)
        padding = set(output[len(mine) :])
        assert output[: len(mine)] == mine and padding <= {0, *ends[:1]}, (width, penalty, early, ends)
        assert request.search is not None
        scores = [h.score for h in request.search.hypotheses]
        assert scores == pytest.approx(theirs.sequences_scores.tolist()[: len(scores)], rel=2e-6, abs=2e-5)
        seen.add((len(mine), request.finish_reason))
    assert len(seen) > 5 and {reason for _, reason in seen} == {"stop", "length"}


# ---------------------------------------------------------------------------------- blocks and events


@pytest.mark.conformance(103)
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_never_exceed_the_prompt_and_a_tail_a_beam(caching: bool) -> None:
    rig = Rig(vocab=50, block_size=4, enable_prefix_caching=caching)
    request = rig.add(prompt(10, vocab=50), 25, beam_width=4, stop_token_ids=(7, 9))
    held = 0
    while rig.core.has_work:
        rig.step()
        if request.live:
            length = len(request.live[0])
            assert len(request.live) <= 4 and len({len(s) for s in request.live}) == 1
            held = max(held, rig.pool.num_active)
            assert rig.pool.num_active <= 2 + 4 * (-(-length // 4) - 2)
    judge(rig, request)
    pruned = [e.seq_id for e in rig.events(ev.BeamPruned)]
    born = [0, *(e.child for e in rig.events(ev.SequenceForked))]
    assert len(set(pruned)) == len(pruned) and set(born) - set(pruned) == {request.branches[0].seq_id}
    assert rig.pool.num_active == 0 and held > 9


@pytest.mark.conformance(103)
def test_a_pruned_beam_is_free_in_the_step_that_drops_it() -> None:
    rig = Rig(vocab=50, block_size=4)
    rig.add(prompt(10, vocab=50), 12, beam_width=3)
    rig.run()
    for batch in rig.batches:
        pruned = [e.seq_id for e in batch.events if isinstance(e, ev.BeamPruned)]
        freed = [e.seq_id for e in batch.events if isinstance(e, ev.BlocksReleased)]
        assert set(pruned) <= set(freed) or any(isinstance(e, ev.RequestFinished) for e in batch.events)


@pytest.mark.conformance(72, 100, 103)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("step", range(1, 12))
def test_a_preemption_at_any_step_changes_no_hypothesis(step: int, caching: bool) -> None:
    rig = Rig(num_blocks=40, vocab=50, block_size=4, max_num_batched_tokens=17, enable_prefix_caching=caching)
    request = rig.add(prompt(10, vocab=50), 12, beam_width=4, stop_token_ids=(7,))
    other = rig.add(prompt(21, 1, vocab=50), 9, n=2)
    for _ in range(step):
        rig.step()
    if request.status is Status.RUNNING:
        rig.core.scheduler.preempt(request, rig.core.flights)
        rig.check()
    rig.run()
    judge(rig, request)
    assert rig.usage(other).output_tokens == 18 and rig.pool.num_active == 0


@pytest.mark.conformance(103, 106, 112)
def test_beams_that_just_fit_come_to_their_end_beside_others_in_a_tiny_pool() -> None:
    rig = Rig(num_blocks=1 + 2 + 3 * 4, vocab=50, block_size=4, max_num_seqs=8, max_num_batched_tokens=20)
    requests = [rig.add(prompt(10, i, vocab=50), 14, beam_width=3) for i in range(3)]
    requests += [rig.add(prompt(9, 5, vocab=50), 8)]
    rig.run()
    for request in requests[:3]:
        judge(rig, request)
    assert rig.events(ev.RequestPreempted)


@pytest.mark.conformance(107)
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("executed", [True, False])
def test_an_abort_at_any_moment_returns_all_blocks(steps: int, executed: bool) -> None:
    rig = Rig(vocab=50, block_size=4, max_num_batched_tokens=17)
    request = rig.add(prompt(20, vocab=50), 12, beam_width=3, stop_token_ids=(7,))
    for _ in range(steps):
        rig.step()
    plan = rig.core.begin()
    assert plan is not None
    output = rig.runner.execute(plan) if executed else None
    rig.core.abort(request.request_id)
    rig.core.finish(plan, output)
    rig.check()
    assert rig.pool.num_active == 0 and rig.finished(request).reason == "abort"


@pytest.mark.conformance(112)
def test_beams_that_can_never_fit_are_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=15)
    wide, many = rig.add(prompt(40), 42, beam_width=4), rig.add(prompt(4), 1, beam_width=17)
    rig.check()
    assert rig.finished(wide).error == (
        "4 beams take 18 blocks (2 of the prompt and 4 x 4 of their own), the pool has 14: "
        "ask for fewer or lower max_tokens"
    )
    assert rig.finished(many).error == "17 beams run at once, --max-num-seqs is 16: ask for fewer or raise it"


def test_bad_logits_of_one_beam_fail_the_search_and_leave_nothing() -> None:
    bad = {2}
    rig = Rig(vocab=50, bad=lambda seq_id: seq_id in bad)
    request = rig.add(prompt(20, vocab=50), 12, beam_width=4)
    rig.run()
    assert rig.finished(request).reason == "error" and rig.pool.num_active == rig.pool.num_hashes == 0


def test_what_goes_with_beams_and_what_does_not() -> None:
    with pytest.raises(ValueError, match="beam_width over 1 goes with neither n"):
        SamplingParams(beam_width=2, n=2)
    with pytest.raises(ValueError, match="early_stopping must be no, yes or never"):
        SamplingParams(early_stopping="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beam_width must be between"):
        SamplingParams(beam_width=0)


def test_a_vocabulary_smaller_than_the_width_gives_fewer_beams_at_first() -> None:
    rig = Rig(vocab=2, block_size=4)
    request = rig.add([0, 1, 1], 6, beam_width=5)
    rig.step()
    assert len(request.live) == 2
    rig.run()
    judge(rig, request)
