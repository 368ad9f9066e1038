"""Conversations: the ids only grow, old text is never encoded again, and spans say whose words are where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.chat.conversation import Conversation, Span, Turn
from engine.files import tokenizer
from engine.files.model_files import ModelFiles
from engine.files.tokenizer import Tokenizer
from tests.engine import small_tokenizers as small


def made(folder: Path, template: str | None, kind: str = "byte_level") -> Tokenizer:
    return tokenizer.load(
        ModelFiles("safetensors", "x", small.write(folder, template=template, kind=kind), (), {})
    )


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("chatml"), small.CHATML)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("thinking"), small.THINKING)


def text_of(tokens: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokens.token_bytes, ids)).decode("utf-8", "replace")


def check_spans(turn: Turn) -> None:
    """They cover the prompt in order, without gaps, and neighbours differ."""
    position = 0
    before: tuple[str, str] | None = None
    for start, end, role, name in turn.spans:
        assert start == position < end
        assert role in ("template", "system", "user", "assistant")
        assert (role, name) != before
        position, before = end, (role, name)
    assert position == len(turn.token_ids)


def said(tokens: Tokenizer, turn: Turn, role: str) -> list[str]:
    return [text_of(tokens, turn.token_ids[start:end]) for start, end, who, _ in turn.spans if who == role]


def ask(chat: Conversation, text: str, answer: list[int], shown: str, reason: str = "stop") -> Turn:
    turn = chat.turn(text)
    check_spans(turn)
    chat.commit(answer, shown, reason)
    return turn


def test_the_first_turn_is_the_rendered_chat(chatml: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "user"}]
    turn = Conversation(chatml, "Be brief.", "page.txt").turn("user")
    assert turn.token_ids == chatml.encode(chatml.render(messages, True))
    assert not turn.rewrote_history
    check_spans(turn)
    # "user" also stands in the template; the words are told from it by their place
    assert said(chatml, turn, "user") == ["user"]
    assert said(chatml, turn, "system") == ["Be brief."]
    assert [name for *_, role, name in turn.spans if role == "system"] == ["page.txt"]


def test_without_a_system_message_the_templates_own_preamble_counts(chatml: Tokenizer) -> None:
    turn = Conversation(chatml).turn("hi")
    assert text_of(chatml, turn.token_ids).startswith("<|im_start|>system\nYou are helpful<|im_end|>\n")
    assert said(chatml, turn, "system") == []


@pytest.mark.parametrize("ended", [True, False])
def test_eos_comes_from_the_model_or_from_the_template(ended: bool, chatml: Tokenizer) -> None:
    """Sampled or not, the next turn holds it once."""
    chat = Conversation(chatml, "s")
    eos = chatml.encode("<|im_end|>")
    answer = [*chatml.encode("Paris."), *(eos if ended else [])]
    first = ask(chat, "a", answer, "Paris.", "stop" if ended else "length")
    second = chat.turn("b")
    check_spans(second)
    assert second.token_ids[: len(first.token_ids) + len(answer)] == first.token_ids + answer
    assert text_of(chatml, second.token_ids).count("Paris.<|im_end|>\n<|im_start|>user\nb<|im_end|>") == 1
    assert said(chatml, second, "assistant") == ["Paris."]
    assert said(chatml, second, "user") == ["a", "b"]
    assert not second.rewrote_history


def test_a_stop_string_keeps_the_ids(chatml: Tokenizer) -> None:
    chat = Conversation(chatml)
    answer = chatml.encode("Paris.STOP and")
    first = ask(chat, "a", answer, "Paris.")
    second = chat.turn("b")
    assert second.token_ids[: len(first.token_ids) + len(answer)] == first.token_ids + answer
    assert not second.rewrote_history


def test_ids_that_encoding_would_not_give_are_kept(chatml: Tokenizer) -> None:
    """A model may spell a word in other tokens than the tokenizer would."""
    chat = Conversation(chatml)
    letters = [token for letter in "Paris" for token in chatml.encode(letter)]
    assert letters != chatml.encode("Paris")
    first = ask(chat, "a", letters, "Paris")
    assert chat.turn("b").token_ids[len(first.token_ids) :][: len(letters)] == letters


def test_a_turn_without_an_answer_leaves_no_trace(chatml: Tokenizer) -> None:
    chat = Conversation(chatml)
    first = ask(chat, "a", chatml.encode("x"), "x")
    want = chat.turn("b").token_ids
    chat.turn("something else")
    chat.commit([], "", "abort")
    chat.turn("something else")
    chat.commit(chatml.encode("nan"), "nan", "error")
    chat.commit(chatml.encode("twice"), "twice", "stop")
    assert chat.turn("b").token_ids == want
    assert want[: len(first.token_ids)] == first.token_ids


def test_dropped_thinking_rewrites_history(thinking: Tokenizer) -> None:
    chat = Conversation(thinking, "s", "page.txt")
    plain = ask(chat, "a", thinking.encode("one<|im_end|>"), "one")
    thought = "<think>\nhm\n</think>\n\ntwo"
    second = ask(chat, "b", thinking.encode(thought + "<|im_end|>"), thought)
    assert not second.rewrote_history
    assert second.token_ids[: len(plain.token_ids)] == plain.token_ids
    third = chat.turn("c")
    check_spans(third)
    assert third.rewrote_history
    assert "hm" not in text_of(thinking, third.token_ids)
    assert (
        third.token_ids[: len(second.token_ids)] == second.token_ids
    )  # what stands before it is still cached
    assert said(thinking, third, "assistant") == ["one", "two"]
    assert said(thinking, third, "user") == ["a", "b", "c"]
    messages = [{"role": "system", "content": "s"}]
    for question, answer in (("a", "one"), ("b", thought)):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = thinking.render([*messages, {"role": "user", "content": "c"}], True)
    assert third.token_ids == thinking.encode(rendered)
    chat.commit(thinking.encode("three<|im_end|>"), "three", "stop")
    assert not chat.turn("d").rewrote_history


def test_a_template_that_trims(tmp_path: Path) -> None:
    tokens = made(tmp_path, small.TRIMMING)
    chat = Conversation(tokens, "  system \n")
    turn = ask(chat, " a\n", tokens.encode("one"), "one")
    assert said(tokens, turn, "system") == ["system"]
    assert said(tokens, turn, "user") == ["a"]
    assert not ask(chat, "b", tokens.encode("two \n"), "two \n").rewrote_history
    third = chat.turn("c")  # "two" without its spaces is another text
    check_spans(third)
    assert third.rewrote_history
    assert said(tokens, third, "assistant") == ["one", "two"]


def test_a_template_that_refuses_a_system_message(tmp_path: Path) -> None:
    """Its text goes before the first question."""
    tokens = made(tmp_path, small.STRICT)
    chat = Conversation(tokens, "Be brief.", "page.txt")
    first = ask(chat, "a", tokens.encode("x<|im_end|>"), "x")
    assert "[INST] Be brief.\n\na [/INST]" in text_of(tokens, first.token_ids)
    second = chat.turn("b")
    check_spans(second)
    assert not second.rewrote_history
    assert text_of(tokens, second.token_ids).endswith("[INST] b [/INST]")


def test_no_template_is_plain_concatenation(tmp_path: Path) -> None:
    tokens = made(tmp_path, None, "sentencepiece")
    chat = Conversation(tokens, "system ", "page.txt")
    first = ask(chat, "question", [5, 6], "xy")
    assert first.token_ids == [1, *tokens.encode("system "), *tokens.encode("question")]
    assert [role for _, _, role, _ in first.spans] == ["template", "system", "user"]
    second = chat.turn("more")
    check_spans(second)
    assert second.token_ids == [*first.token_ids, 5, 6, *tokens.encode("more")]
    assert chat.cost_of_trimming("more") is None


def test_what_trimming_would_cost(chatml: Tokenizer) -> None:
    """The page before it stays cached; everything after the first question is computed again."""
    chat = Conversation(chatml, "page " * 50)
    assert chat.cost_of_trimming("x") is None
    ask(chat, "first question", chatml.encode("one"), "one")
    ask(chat, "second question", chatml.encode("two"), "two")
    cost = chat.cost_of_trimming("third")
    assert cost is not None
    whole, computed = cost
    assert whole < len(chat.turn("third").token_ids)
    kept = whole - computed
    assert len(chatml.encode("page " * 50)) < kept < len(chatml.encode("page " * 50)) + 15


words = st.text(max_size=12) | st.sampled_from(
    [*small.TEXTS, "user", "assistant", "\n", "<|im_end|>", "\ue0001\ue001"]
)


@given(
    turns=st.lists(st.tuples(words, words, st.booleans(), st.integers(0, 3)), min_size=1, max_size=4),
    system=st.none() | words,
)
@hypothesis_settings(max_examples=60)
def test_the_next_turn_extends_what_is_held(
    turns: list[tuple[str, str, bool, int]], system: str | None, chatml: Tokenizer, thinking: Tokenizer
) -> None:
    for tokens in (chatml, thinking):
        chat = Conversation(tokens, system, "page.txt")
        held: list[int] = []
        for question, answer, ended, cut in turns:
            turn = chat.turn(question)
            check_spans(turn)
            if turn.rewrote_history:
                assert tokens is thinking
            else:
                assert turn.token_ids[: len(held)] == held
            ids = [*tokens.encode(answer), *([7] * cut), *(tokens.encode("<|im_end|>") if ended else [])]
            chat.commit(ids, answer, "stop")
            held = turn.token_ids + ids if ids else held


def test_smol_preamble(builtin_model: ModelFiles) -> None:
    """24 tokens stand before the first word, so block 0 always hits."""
    smol = tokenizer.load(builtin_model)
    turn = Conversation(smol).turn("What is the capital of France?")
    assert turn.spans[0] == (0, 24, "template", "")
    assert said(smol, turn, "user") == ["What is the capital of France?"]
    first: list[Span] = turn.spans
    chat: Any = Conversation(smol)
    chat.turn("What is the capital of France?")
    chat.commit([*smol.encode("Paris."), 2], "Paris.", "stop")
    second = chat.turn("And of Italy?")
    assert second.spans[:2] == first[:2]
    assert second.token_ids[: len(turn.token_ids)] == turn.token_ids
