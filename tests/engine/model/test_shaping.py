"""Shaping: what the knobs do to logits is what transformers' processors do, on every sampler's path."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.model.batch import DeviceRows
from engine.model.logit_shaping import BANNED, NOTHING_LEFT, Logprobs, Shaper
from engine.model.torch_runner import TorchRunner
from engine.ops.cpu import library as native
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.runner import Plan
from engine.step.sequence import Request, Sequence
from tests.engine.rig import Rig, prompt, row_for
from tests.engine.tiny import QWEN3, Driver, hf_model, random_weights

VOCAB = 60
PROMPT = [3, 4, 5, 4, 9, 11, 3, 7]
OUTPUT = [20, 4, 21, 20, 20, 5]


def sequence(
    params: dict[str, Any], output: list[int] = OUTPUT, eos: tuple[int, ...] = (2,), seq_id: int = 0
) -> Sequence:
    request = Request(seq_id, PROMPT, SamplingParams(**params), 0.0, eos_token_ids=frozenset(eos))
    seq = Sequence(seq_id, request)
    seq.tokens.extend(output)
    return seq


def shape(out: torch.Tensor, *seqs: Sequence, shaper: Shaper | None = None) -> dict[int, str]:
    """The logits of the next token of each, shaped in place."""
    shaper = shaper or Shaper()
    rows = [row_for(seq, len(seq) - 1, 1, True) for seq in seqs]
    return shaper.take(Plan(0, rows)) | shaper.apply(out, rows)


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=g, dtype=torch.float64) * 3


def shaped(params: dict[str, Any], output: list[int] = OUTPUT) -> torch.Tensor:
    out = logits()
    shape(out, sequence(params, output))
    return out


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal, where transformers' minus infinity is our BANNED."""
    return torch.allclose(got, torch.nan_to_num(want, neginf=BANNED), rtol=1e-12, atol=1e-12)


def theirs(*processors: Any, output: list[int] = OUTPUT) -> torch.Tensor:
    ids, out = torch.tensor([PROMPT + output]), logits()
    for processor in processors:
        out = processor(ids, out)
    return out


# ------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_is_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    assert same(shaped({"repetition_penalty": penalty}), theirs(RepetitionPenaltyLogitsProcessor(penalty)))


def test_bias_is_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {4: 5.0, 30: -100.0, 59: 0.25}
    want = theirs(SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()}))
    assert same(shaped({"logit_bias": bias}), want)


@pytest.mark.parametrize("output", [OUTPUT, [], [40], [40, 41], [50, 51, 40, 41]])
def test_bad_words_are_transformers(output: list[int]) -> None:
    from transformers import NoBadWordsLogitsProcessor

    words = [[8], [40, 1], [40, 41, 33], [11, 3, 7, 12], [50, 51, 40, 41, 42], [5, 6], list(range(20))]
    want = theirs(NoBadWordsLogitsProcessor(words), output=output)
    assert same(shaped({"bad_word_ids": tuple(map(tuple, words))}, output), want)


@pytest.mark.conformance(82)
@pytest.mark.parametrize("least", [0, 5, 6, 7, 20])
def test_least_length_is_transformers(least: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    got = shaped({"min_tokens": least, "stop_token_ids": (17,)})
    assert same(got, theirs(MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [2, 17], device="cpu")))


def test_all_of_them_come_in_transformers_order() -> None:
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    want = theirs(
        SequenceBiasLogitsProcessor({(4,): -7.0, (2,): 50.0}),
        RepetitionPenaltyLogitsProcessor(1.7),
        NoBadWordsLogitsProcessor([[5, 9], [8]]),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [2], device="cpu"),
    )
    params = {
        "logit_bias": {4: -7.0, 2: 50.0},
        "repetition_penalty": 1.7,
        "bad_word_ids": ((5, 9), (8,)),
        "min_tokens": 9,
    }
    assert same(shaped(params), want)


def test_presence_and_frequency_count_the_output_alone() -> None:
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for token in OUTPUT:
        counts[token] += 1
    got = shaped({"presence_penalty": 0.7, "frequency_penalty": -0.3})
    assert torch.allclose(got, logits()[0] - 0.7 * (counts > 0) + 0.3 * counts)
    assert got[0, 3] == logits()[0, 3]  # it stands in the prompt


# ------------------------------------------------------------------------------------- marks and rows


