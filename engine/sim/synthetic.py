"""Synthetic text: sentences of common words, one token per word, the same for the same seed.

Owns the words and the pattern of a sentence, the ids of these words in any tokenizer (Language), and a tokenizer for
engines without one (SyntheticTokenizer). Invariant: a token is a pure function of a seed and its position, so a
simulated answer does not depend on batches, chunks, preemptions or time. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

_WORDS = {
    "adjective": """quiet old bright narrow gentle distant heavy early broken hidden steady common golden simple
        empty careful northern sudden patient ancient silver open lonely warm hollow faithful wide pale ready young""",
    "noun": """harbour lantern river garden letter engine market window bridge mountain sailor library orchard
        signal station teacher village winter compass island doctor machine street forest ladder kitchen painter
        shadow teapot valley captain mirror blanket thunder museum farmer pocket rabbit candle planet""",
    "verb": """keeps follows carries answers measures crosses remembers paints borrows opens watches repairs
        gathers finds reaches leaves holds counts visits guards moves studies covers lifts""",
    "adverb": """slowly again together early quietly at_last by_night once_more without_haste in_spring alone
        for_years before_dawn as_promised nearby after_all""",
    "joint": "and while because but so until",
}
_PATTERN = (
    "The",
    "adjective",
    "noun",
    "verb",
    "the",
    "noun",
    ",",
    "joint",
    "the",
    "noun",
    "verb",
    "adverb",
    ".",
)
"""One sentence: a kind of word, or the word itself, at each place."""
_MASK = (1 << 64) - 1
END = "<|end|>"
_PIECE = re.compile(r"<\|\w+\|>|\s?\w{1,6}|\s|[^\w\s]", re.UNICODE)
"""A piece of text that becomes one token, about as long as in real vocabularies."""


class Encoder(Protocol):
    """The part of a tokenizer that a language needs."""

    def encode(self, text: str, special: bool = False) -> list[int]: ...


class Language:
    """Token ids by their place in a sentence. slots: the possible ids at each place."""

    __slots__ = ("_slots",)

    def __init__(self, slots: Sequence[Sequence[int]]) -> None:
        if not slots or not all(slots):
            raise ValueError("each place of a sentence needs at least one token")
        self._slots = [tuple(s) for s in slots]

    @classmethod
    def of(cls, tokenizer: Encoder | None, vocab_size: int) -> Language:
        """The words that are one token each in this tokenizer. Without a tokenizer: any ids."""
        anything = [range(min(vocab_size, 50_000))]
        if tokenizer is None:
            return cls(anything)
        slots = [
            [ids[0] for ids in map(tokenizer.encode, _spellings(place)) if len(ids) == 1]
            for place in _PATTERN
        ]
        known = [s for s in slots if s]
        return cls(known or anything)

    def token(self, seed: int, i: int) -> int:
        """The i-th token of the text of this seed (64 bits)."""
        words = self._slots[i % len(self._slots)]
        mixed = (seed ^ (i * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & _MASK
        return words[(mixed >> 33) % len(words)]

    def text(self, seed: int, n: int) -> list[int]:
        """The first n tokens of the text of this seed."""
        return [self.token(seed, i) for i in range(n)]

    @property
    def sentence(self) -> int:
        """Tokens of a sentence."""
        return len(self._slots)


class SyntheticTokenizer:
    """A tokenizer without a model. Each word of the language is one token, and so is each byte.

    Other pieces of up to six letters get a number when they first occur. It has a simple chat template.
    """

    has_chat_template = True
    eos_ids = frozenset({0})

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: when it is full, new pieces become bytes."""
        words = dict.fromkeys(s for place in _PATTERN for s in _spellings(place))
        if vocab_size < 257 + len(words):
            raise ValueError(f"a vocabulary of {vocab_size} does not hold {257 + len(words)} tokens")
        self.vocab_size = vocab_size
        self._pieces: list[bytes] = [END.encode(), *(bytes([b]) for b in range(256))]
        self._ids: dict[str, int] = {END: 0}
        for word in words:
            self._number(word)
        self._words = re.compile(
            "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + "|" + _PIECE.pattern
        )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text. There are no special tokens to add."""
        return self.encode_ends(text)[0]

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, and for each of them the end of its text."""
        ids: list[int] = []
        ends: list[int] = []
        for found in self._words.finditer(text):
            new = self._spell(found.group())
            ids += new
            ends += [found.end()] * len(new)
        return ids, ends

    def guard(self, text: str) -> str:
        """Returns the text: a simulation has no template to protect."""
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Its text; U+FFFD for an unused id."""
        return self._pieces[token_id] if token_id < len(self._pieces) else "\ufffd".encode()

    def is_special(self, token_id: int) -> bool:
        """Whether it is the end token."""
        return token_id == 0

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """ChatML."""
        text = "".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages)
        return text + "<|assistant|>" * add_generation_prompt

    def _spell(self, piece: str) -> list[int]:
        known = self._ids.get(piece)
        if known is not None:
            return [known]
        if len(self._pieces) < self.vocab_size:
            return [self._number(piece)]
        return [1 + b for b in piece.encode("utf-8", "replace")]

    def _number(self, piece: str) -> int:
        number = self._ids[piece] = len(self._pieces)
        self._pieces.append(piece.encode("utf-8", "replace"))
        return number


def _spellings(place: str) -> Iterable[str]:
    """The possible words at a place, each with the space before it."""
    if place not in _WORDS:
        return (place if place in ",." else f" {place}",)
    return (" " + w.replace("_", " ") for w in _WORDS[place].split())
