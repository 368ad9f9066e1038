"""Foreign text in a prompt: the name of a special token in it stays text.

A chat template writes special tokens and foreign text (a person's, a page's, a model's answer) into one string, and
a tokenizer cannot tell who wrote what. So `guard` replaces the names in foreign text by marks that nobody can
guess, before the template is rendered. `encode` then knows that every name that is left is the template's own.

Invariant: text without a guarded name is encoded by the model's tokenizer as it is, so its ids never change.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from functools import cached_property
from itertools import count

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_OPEN, _CLOSE = "xq", "qx"
"""Around a mark: letters, which a template passes on unchanged, also as JSON or in a URL."""


class SpecialTokens:
    """The special tokens of `backend`, which is left as it is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = {i: t for i, t in backend.get_added_tokens_decoder().items() if t.special and t.content}
        self._names = _pattern([token.content for token in self._added.values()])
        self._is_normalised = backend.normalizer is not None and any(
            t.normalized for t in self._added.values()
        )
        self._secret = secrets.token_hex(8)
        self._guarded: dict[str, str] = {}
        """Mark -> what it replaces."""
        self._marks: dict[str, str] = {}
        """The same the other way round."""

    @property
    def names(self) -> list[str]:
        """As they are spelled."""
        return [token.content for token in self._added.values()]

    def guard(self, text: str) -> str:
        """`text` with a mark in place of each name of a special token."""
        if not self._added:
            return text
        if self._is_normalised:  # a name may be spelled in other ways, which only the tokenizer knows
            encoding = self._backend.encode(text, add_special_tokens=False)
            places = [at for i, at in zip(encoding.ids, encoding.offsets, strict=True) if i in self._added]
        else:
            places = [match.span() for match in self._names.finditer(text)]
        if not places:
            return text
        parts, last = [], 0
        for start, end in places:
            parts += [text[last:start], self._mark(text[start:end])]
            last = end
        return "".join([*parts, text[last:]])

    def is_guarded(self, text: str) -> bool:
        """`text` holds a mark."""
        return f"{_OPEN}{self._secret}" in text

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text with marks, and where each ends in it (characters)."""
        backend, ids_of, alias_of = self._strict
        parts: list[str] = []
        theirs, ours = [0], [0]  # positions in what is encoded, and in `text`, at which both go on alike
        last = length = 0
        for match in self._either.finditer(text):
            word = match.group()
            plain = text[last : match.start()]
            instead = self._guarded.get(word) or alias_of[word]
            parts += [plain, instead]
            length += len(plain) + len(instead)
            last = match.end()
            theirs.append(length)
            ours.append(last)
        encoding = backend.encode("".join([*parts, text[last:]]), add_special_tokens=False)
        ends = []
        for _, end in encoding.offsets:
            at = bisect_left(theirs, end)
            # Inside a replaced name nothing lines up: what ends there ends where the name does.
            if at == len(theirs) or end < theirs[at]:
                before, after = ours[at - 1], ours[at] if at < len(ours) else len(text)
                ends.append(min(before + end - theirs[at - 1], after))
            else:
                ends.append(ours[at])
        return [ids_of.get(i, i) for i in encoding.ids], ends

    def _mark(self, name: str) -> str:
        mark = self._marks.get(name)
        if mark is None:
            mark = self._marks[name] = f"{_OPEN}{self._secret}m{len(self._marks)}{_CLOSE}"
            self._guarded[mark] = name
        return mark

    @property
    def _either(self) -> re.Pattern[str]:
        """A special token's name or a mark."""
        return re.compile(f"{_OPEN}{self._secret}m\\d+{_CLOSE}|{self._names.pattern}")

    @cached_property
    def _strict(self) -> tuple[Backend, dict[int, int], dict[str, str]]:
        """A copy of the tokenizer that takes special tokens only by other names, with their ids and those names. It
        is made when the first guarded text comes: a large vocabulary takes a third of a second."""
        backend = Backend.from_str(self._backend.to_str())
        numbers = count()
        alias_of = {t.content: f"{_OPEN}{self._secret}s{next(numbers)}{_CLOSE}" for t in self._added.values()}
        backend.add_tokens(
            [
                AddedToken(
                    alias_of[t.content], lstrip=t.lstrip, rstrip=t.rstrip, single_word=t.single_word,
                    normalized=False, special=False,
                )
                for t in self._added.values()
            ]
        )  # fmt: skip
        backend.encode_special_tokens = True
        ids_of: dict[int, int] = {}
        for i, token in self._added.items():
            alias = backend.token_to_id(alias_of[token.content])
            assert alias is not None
            ids_of[alias] = i
        return backend, ids_of, alias_of


def _pattern(names: list[str]) -> re.Pattern[str]:
    """Any of them, the longest first; nothing for none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
