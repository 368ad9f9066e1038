"""SamplingParams: ranges with their messages, and what the model's defaults fill in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.params import SamplingParams


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, and under 2**31, not 0"),
        ({"temperature": -0.1}, "temperature must be between 0 and 100, not -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k must be 0 (all) or more, and under 2**63, not -1"),
        ({"top_p": 0.0}, "top_p must be over 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 1.0}, "min_p must be at least 0 and under 1, not 1.0"),
        ({"min_p": -0.1}, "min_p"),
        ({"stop": ("a", "")}, "stop must not contain an empty text"),
        ({"stop": "END"}, "stop must be a list of texts"),
        ({"seed": -1}, "seed must be between 0 and 2**63 - 1, not -1"),
        ({"seed": 2**63}, "seed"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be from 0 to max_tokens (4), not 5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be over 0 and at most 10, not 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2, not 2.1"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, not -3"),
        ({"logit_bias": {5: 101}}, "logit_bias must be between -100 and 100, not 101"),
        ({"logit_bias": {-5: 1}}, "logit_bias must name token ids from 0 to under 2**31, not -5"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": ((5, 1), (5, 2))}, "logit_bias must name a token once"),
        ({"bad_words": "no"}, "bad_words must be a list of texts"),
        ({"bad_words": ("a", " ")}, "bad_words must not contain an empty text"),
        ({"bad_words": ("a",) * 101}, "bad_words must be at most 100, not 101"),
        ({"bad_word_ids": ((),)}, "bad_word_ids must not contain an empty word"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must be 0 or more, and under 2**31, not -1"),
        ({"logprobs": 1.5}, "logprobs must be a whole number, not 1.5"),
        ({"logprobs": True}, "logprobs must be a whole number, not True"),
        ({"beam_width": 1.5}, "beam_width must be a whole number, not 1.5"),
        ({"n": 1.5}, "n must be a whole number, not 1.5"),
        ({"n": "2"}, "n must be a whole number, not '2'"),
        ({"n": None}, "n must be a whole number, not None"),
        ({"stop": (b"x",)}, "stop must be a list of texts, not b'x'"),
        ({"stop": (5,)}, "stop must be a list of texts, not 5"),
        ({"stop": 5}, "stop must be a list of texts, not 5"),
        ({"bad_words": ("a", None)}, "bad_words must be a list of texts, not None"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must be a list of whole numbers, not 1.5"),
        ({"stop_token_ids": (2**70,)}, "stop_token_ids must be 0 or more, and under 2**31, not"),
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        (
            {"top_k": 9223372036854775808},
            "top_k must be 0 (all) or more, and under 2**63, not 9223372036854775808",
        ),
        ({"top_k": 10**400}, "top_k must be 0 (all) or more"),
        ({"top_p": -0.0}, "top_p must be over 0"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"early_stopping": 5}, "early_stopping must be no, yes or never, not 5"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be a list of pairs of a token id and a number, not"),
        ({"logit_bias": ((1, 2, 3),)}, "logit_bias must be a list of pairs of a token id and a number, not"),
        ({"logit_bias": 5}, "logit_bias must be a list of pairs of a token id and a number, not"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias must name token ids from 0 to under 2**31"),
        ({"bad_word_ids": ((1, "x"),)}, "bad_word_ids must be a list of lists of token ids"),
        ({"bad_word_ids": (5,)}, "bad_word_ids must be a list of lists of token ids"),
        ({"length_penalty": float("nan")}, "length_penalty must be between -10 and 10"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be between -2 and 2, not inf"),
        ({"max_tokens": 2**40}, "max_tokens must be"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
    ],
)
def test_a_value_out_of_range_is_named_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$") as error:
        SamplingParams(**wrong)
    assert words in str(error.value)


def test_the_edges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=2**63 - 1)
    SamplingParams(temperature=100, top_p=1e-9, min_p=0.999, seed=0)
    SamplingParams(max_tokens=4, min_tokens=4, repetition_penalty=10, presence_penalty=-2, logprobs=20)


def test_lists_are_stored_as_tuples_and_numbers_in_their_kind() -> None:
    p = SamplingParams(stop=["a"], stop_token_ids=[3], bad_word_ids=[[1, 2]], logit_bias=[[5, 1]])  # type: ignore[arg-type]
    assert (p.stop, p.stop_token_ids, p.bad_word_ids, p.logit_bias) == (("a",), (3,), ((1, 2),), ((5, 1.0),))
    assert hash(p)
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"
    assert type(SamplingParams(temperature=1).temperature) is float
    assert SamplingParams(top_k=2**63 - 1).top_k == 2**63 - 1


def test_what_changes_logits_says_so() -> None:
    assert not SamplingParams(logprobs=5, stop_token_ids=(3,)).shapes_logits
    for knob in (
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1}},
        {"bad_word_ids": ((3,),)},
    ):
        assert SamplingParams(**knob).shapes_logits  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={9: 1, 3: -2}).logit_bias == ((3, -2.0), (9, 1.0))  # type: ignore[arg-type]


def test_bad_words_are_words_at_the_start_and_after_a_space() -> None:
    codes = {"no": [7], " no": [8, 9], "  ": []}
    p = SamplingParams(bad_words=("no",), bad_word_ids=((1,),)).with_words(lambda text: codes[text])
    assert p.bad_word_ids == ((1,), (7,), (8, 9))


def test_without_model_defaults_a_request_is_greedy() -> None:
    for defaults in ({}, {"temperature": 0.6, "top_k": 20}, {"do_sample": False, "temperature": 0.6}):
        p = SamplingParams().resolved(defaults, seed=5)
        assert (p.temperature, p.top_k, p.top_p, p.seed) == (0.0, 0, 1.0, 5)


def test_a_model_that_samples_fills_what_is_left_open() -> None:
    model = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    p = SamplingParams(top_k=0, seed=9).resolved(model, seed=5)
    assert (p.temperature, p.top_k, p.top_p, p.seed) == (0.6, 0, 0.95, 9)
    assert SamplingParams().resolved({"do_sample": True}, 1).temperature == 1.0
    assert SamplingParams(temperature=0).resolved(model, 1).temperature == 0
    assert SamplingParams(top_k=1).resolved(model, 1).top_k == 1


def test_a_generation_config_with_null_in_it_means_its_defaults() -> None:
    model = {"do_sample": True, "temperature": None, "top_k": None, "top_p": None}
    p = SamplingParams().resolved(model, seed=5)
    assert (p.temperature, p.top_k, p.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize("tiny", [1e-320, 1e-40, 1e-38, 1e-7])
def test_a_temperature_that_no_logit_can_be_divided_by_is_greedy(tiny: float) -> None:
    assert SamplingParams(temperature=tiny).resolved({}, 1).temperature == 0
    assert SamplingParams().resolved({"do_sample": True, "temperature": tiny}, 1).temperature == 0
    assert SamplingParams(temperature=1e-6).resolved({}, 1).temperature == 1e-6


def test_the_event_gets_plain_values() -> None:
    plain = SamplingParams(stop=("a",), stop_token_ids=(1, 2)).as_dict()
    assert plain["stop"] == ["a"] and plain["stop_token_ids"] == [1, 2]
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == set(SamplingParams.__slots__)


def test_a_models_repetition_penalty_holds_unless_the_request_has_its_own() -> None:
    """As in transformers it needs no do_sample, which min_p does."""
    greedy = {"repetition_penalty": 1.1, "min_p": 0.2, "top_p": 1e-9}
    p = SamplingParams().resolved(greedy, seed=5)
    assert (p.repetition_penalty, p.min_p, p.top_p) == (1.1, 0.0, 1.0)
    assert p.counts_tokens and not SamplingParams().counts_tokens
    p = SamplingParams().resolved(greedy | {"do_sample": True}, seed=5)
    assert (p.repetition_penalty, p.min_p, p.top_p) == (1.1, 0.2, 1e-9)
    p = SamplingParams(repetition_penalty=1.0, min_p=0.0).resolved(greedy | {"do_sample": True}, seed=5)
    assert (p.repetition_penalty, p.min_p) == (1.0, 0.0)
    assert SamplingParams(beam_width=4).resolved(greedy, 1).repetition_penalty == 1.0
    assert SamplingParams().resolved({"repetition_penalty": None}, 1).repetition_penalty == 1.0
