"""Whatever goes in, nothing that acts on a terminal comes out, and its width is that of its characters."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvtop.text import cut, fit, safe_text

SURROGATES = st.characters(categories=["Cs"])
NASTY = st.text(
    st.one_of(
        st.characters(),
        SURROGATES,
        st.characters(categories=["Cc", "Cf", "Mn", "Me", "Zl", "Zp"]),
        st.sampled_from("\r\n\t\x1b\x9b\u202e\u2066\u200d\ufe0f\u0301\U000e0041a é漢👩🏽"),
    ),
    max_size=40,
)
BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def forbidden(char: str) -> bool:
    controls = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
    return controls or unicodedata.bidirectional(char) in BIDI


@given(NASTY, st.booleans())
def test_nothing_that_acts_on_a_terminal_survives(text: str, newlines: bool) -> None:
    safe = safe_text(text, newlines)
    allowed = "\n" if newlines else ""
    assert [c for c in safe if forbidden(c) and c not in allowed] == []
    assert not set(safe) & set("\u061c\u200e\u200f\ufeff\u200b\u200d")
    safe.encode()  # no surrogates: a terminal's encoder takes it


@given(NASTY, st.booleans())
def test_idempotent(text: str, newlines: bool) -> None:
    once = safe_text(text, newlines)
    assert safe_text(once, newlines) == once


@given(NASTY)
def test_width_is_the_sum_of_its_characters(text: str) -> None:
    safe = safe_text(text)
    assert cell_len(safe) == sum(cell_len(c) for c in safe)


@given(NASTY, st.integers(-1, 30))
def test_fit_and_cut_keep_to_the_cells(text: str, width: int) -> None:
    safe = safe_text(text)
    assert cell_len(fit(safe, width)) == max(width, 0)
    assert cell_len(cut(safe, width)) <= max(width, 0)
    if cell_len(safe) <= width:
        assert cut(safe, width) == safe


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_text_is_left_alone(text: str) -> None:
    assert safe_text(text) is text


@pytest.mark.parametrize(
    ("text", "newlines", "want"),
    [
        ("a\tb", False, "a    b"),
        ("a\r\nb\nc\rd", True, "a\nb\nc␍d"),
        ("a\r\nb\n", False, "a␊b␊"),
        ("\x1b[31mred\x1b[0m", False, "␛[31mred␛[0m"),
        ("\x00\x07\x7f", False, "␀␇␡"),
        ("\x9b31m\x85", True, "␦31m␤"),
        ("a\u2028b\u2029c", True, "a␤b␤c"),
        ("user\u202etxt.exe", False, "user⇄txt.exe"),
        ("\ud83d half \udc00", False, "\ufffd half \ufffd"),
        ("hi\U000e0041\U000e007f", False, "hi␢␢"),
        ("👩🏽\u200d👧 ❤\ufe0f", False, "👩👧 ❤"),
        ("\u0301a", False, "◌\u0301a"),
        ("a\n\u0301b", True, "a\n◌\u0301b"),
        ("z" + "\u0300" * 50, False, "z" + "\u0300" * 4),
        ("naïve café — 漢字", False, "naïve café — 漢字"),
    ],
)
def test_examples(text: str, newlines: bool, want: str) -> None:
    assert safe_text(text, newlines) == want


def test_cut_says_that_something_is_missing() -> None:
    assert cut("a longer name", 8) == "a longe…"
    assert cut("漢字漢字", 4) == "漢…"
    assert fit("ab", 4) == "ab  "
