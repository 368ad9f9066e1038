"""Prompt lookup: the same tokens as without, no unwritten hash, no write into a shared block, the budget."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import events as ev
from engine.config import EngineConfig
from engine.errors import SetupError
from engine.event_log import EventLog
from engine.model.torch_runner import TorchRunner
from engine.ops.sampler import PARAMS, SampleRows, sample
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.runner import Plan, StepOutput
from engine.step.sequence import Request
from engine.step.speculate import propose
from tests.engine.rig import Rig, prompt
from tests.engine.tiny import CPU64, LLAMA, random_weights
from tests.toy_runner import ToyRunner, expected


def naive(tokens: list[int], most: int) -> tuple[int, ...]:
    for length in (4, 3, 2):
        for at in range(len(tokens) - length - 1, -1, -1):
            if len(tokens) > length and tokens[at : at + length] == tokens[-length:]:
                return tuple(tokens[at + length : at + length + most])
    return ()


@given(st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=30), st.integers(1, 6))
def test_a_draft_follows_the_last_earlier_place_of_the_longest_tail(tokens: list[int], most: int) -> None:
    """Token ids whose bytes look alike at odd places, too."""
    assert propose(array("i", tokens), most) == naive(tokens, most)


def spans(rig: Rig) -> tuple[int, int]:
    reported = rig.events(ev.DraftVerified)
    return sum(e.proposed for e in reported), sum(e.accepted for e in reported)


# ------------------------------------------------------------------------------------- the same tokens


@pytest.mark.conformance(46, 70, 100, 104)
@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_tokens_are_those_without_speculation(drafts: int, block_size: int) -> None:
    """Over two tokens many drafts are right and many wrong; some end in the middle of a block."""
    rig = Rig(num_blocks=400, vocab=2, block_size=block_size, speculate=drafts)
    requests = [rig.add([i % 2] * 9 + [1 - i % 2], 40, n=1 + i % 3) for i in range(4)]
    rig.run()
    for request in requests:
        for branch, seq in enumerate(request.branches):
            assert list(seq.output_ids) == expected(list(request.prompt_token_ids), 40, 2, branch)
    proposed, accepted = spans(rig)
    assert 0 < accepted < proposed
    steps = sum(len(e.seq_ids) for e in rig.events(ev.StepScheduled))
    assert steps < 40 * sum(len(r.branches) for r in requests)


@pytest.mark.conformance(81, 104)
@pytest.mark.parametrize("most", range(1, 12))
def test_what_follows_an_end_within_the_drafts_is_dropped(most: int) -> None:
    plain, fast = (Rig(vocab=2, block_size=4, speculate=k) for k in (0, 6))
    for rig in (plain, fast):
        for stops in ((), (1,)):
            rig.add([0] * 10, most, stop_token_ids=stops)
            rig.add([0, 1] * 6, most, stop_token_ids=stops)
        rig.run()
    assert [r.usage.output_tokens for r in plain.events(ev.RequestFinished)] and {
        r.request_id: (r.reason, r.usage.output_tokens) for r in plain.events(ev.RequestFinished)
    } == {r.request_id: (r.reason, r.usage.output_tokens) for r in fast.events(ev.RequestFinished)}


@pytest.mark.conformance(104)
def test_rejected_drafts_give_their_blocks_back_and_leave_no_hash() -> None:
    rig = Rig(vocab=2, block_size=1, speculate=5)
    request = rig.add([0, 1] * 8, 60)
    seq = request.branches[0]
    given_back = 0
    while rig.core.has_work:
        seen = len(rig.batches)
        rig.step()
        if seq.table:
            assert len(seq.table) == seq.num_computed == len(seq) - 1
            assert sum(rig.pool.hash_of(b) is not None for b in seq.table) == seq.num_published
        kinds = [type(e) for b in rig.batches[seen:] for e in b.events]
        given_back += ev.DraftVerified in kinds and ev.BlocksReleased in kinds
    assert given_back > 5
    stored = [t for e in rig.events(ev.BlocksStored) for t in e.token_ids]
    assert stored == seq.tokens.tolist()[: len(stored)]


@pytest.mark.conformance(102, 104)
def test_a_verifier_never_writes_into_a_shared_block() -> None:
    """Samples that part in the middle of a block: drafts go into the copy."""
    rig = Rig(vocab=2, block_size=16, speculate=4)
    request = rig.add([0, 1] * 10, 30, n=4)
    rig.step()
    shared = request.branches[0].table[1]
    rig.step()
    assert len(rig.events(ev.BlocksCopied)) == 3 and rig.pool.ref(shared) == 1
    assert any(rig.events(ev.StepScheduled)[1].drafts)
    rig.run()


@pytest.mark.conformance(81)
def test_drafts_stop_at_the_end_of_the_context() -> None:
    rig = Rig(num_blocks=9, vocab=2, block_size=4, speculate=8)
    request = rig.add([0, 1] * 8, 200)
    rig.run()
    assert len(request.branches[0]) == 32 and rig.finished(request).reason == "length"


# -------------------------------------------------------------------------------------------- the budget


@pytest.mark.conformance(112)
def test_the_budget_must_exceed_the_sequences_with_their_drafts() -> None:
    with pytest.raises(SetupError, match=r"must exceed --max-num-seqs x \(1 \+ --speculate\) = 64"):
        EngineConfig(max_num_seqs=16, max_num_batched_tokens=64, speculate=3)
    EngineConfig(max_num_seqs=16, max_num_batched_tokens=65, speculate=3)
    with pytest.raises(SetupError, match="--speculate must be between 0 and 64"):
        EngineConfig(speculate=-1)


@pytest.mark.conformance(67, 112)
def test_drafts_take_neither_a_decode_nor_a_block_from_anybody() -> None:
    """A pool that decodes just fill: drafts find no block, nobody is preempted for them."""
    rig = Rig(
        num_blocks=1 + 4 * 4, vocab=2, block_size=4, speculate=8, max_num_seqs=4, max_num_batched_tokens=37
    )
    requests = [rig.add([0, 1] * 4, 8) for _ in range(4)]
    rig.run()
    assert not rig.events(ev.RequestPreempted) and all(r.finish_reason == "length" for r in requests)
    assert all(sum(e.n) <= 37 for e in rig.events(ev.StepScheduled))


def test_what_is_shaped_or_searched_gets_no_drafts() -> None:
    rig = Rig(vocab=4, speculate=4)
    rig.add([0, 1] * 10, 20, repetition_penalty=1.1)
    rig.add([0, 1] * 10, 20, beam_width=2)
    rig.run()
    assert not rig.events(ev.DraftVerified)


# ------------------------------------------------------------------------------------------ real models


def run(runner: TorchRunner, drafts: int, params: SamplingParams) -> tuple[list[list[int]], int]:
    accepted = 0

    def take(batch: ev.StepBatch) -> None:
        nonlocal accepted
        accepted += sum(e.accepted for e in batch.events if isinstance(e, ev.DraftVerified))

    config = EngineConfig(max_num_batched_tokens=128, max_num_seqs=8, speculate=drafts)
    core = EngineCore(config, runner, EventLog(iter(range(10**6)).__next__, take), hash_seed=1)
    requests = [core.add_request(i, prompt(12, i, 9) * 3, params) for i in range(4)]
    while core.has_work:
        assert core.step() is not None
    return [list(s.output_ids) for r in requests for s in r.branches], accepted


@pytest.mark.conformance(100, 108)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_models_tokens_are_those_without_speculation(temperature: float) -> None:
    """Greedy and sampled: the noise belongs to the place, so even a sample is the same token for token."""
    small = replace(LLAMA, vocab_size=9)
    runner = TorchRunner.from_weights(small, random_weights(small), replace(CPU64, max_num_seqs=8))
    params = SamplingParams(max_tokens=40, temperature=temperature, n=2, logprobs=1)
    plain, _ = run(runner, 0, params)
    fast, accepted = run(runner, 4, params)
    assert fast == plain and accepted > 10


class Markov(ToyRunner):
    """The next token depends on the last alone, drawn by the engine's own sampler from known logits."""

    seeds: ClassVar[dict[int, int | None]] = {}
    P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.4, 0.1, 0.5]], dtype=torch.float64)

    def execute(self, plan: Plan) -> StepOutput:
        self.seeds |= {row.seq_id: row.new.params.seed for row in plan.rows if row.new is not None}
        output = super().execute(plan)
        draws = [(i, k, b) for i, row in enumerate(plan.rows) for k, b in enumerate(row.draws)]
        if draws:
            params = np.zeros(len(draws), PARAMS)
            last, places = [], []
            for at, (i, k, branch) in enumerate(draws):
                row = plan.rows[i]
                behind = max(0, row.drafts - k)
                last.append(row.tokens[row.n - 1 - behind])
                places.append(row.start + row.n - behind)
                params[at] = (1.0, 1.0, 0.0, 0, self.seeds[row.seq_id], branch)
            ids, _ = sample(self.P[last].log(), SampleRows(params, np.array(places)))
            for (i, k, _), token in zip(draws, ids, strict=True):
                output.token_ids[i][k] = token
        return output


