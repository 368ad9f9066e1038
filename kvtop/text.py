"""safe_text: all text from outside passes through here before it is shown.

Model output, prompts, file names and recordings may contain any character. Invariant: text from this module moves no
cursor, changes no colour, reverses no direction and hides nothing. Its width is the sum of the widths of its
characters, so the cells to its right stay in place. Each substitute is a symbol of one cell.
"""

from __future__ import annotations

import re
from functools import lru_cache
from unicodedata import category

from rich.cells import cell_len, set_cell_size

_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
"""Marks, embeddings, overrides and isolates: they reorder the text around them."""

_INVISIBLE = [
    *(0x00AD, 0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180E, 0x200B, 0x3164, 0xFEFF, 0xFFA0),
    *range(0x2060, 0x2066),
    *range(0x206A, 0x2070),
    *range(0xFFF9, 0xFFFC),
    *range(0x1BCA0, 0x1BCA4),
    *range(0x1D173, 0x1D17B),
    *range(0xE0000, 0xE0080),  # tags: the usual way to hide text from a reader
]

_JOINING = [
    *(0x200D, *range(0x180B, 0x180E), *range(0xFE00, 0xFE10)),
    *range(0x1F3FB, 0x1F400),
    *range(0xE0100, 0xE01F0),
]
"""Joiner, variation selectors and skin tones are dropped: terminals disagree on the width of sequences with them."""

_TABLE: dict[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},  # U+2400..241F are pictures of the C0 controls
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\u2426"),  # C1 has no pictures: SYMBOL FOR SUBSTITUTE FORM TWO
    **dict.fromkeys((0x85, 0x2028, 0x2029), "\u2424"),  # NEL and the separators: SYMBOL FOR NEWLINE
    **dict.fromkeys(_BIDI, "\u21c4"),
    **dict.fromkeys(_INVISIBLE, "\u2422"),  # BLANK SYMBOL
    **dict.fromkeys(_JOINING, None),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    ord("\t"): "    ",
}
_TABLE_NEWLINES = {code: to for code, to in _TABLE.items() if code != ord("\n")}

_TABLE_SYMBOLS = {**_TABLE, **dict.fromkeys(_JOINING, "\u2422"), ord("\t"): "\u2409"}

_MOST_MARKS = 4
"""Combining marks on one character. No script needs more, and many of them would cover the lines above."""

DOTTED_CIRCLE = "\u25cc"
"""Base character for a combining mark that has none."""


@lru_cache(1)
def _marks() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for marks without a base character (at the start of a line) and for marks beyond the limit."""
    ranges: list[list[int]] = []
    for code in range(0x300, 0x1E950):  # other combining marks are only among the dropped selectors
        if category(chr(code)) in ("Mn", "Me"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    mark = "[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges) + "]"
    return re.compile(f"^(?={mark})", re.MULTILINE), re.compile(f"({mark}{{{_MOST_MARKS}}}){mark}+")


def safe_text(text: str, newlines: bool = False) -> str:
    """`text` with visible symbols in place of everything that a terminal would act on.

    Tabs become four spaces and CRLF becomes LF. With `newlines` LF stays (for widgets that wrap), otherwise it becomes
    ␊. Idempotent.
    """
    if text.isprintable() and text.isascii():
        return text
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    text = text.translate(_TABLE_NEWLINES if newlines else _TABLE)
    if not text.isascii() and max(text) >= "\u0300":
        bare, pile = _marks()
        text = pile.sub(r"\1", bare.sub(DOTTED_CIRCLE, text))
    return text


def symbols(text: str) -> str:
    """Like `safe_text`, but each character becomes exactly one, so positions in a line that is edited stay."""
    if text.isprintable() and text.isascii():
        return text
    text = text.translate(_TABLE_SYMBOLS)
    if not text.isascii() and max(text) >= "\u0300":
        bare, pile = _marks()
        if bare.match(text):
            text = DOTTED_CIRCLE + text[1:]
        text = pile.sub(lambda found: found[1] + "\u2422" * (len(found[0]) - len(found[1])), text)
    return text


def cut(text: str, width: int) -> str:
    """Safe text cut to at most `width` cells. The last cell is `…` if something was cut off."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def fit(text: str, width: int) -> str:
    """Safe text cut or padded with spaces to exactly `width` cells."""
    return set_cell_size(cut(text, width), max(width, 0))