def test_marks_that_grow_step_by_step_are_marks_made_at_once() -> None:
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    shaper, seq = Shaper(), sequence(params, [])
    for token in [*OUTPUT, 1, 1]:
        seq.tokens.append(token)
        got = logits()
        shape(got, seq, shaper=shaper)
        output = list(seq.tokens[len(PROMPT) :])
        assert torch.equal(got, shaped(params, output))
    shaper.take(Plan(0, retired=[0]))
    seq.table_sent = -1
    again = logits()
    shape(again, seq, shaper=shaper)
    assert torch.equal(again, got)
    del seq.tokens[-4:]  # a draft that was taken back
    shorter = logits()
    shape(shorter, seq, shaper=shaper)
    assert torch.equal(shorter, shaped(params, OUTPUT[:-2]))


def test_a_row_that_asks_for_nothing_is_not_touched() -> None:
    out = logits(3)
    shape(
        out,
        sequence({}),
        sequence({"repetition_penalty": 2.0}, seq_id=1),
        sequence({"logprobs": 3}, seq_id=2),
    )
    assert torch.equal(out[0], logits(3)[0]) and torch.equal(out[2], logits(3)[2])
    assert not torch.equal(out[1], logits(3)[1])


def test_logprobs_are_the_models_own_and_fall() -> None:
    out = logits(3)
    ways: list[dict[str, Any]] = [{"logprobs": 3}, {}, {"logprobs": 0, "logit_bias": {5: 9}}]
    seqs = [sequence(params, seq_id=i) for i, params in enumerate(ways)]
    shaper, rows = Shaper(), [row_for(seq, len(seq) - 1, 1, True) for seq in seqs]
    shaper.take(Plan(0, rows))
    own = Logprobs(out, map(shaper.logprobs, rows))
    shaper.apply(out, rows)
    got = own.of(*(t.tolist() for t in own.look_up(torch.tensor([7, 8, 5]))))
    want = logits(3).log_softmax(-1)
    assert set(got) == {0, 2}
    assert got[0].sampled == pytest.approx(want[0, 7].item()) and got[2].sampled == pytest.approx(
        want[2, 5].item()
    )
    top = want[0].topk(3)
    assert got[0].top_ids == top.indices.tolist() and got[0].top == pytest.approx(top.values.tolist())
    assert got[2].top_ids == got[2].top == []


# ---------------------------------------------------------------------------------- the whole runner


def runner(dtype: Any = "float64", ops: Any = "reference") -> TorchRunner:
    config = EngineConfig(device="cpu", dtype=dtype, ops=ops, num_blocks=65, threads=1)
    return TorchRunner.from_weights(QWEN3, random_weights(QWEN3, 1), config)


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_a_banned_token_is_never_drawn_and_its_row_is_not_taken_for_a_bad_one(ops: str) -> None:
    if ops == "cpu" and native.load() is None:
        pytest.skip("no AVX-512-bf16 or no C compiler here")
    r = runner("bfloat16" if ops == "cpu" else "float32", ops)
    plain = Driver(r).generate([PROMPT], 12)[0]
    banned = tuple((t,) for t in set(plain))
    for temperature in (0.0, 2.0):
        driver = Driver(r, seed=3)
        params = SamplingParams(temperature=temperature, seed=4, bad_word_ids=banned)
        seqs = [driver.add(PROMPT, params), driver.add(PROMPT)]
        for _ in range(12):
            driver.step(1000)
        drawn, other = (list(s.tokens[len(PROMPT) :]) for s in seqs)
        assert len(drawn) == 12 and not set(drawn) & set(plain) and other == plain
        for seq in seqs:
            driver.drop(seq)


@torch.inference_mode()
def test_greedy_output_with_penalties_is_what_transformers_generates() -> None:
    r = runner()
    model = hf_model(QWEN3, random_weights(QWEN3, 1), torch.float64)
    ids = torch.tensor([PROMPT])
    for penalty, words in ((1.4, None), (0.8, [[1], [5, 6]])):
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            repetition_penalty=penalty,
            bad_words_ids=words,
        )
        params = SamplingParams(
            temperature=0, repetition_penalty=penalty, bad_word_ids=tuple(map(tuple, words or ()))
        )
        driver = Driver(r)
        seq = driver.add(PROMPT, params)
        for _ in range(16):
            driver.step(1000)
        assert list(seq.tokens) == want[0].tolist()
        driver.drop(seq)


# ------------------------------------------------------------------------------------------- the core


@pytest.mark.parametrize(
    ("knobs", "token"), [({"logit_bias": {1000: 1}}, 1000), ({"bad_word_ids": ((3, 5000),)}, 5000)]
)
def test_a_token_that_the_model_has_not_is_refused_by_name(knobs: dict[str, Any], token: int) -> None:
    rig = Rig()
    request = rig.add(prompt(5), 2, **knobs)
    rig.check()
    assert rig.finished(request).error == f"token id {token} is outside the model's vocabulary of 1,000"