@pytest.mark.conformance(108)
def test_sampled_tokens_follow_the_models_distribution() -> None:
    """Chi-square over all transitions, at the 99.9 % point; drafts are both accepted and refused on the way."""
    reported: list[ev.DraftVerified] = []
    core = EngineCore(
        EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, speculate=4, enable_prefix_caching=False),
        Markov(2000, 16, 3),
        EventLog(
            iter(range(10**6)).__next__,
            lambda batch: reported.extend(e for e in batch.events if isinstance(e, ev.DraftVerified)),
        ),
        hash_seed=1,
    )
    requests: list[Request] = [
        core.add_request(i, [0, 1, 2, 0], SamplingParams(max_tokens=150, temperature=1.0, seed=i))
        for i in range(60)
    ]
    while core.has_work:
        core.step()
    counts = Counter(
        (a, b)
        for r in requests
        for a, b in zip(r.branches[0].tokens[3:-1], r.branches[0].output_ids, strict=True)
    )
    chi = 0.0
    for a in range(3):
        total = sum(counts[a, b] for b in range(3))
        for b in range(3):
            want = total * float(Markov.P[a, b])
            chi += (counts[a, b] - want) ** 2 / want
    assert chi < 22.46  # 6 degrees of freedom
    accepted, proposed = sum(e.accepted for e in reported), sum(e.proposed for e in reported)
    assert 1000 < accepted < proposed - 1000
