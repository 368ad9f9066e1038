"""An answer laid out as it grows is the one that is laid out at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from kvtop.text import safe_text
from kvtop.widgets.chat.answer import Answer
from kvtop.widgets.chat.layout import names_in
from kvtop.wrap import spelled, wrap

PIECE = st.one_of(
    st.sampled_from(
        [b" the", b"word", b"\n", b"\n\n", b"\r", b" ", b"  ", b"\xe6\x97", b"\xa5", b"\xff", b"\x1b[2J"]
    ),
    st.sampled_from([t.encode() for t in ("日本", "e\u0301", "\u0301" * 3, "a\u200d", "\u25cc", "é", "\t")]),
    st.text(max_size=6).map(lambda t: t.encode("utf-8", "replace")),
)


def at_once(pieces: list[bytes], text: str, room: int) -> tuple[str, list[int], list[tuple[int, int]]]:
    """(shown text, first character of each token, lines)."""
    reported, starts = spelled(pieces)
    safe = safe_text(text, newlines=True)
    shown = safe.rstrip("\n")
    first = len(shown) - len(shown.lstrip())
    lines = [(a + first, b + first) for a, b in wrap(shown[first:], room)]
    return shown, starts if reported.startswith(safe) else starts[:1], lines


@given(st.lists(PIECE, max_size=14), st.integers(1, 12), st.integers(0, 3))
def test_it_grows_into_the_whole(pieces: list[bytes], room: int, held: int) -> None:
    """held: characters that the engine keeps back at the end, as it does for stop strings."""
    ids: list[int] = []
    answer = Answer(room, 5, Style())
    for n in range(len(pieces) + 1):
        text = b"".join(pieces[:n]).decode("utf-8", "ignore")
        text = text[: len(text) - held] if held and n < len(pieces) else text
        if not answer.continues(ids, text):  # a piece that was half a character, or nothing
            answer = Answer(room, 5, Style())
        answer.grow(ids, pieces.__getitem__, text)
        shown, starts, lines = at_once(pieces[:n], text, room)
        assert (answer.passage.text, answer.passage.starts) == (shown, starts)
        assert [(line.start, line.end) for line in answer.lines(None)] == lines
        ids.append(n)


def test_only_what_is_new_is_spelled_and_full_lines_stay() -> None:
    words = [b" word%d" % i for i in range(200)]
    ids, asked, answer = list[int](), list[int](), Answer(40, 0, Style())

    def piece(token: int) -> bytes:
        asked.append(token)
        return words[token]

    for n in range(len(words)):
        ids.append(n)
        before = answer.lines(None)[:-1]
        answer.grow(ids, piece, b"".join(words[: n + 1]).decode())
        assert all(a is b for a, b in zip(before, answer.lines(None), strict=False))
    assert asked == list(range(len(words)))
    assert len(before) > 20


def test_another_list_or_another_beginning_is_another_answer() -> None:
    ids = [0, 1]
    answer = Answer(20, 0, Style())
    assert answer.continues(ids, "")
    answer.grow(ids, [b"a", b"b"].__getitem__, "ab")
    assert answer.continues(ids, "abc")
    assert not answer.continues(ids, "xb") and not answer.continues(ids[:], "ab")


def test_the_cursor_stands_behind_the_last_line_or_below_it() -> None:
    answer = Answer(4, 0, Style())
    answer.grow([0], [b"abc"].__getitem__, "abc")
    (line,) = answer.lines(Style(bold=True))
    assert line.parts == [("█", Style(bold=True))]
    answer.grow(answer._ids or [], [b"abc", b"d"].__getitem__, "abcd")
    full, below = answer.lines(Style(bold=True))
    assert not full.parts and below.parts and below.passage is None


def test_names_of_special_tokens_are_found_the_longest_first() -> None:
    text = "a <|im_end|> b</s></s>"
    assert [text[a:b] for a, b in names_in(text, ["<|im", "<|im_end|>", "</s>", ""])] == [
        "<|im_end|>",
        "</s>",
        "</s>",
    ]
    assert names_in(text, []) == names_in("", ["</s>"]) == names_in("plain", ["</s>"]) == ()