@pytest.mark.conformance(82)
def test_a_stop_text_ends_nothing_before_the_least_length() -> None:
    rig = Rig(vocab=8, token_bytes=lambda t: b"ab"[t % 2 : t % 2 + 1])
    free = rig.add(prompt(9, vocab=8), 30, stop=("a",))
    held = rig.add(prompt(9, vocab=8), 30, stop=("a",), min_tokens=12)
    limit = rig.add(prompt(9, vocab=8), 6, stop=("a",), min_tokens=6)
    rig.run()
    truth = [t % 2 for t in rig.truth(held, 30)]
    assert rig.usage(free).output_tokens == truth.index(0) + 1
    assert rig.usage(held).output_tokens == truth.index(0, 11) + 1
    assert rig.usage(limit).output_tokens <= 6


def test_random_knobs_leave_finite_rows() -> None:
    r = random.Random(1)
    for _ in range(50):
        params = {
            "repetition_penalty": r.uniform(0.1, 10),
            "presence_penalty": r.uniform(-2, 2),
            "frequency_penalty": r.uniform(-2, 2),
            "logit_bias": {r.randrange(VOCAB): r.uniform(-100, 100) for _ in range(5)},
            "bad_word_ids": tuple((r.randrange(VOCAB),) for _ in range(20)),
            "min_tokens": r.randint(0, 20),
        }
        out = logits().float()
        shape(out, sequence(params))
        assert bool(torch.isfinite(out.sum(-1)).all())


def test_a_plan_without_drawing_rows_is_no_trouble() -> None:
    r = runner()
    driver = Driver(r)
    seq = driver.add([1, 2, 3, 4], SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=2))
    seq.table = [driver.free.pop()]
    output = r.execute(Plan(0, [row_for(seq, 0, 2, False)]))
    assert output.token_ids == [[]] and output.logprobs == {}
    output = r.execute(Plan(1, [row_for(seq, 2, 2, True)]))
    (reported,) = output.logprobs[0]
    assert len(reported.top) == 2 and reported.top_ids[0] != reported.top_ids[1]


@pytest.mark.parametrize(
    "params",
    [
        {"bad_word_ids": tuple((t,) for t in range(VOCAB))},
        {"bad_word_ids": tuple((t,) for t in range(VOCAB) if t != 2), "min_tokens": 9},
        {"bad_word_ids": tuple((OUTPUT[-1], t) for t in range(VOCAB))},
    ],
    ids=["words", "words and ends", "after the last token"],
)
def test_where_every_token_is_banned_the_request_is_told_so(params: dict[str, Any]) -> None:
    assert shape(logits(), sequence(params)) == {0: NOTHING_LEFT}
    spared = {**params, "bad_word_ids": params["bad_word_ids"][1:]}
    out = logits()
    assert shape(out, sequence(spared)) == {} and int(out[0].argmax()) == params["bad_word_ids"][0][-1]


def test_a_bias_of_minus_infinity_bans_and_makes_no_row_bad() -> None:
    seq = sequence({"logit_bias": dict.fromkeys(range(VOCAB), -100)})
    bias = tuple((t, float("-inf")) for t in range(VOCAB))
    object.__setattr__(seq.request.params, "logit_bias", bias)
    out = logits()
    assert shape(out, seq) == {0: NOTHING_LEFT} and bool(torch.isfinite(out.sum()))


def test_a_request_that_bans_everything_ends_with_an_error_and_the_other_goes_on() -> None:
    r = runner()
    core = EngineCore(r.config, r, EventLog(iter(range(10**6)).__next__, lambda batch: None), hash_seed=1)
    everything = tuple((t,) for t in range(r.vocab_size))
    sick = core.add_request(1, PROMPT, SamplingParams(temperature=0, bad_word_ids=everything))
    wide = core.add_request(2, PROMPT, SamplingParams(temperature=1, top_k=2**63 - 1, seed=1, max_tokens=3))
    while core.has_work:
        core.step()
    assert (sick.finish_reason, sick.error, sick.num_output) == ("error", NOTHING_LEFT, 0)
    assert wide.finish_reason == "length"


def test_a_top_k_beyond_any_integer_is_the_vocabulary() -> None:
    rows = DeviceRows(1, 2, 16, torch.device("cpu"), vocab_size=VOCAB)
    seq = sequence({"top_k": 5})
    object.__setattr__(seq.request.params, "top_k", 2**70)
    seq.table = [1]
    _, drawn = rows.apply(Plan(0, [row_for(seq, 0, 3, True)]))
    assert drawn.params["top_k"].tolist() == [VOCAB]
