"""Conversation: a chat as token ids that only grow, so that its history is found in the prefix cache.

Invariant: if the template renders the history as the text that is held, the ids of a turn begin with the ids that
are held (prompt and answer of the last turn, as they were computed). Old text is never encoded again, because its
tokens might differ from the sampled ones. If the template renders the history in another way (Qwen3's drops earlier
thinking), the whole history is encoded anew and the turn says so.

The name of a special token in a message stays text, from a user, a page or the model, unless `allow_special`. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Span = tuple[int, int, str, str]
"""(start, end, role, name) in tokens. role: template, system, user or assistant. name: that of an attached file."""


class ChatTokenizer(Protocol):
    """The part of engine.files.tokenizer.Tokenizer that a conversation needs."""

    eos_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str, special: bool = False) -> list[int]: ...
    def encode_ends(self, text: str) -> tuple[list[int], list[int]]: ...
    def guard(self, text: str) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The whole prompt of the next request. `spans` cover it without gaps, in order."""

    token_ids: list[int]
    spans: list[Span]
    rewrote_history: bool
    """The tokens of the history differ from those of the last turn. What follows the change is not in the cache."""


@dataclass(slots=True)
class _History:
    """The chat so far: its ids, the text that the template must repeat, and who wrote which part."""

    ids: list[int]
    text: str
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A message for the template, from a person, a page or the model. Its special tokens are already guarded."""

    role: str
    text: str
    name: str = ""


class Conversation:
    """One chat. turn() and commit() alternate. A turn that is not committed changes nothing.

    allow_special: the name of a special token in a message becomes that token.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        system: str | None = None,
        system_name: str = "",
        *,
        allow_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._guard: Callable[[str], str] = (lambda text: text) if allow_special else tokenizer.guard
        self._pieces = [] if system is None else [_Piece("system", self._guard(system), system_name)]
        self._history: _History | None = None
        self._asked: tuple[_Piece, _History] | None = None

    def turn(self, text: str) -> Turn:
        """The prompt that asks `text` after everything that is committed. Raises ValueError if the template raises."""
        question = _Piece("user", self._guard(text))
        if self._tokenizer.has_chat_template:
            history, rewrote = self._templated([*self._pieces, question])
        else:
            history, rewrote = self._plain(question), False
        self._asked = question, history
        return Turn(list(history.ids), list(history.spans), rewrote)

    def commit(self, output_ids: Sequence[int], text: str, finish_reason: str) -> None:
        """Add the answer to the last turn: the sampled ids, including a stop string and EOS, and the visible text.

        Without ids, or after an error, the conversation stays as it was before the turn.
        """
        if self._asked is None:
            return
        question, history = self._asked
        self._asked = None
        if not output_ids or finish_reason in ("error", "refused"):
            return
        ended = output_ids[-1] in self._tokenizer.eos_ids
        start, end = len(history.ids), len(history.ids) + len(output_ids)
        history.ids.extend(output_ids)
        history.spans = _joined(
            [*history.spans, (start, end - ended, "assistant", ""), (end - ended, end, "template", "")]
        )
        # The ids keep what a stop string cut from the text. The template sees only the text.
        text = self._guard(text)
        history.text += text
        if ended:
            history.text += self._tokenizer.token_bytes(output_ids[-1]).decode("utf-8", "replace")
        self._pieces += [question, _Piece("assistant", text)]
        self._history = history

    def cost_of_trimming(self, text: str) -> tuple[int, int] | None:
        """(prompt tokens, how many of them would be computed) of `text` without the oldest question and answer.

        Only what comes before these two stays cached. None: there is nothing to leave out.
        """
        first = next((i for i, piece in enumerate(self._pieces) if piece.role == "user"), None)
        if first is None or self._history is None or not self._tokenizer.has_chat_template:
            return None
        kept = [*self._pieces[:first], *self._pieces[first + 2 :], _Piece("user", self._guard(text))]
        ids = self._tokenizer.encode(_render(self._tokenizer, kept)[0])
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, self._history.ids, strict=False)) if a != b), len(ids)
        )
        return len(ids), len(ids) - same

    def _templated(self, pieces: list[_Piece]) -> tuple[_History, bool]:
        rendered, parts = _render(self._tokenizer, pieces)
        history = self._history
        start = 0
        ids: list[int] = []
        spans: list[Span] = []
        if history is not None and rendered.startswith(history.text):
            start, ids, spans = len(history.text), history.ids, history.spans
        new_ids, ends = self._tokenizer.encode_ends(rendered[start:])
        new_spans = _token_spans(parts, [start + end for end in ends], len(ids))
        return _History(
            [*ids, *new_ids], rendered, _joined([*spans, *new_spans])
        ), history is not None and not ids

    def _plain(self, question: _Piece) -> _History:
        """Without a template: the texts one after another, after the begin-of-text token of the model."""
        encode = self._tokenizer.encode
        history = self._history or _History(encode("", special=True), "", [])
        ids = list(history.ids)
        spans = list(history.spans) if history.spans else [(0, len(ids), "template", "")]
        for piece in [*([] if self._history else self._pieces), question]:
            start = len(ids)
            ids += encode(piece.text)
            spans.append((start, len(ids), piece.role, piece.name))
        return _History(ids, history.text, _joined(spans))


