"""Incremental text: never half a character, never a part of a stop string, never taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step.detok import Detokenizer


def over(pieces: list[bytes], stop: tuple[str, ...] = ()) -> Detokenizer:
    return Detokenizer(pieces.__getitem__, stop)


def shown(pieces: list[bytes], stop: tuple[str, ...] = ()) -> list[str]:
    detok = over(pieces, stop)
    return [detok.push(i) for i in range(len(pieces))]


def test_a_character_shows_with_its_last_byte() -> None:
    family = "👩‍👩‍👧".encode()
    pieces = [bytes([b]) for b in family]
    parts = shown(pieces)
    assert "".join(parts).encode() == family
    assert [i for i, p in enumerate(parts) if p] == [3, 6, 10, 13, 17]


def test_a_cut_character_shows_only_at_the_end_as_a_replacement() -> None:
    detok = over([b"a\xe2\x82"])
    assert detok.push(0) == "a" and detok.flush() == "�" and detok.text == "a�"


def test_bytes_that_are_no_text_become_replacements() -> None:
    assert shown([b"a\xffb", b"\x80"]) == ["a�b", "�"]


def test_a_token_without_text_shows_nothing() -> None:
    assert shown([b"a", b"", b"b"]) == ["a", "", "b"]


@pytest.mark.conformance(81)
def test_a_stop_string_ends_the_text_before_it_also_across_tokens() -> None:
    detok = over([b"one E", b"N", b"D two"], ("END",))
    assert [detok.push(0), detok.push(1)] == ["one ", ""] and not detok.stopped
    assert detok.push(2) == "" and detok.stopped and detok.text == "one "
    assert detok.flush() == "" and detok.push(0) == ""


def test_what_only_looked_like_a_stop_string_is_shown_later() -> None:
    assert shown([b"E", b"N", b"C"], ("END",)) == ["", "", "ENC"]
    detok = over([b"E", b"N"], ("END",))
    assert [detok.push(0), detok.push(1), detok.flush()] == ["", "", "EN"] and not detok.stopped


def test_the_first_of_several_stop_strings_counts() -> None:
    detok = over([b"a b c d"], ("d", "b c", "c"))
    assert detok.push(0) == "a " and detok.stopped


def test_a_fork_goes_its_own_way() -> None:
    detok = over([b"\xe2", b"\x82\xac", b"E", b"X", b"ND"], ("END",))
    detok.push(0)
    child = detok.fork()
    assert detok.push(1) == child.push(1) == "€"
    detok.push(2)
    child.push(2)
    other = child.fork()
    assert child.push(3) == "EX" and other.push(4) == "" and other.stopped and not child.stopped
    assert (detok.text, child.text, other.text) == ("€", "€EX", "€")


@given(
    st.text(alphabet="aé€😀b", max_size=30),
    st.lists(st.integers(1, 4), min_size=40, max_size=40),
    st.lists(st.text(alphabet="aé€b", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_bytes_gives_the_text_up_to_the_first_stop(
    text: str, sizes: list[int], stop: list[str]
) -> None:
    data, pieces = text.encode(), []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    pieces.append(data)
    detok = over(pieces, tuple(stop))
    parts = []
    for i in range(len(pieces)):
        parts.append(detok.push(i))
        if detok.stopped:
            break
    parts.append(detok.flush())
    assert "".join(parts) == detok.text and text.startswith(detok.text)
    # What came up first ends the text: the stop that is complete after the fewest bytes.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert detok.stopped == bool(ends)
    if not ends:
        assert detok.text == text
    else:
        assert not any(s in detok.text for s in stop) and min(e for e, _ in ends) > len(detok.text)
        assert any(text.startswith(s, len(detok.text)) for s in stop)
