"""A paste is one text: whatever it holds, in whatever pieces it comes, no part of it is a key."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.message import Message

from kvtop.app.pasting import PasteParser


def parsed(chunks: list[str]) -> list[Message]:
    """What the application gets."""
    parser = PasteParser()
    return [message for chunk in chunks for message in parser.feed(chunk)]


@pytest.mark.parametrize(
    "text", ["red \x1b[31mtext\x1b[0m\nand more\n", "\x1b", "a\x1b[200~b", "\x1bOP\r\x1b[201", "x\x1b\x1b[A"]
)
def test_escapes_in_a_paste_are_text(text: str) -> None:
    (paste,) = parsed([f"\x1b[200~{text}\x1b[201~"])
    assert isinstance(paste, events.Paste) and paste.text == text.replace("\x1b", "␛")


@given(
    text=st.text(alphabet="ab\x1b[201~\n", max_size=30).filter(lambda t: "\x1b[201~" not in t),
    cuts=st.lists(st.integers(0, 50), max_size=6),
)
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    whole = f"q\x1b[200~{text}!\x1b[201~w"
    places = [0, *sorted(c for c in cuts if 8 <= c < len(whole)), len(whole)]
    got = parsed([whole[a:b] for a, b in pairwise(places) if b > a])
    assert [type(m) for m in got] == [events.Key, events.Paste, events.Key]
    assert got[1].text == text.replace("\x1b", "␛") + "!"


def test_keys_outside_are_keys() -> None:
    assert [m.key for m in parsed(["\x1bOP", "\x1b[A", "é"])] == ["f1", "up", "é"]
