"""Made-up text: readable, a function of seed and place, and spelled back exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.conversation import Conversation
from engine.sim.synthetic import Language, SyntheticTokenizer

VOCAB = 1 << 17


def text_of(tokenizer: SyntheticTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_it_reads_like_sentences() -> None:
    tokenizer = SyntheticTokenizer(VOCAB)
    language = Language.of(tokenizer, VOCAB)
    text = text_of(tokenizer, language.text(1, 4 * language.sentence))
    sentences = [s.strip() for s in text.split(".") if s.strip()]
    assert len(sentences) == 4 == len(set(sentences))
    assert all(s.startswith("The ") and "," in s and len(s.split()) >= 10 for s in sentences)


@given(seed=st.integers(0, 2**63 - 1), n=st.integers(0, 200), k=st.integers(0, 199))
def test_a_token_is_a_function_of_seed_and_place(seed: int, n: int, k: int) -> None:
    language = Language.of(SyntheticTokenizer(VOCAB), VOCAB)
    text = language.text(seed, n)
    assert len(text) == n
    assert text[k : k + 1] == [language.token(seed, k)][: max(0, n - k)]


def test_neighbouring_seeds_say_different_things() -> None:
    language = Language.of(SyntheticTokenizer(VOCAB), VOCAB)
    texts = {tuple(language.text(seed, 26)) for seed in range(2000)}
    assert len(texts) == 2000


def test_every_word_comes_up() -> None:
    language = Language.of(SyntheticTokenizer(VOCAB), VOCAB)
    seen = set(language.text(5, 20_000))
    assert seen == {i for slot in language._slots for i in slot}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_text_comes_back(text: str) -> None:
    tokenizer = SyntheticTokenizer(VOCAB)
    ids, ends = tokenizer.encode_ends(text)
    assert text_of(tokenizer, ids) == text
    assert tokenizer.encode(text) == ids
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(text)


def test_a_full_vocabulary_spells_in_bytes() -> None:
    size = len(SyntheticTokenizer(VOCAB)._pieces) + 2
    tokenizer = SyntheticTokenizer(size)
    ids = tokenizer.encode("Zürich überall täglich")
    assert max(ids) < size
    assert text_of(tokenizer, ids) == "Zürich überall täglich"
    with pytest.raises(ValueError, match="does not hold"):
        SyntheticTokenizer(100)


def test_its_own_text_is_encoded_as_it_was_made() -> None:
    tokenizer = SyntheticTokenizer(VOCAB)
    ids = Language.of(tokenizer, VOCAB).text(3, 130)
    assert tokenizer.encode(text_of(tokenizer, ids)) == ids


def test_a_conversation_appends() -> None:
    tokenizer = SyntheticTokenizer(VOCAB)
    chat = Conversation(tokenizer, "Be brief.")
    first = chat.turn("Who built the lighthouse?")
    answer = Language.of(tokenizer, VOCAB).text(9, 26)
    chat.commit([*answer, 0], text_of(tokenizer, answer), "stop")
    second = chat.turn("And when?")
    assert not second.rewrote_history
    assert second.token_ids[: len(first.token_ids) + 27] == [*first.token_ids, *answer, 0]


def test_any_tokenizer_will_do() -> None:
    class Characters:
        def encode(self, text: str, special: bool = False) -> list[int]:
            return list(map(ord, text))

    assert set(Language.of(Characters(), 1000).text(1, 100)) == {ord(","), ord(".")}
    assert all(0 <= t < 50 for t in Language.of(None, 50).text(1, 100))
    with pytest.raises(ValueError, match="at least one token"):
        Language([[1], []])