# ----------------------------------------------------------------------- rendering, and who wrote what


def _render(tokenizer: ChatTokenizer, pieces: Sequence[_Piece]) -> tuple[str, list[tuple[int, str, str]]]:
    """The text, and its parts as (end in characters, role, name) in order.

    If a template refuses a system message, the message is put before the first question.
    """
    messages = [{"role": piece.role, "content": piece.text} for piece in pieces]
    # The same chat with marks instead of messages shows what the template writes between them.
    marked = [{"role": piece.role, "content": f"\ue000{i}\ue001"} for i, piece in enumerate(pieces)]
    try:
        text = tokenizer.render(messages, True)
    except ValueError:
        if len(pieces) < 2 or pieces[0].role != "system":
            raise
        messages, marked = _without_system(messages), _without_system(marked)
        text = tokenizer.render(messages, True)
    try:
        frame = tokenizer.render(marked, True)
    except ValueError:  # a template that depends on the contents of messages
        frame = ""
    return text, _parts(text, frame, pieces)


def _without_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    system, first, *others = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]


def _parts(text: str, frame: str, pieces: Sequence[_Piece]) -> list[tuple[int, str, str]]:
    """Compare the text with the frame: in turns text of the template and a message, which may be trimmed."""
    parts: list[tuple[int, str, str]] = []
    position = 0
    for i, piece in enumerate(pieces):
        mark = f"\ue000{i}\ue001"
        before, found, frame = frame.partition(mark)
        if not found:
            frame = before
            continue
        if not text.startswith(before, position):
            break
        position += len(before)
        parts.append((position, "template", ""))
        after = frame.partition("\ue000")[0]
        for words in (piece.text, piece.text.strip()):
            if text.startswith(words + after, position):
                position += len(words)
                break
        else:  # the template shortened the message (without thinking): it ends where the template's text begins
            end = text.find(after, position) if after else -1
            if end < 0:
                break
            position = end
        parts.append((position, piece.role, piece.name))
    return [*parts, (len(text), "template", "")]


def _token_spans(parts: list[tuple[int, str, str]], ends: list[int], first: int) -> list[Span]:
    """Spans of tokens that end at `ends` (characters), numbered from `first`. A token across a border belongs to the
    part of its last character."""
    spans: list[Span] = []
    part = last = 0
    for i, end in enumerate(ends):
        last = max(last, end)  # some post-processors trim spaces off the offsets
        while part < len(parts) - 1 and last > parts[part][0]:
            part += 1
        spans.append((first + i, first + i + 1, parts[part][1], parts[part][2]))
    return spans


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Neighbours with the same role and name become one span. Empty spans are dropped."""
    joined: list[Span] = []
    for start, end, role, name in spans:
        if start == end:
            continue
        if joined and joined[-1][2:] == (role, name):
            joined[-1] = (joined[-1][0], end, role, name)
        else:
            joined.append((start, end, role, name))
    return joined
