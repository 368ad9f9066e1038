"""What the terminal sends: a paste is one text, odd bytes raise nothing, in whatever pieces they come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.message import Message

from kvtop.terminal.textual_door import KeyReader

ENDS = [b"\x1b[", b"\x1b[M", b"\x1b[<", b";", b"u", b"\x1b[48;0;0;0;0t", b"\x1b[<0;5;7M"]


def parsed(chunks: list[bytes]) -> list[Message]:
    """What the application gets."""
    reader = KeyReader()
    return [message for chunk in chunks for message in reader.feed(chunk)]


def cut(whole: bytes, cuts: list[int]) -> list[bytes]:
    """`whole` in pieces that end at `cuts`."""
    places = [0, *sorted(c for c in cuts if 0 < c < len(whole)), len(whole)]
    return [whole[a:b] for a, b in pairwise(places) if b > a]


@pytest.mark.parametrize(
    "text", ["red \x1b[31mtext\x1b[0m\nand more\n", "\x1b", "a\x1b[200~b", "\x1bOP\r\x1b[201", "x\x1b\x1b[A"]
)
def test_escapes_in_a_paste_are_text(text: str) -> None:
    (paste,) = parsed([f"\x1b[200~{text}\x1b[201~".encode()])
    assert isinstance(paste, events.Paste) and paste.text == text.replace("\x1b", "␛")


@given(
    text=st.text(alphabet="ab\x1b[201~\né\x9b", max_size=30).filter(lambda t: "\x1b[201~" not in t),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    got = parsed(cut(f"q\x1b[200~{text}!\x1b[201~w".encode(), cuts))
    assert [type(m) for m in got] == [events.Key, events.Paste, events.Key]
    assert got[1].text == text.replace("\x1b", "␛") + "!"


def test_keys_outside_are_keys() -> None:
    assert [m.key for m in parsed([b"\x1bOP", b"\x1b[A", "é".encode()])] == ["f1", "up", "é"]


@pytest.mark.parametrize(
    ("sent", "text"),
    [(b"\xff", "\ufffd"), (b"\x80", "\ufffd"), (b"caf\xe9 x", "caf\ufffd x"), (b"\xc3\x28", "\ufffd(")],
)
def test_what_is_no_utf_8_is_replaced(sent: bytes, text: str) -> None:
    got = parsed([bytes([byte]) for byte in sent])
    assert "".join(m.character for m in got) == text
    (paste,) = parsed([b"\x1b[200~" + sent + b"\x1b[201~"])
    assert paste.text == text


@pytest.mark.parametrize(("column", "row"), [(1, 1), (120, 5), (168, 112), (223, 223)])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5], [4]], ids=["whole", "bytes", "half"])
def test_a_mouse_click_in_the_oldest_form(column: int, row: int, cuts: list[int]) -> None:
    click = b"\x1b[M" + bytes([32, 32 + column, 32 + row]) + b"\x1b[M" + bytes([35, 32 + column, 32 + row])
    got = parsed([*cut(click, cuts), b"a"])
    assert [type(m) for m in got] == [events.MouseDown, events.MouseUp, events.Key]
    assert (got[0].x, got[0].y) == (column - 1, row - 1) and got[0].button == 1


@pytest.mark.parametrize(
    "sent", [b"\x1b[99999999999;1u", b"\x1b[97;1:3u", b"\x1b[55296;1u", b"\x1b[48;9;9;9;9t"]
)
def test_sequences_that_no_terminal_should_send_end_nothing(sent: bytes) -> None:
    got = parsed([sent, b"x" * 40, b"y"])
    assert got[-1].key == "y"
    assert all("\ud800" not in (getattr(m, "character", None) or "") for m in got)


@pytest.mark.parametrize("size", [b"0;0;0;0", b"24;0;480;800", b"0;80;480;800", b"24;80;0;0"])
def test_a_click_after_a_size_of_nothing_is_where_it_says(size: bytes) -> None:
    got = parsed([b"\x1b[48;" + size + b"t", b"\x1b[<0;5;7M"])
    assert isinstance(got[-1], events.MouseDown) and (got[-1].x, got[-1].y) == (4, 6)


@pytest.mark.parametrize("size", [b"0;0;0;0", b"24;0;1;1", b"99999;99999;1;1", b"24;80000;1;1"])
def test_a_size_that_no_terminal_has_is_not_laid_out(size: bytes) -> None:
    assert parsed([b"\x1b[48;" + size + b"t", b"y"])[0].key == "y"


@given(st.lists(st.binary(max_size=12) | st.sampled_from(ENDS), max_size=12))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    parsed([*pieces, b"\x1b[201~"])
