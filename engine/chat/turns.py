"""Turns: passes prompts to the core, as turns of conversations or as token ids.

Owns the conversations, and the prompts that wait until the running turn of their conversation has finished. Invariant:
every accepted prompt becomes a request with a RequestFinished in the event stream, whatever fails before. Runs in the
engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.chat.conversation import Conversation, Span
from engine.errors import SetupError, one_line
from engine.loaded import TextTokenizer
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.sequence import Request

_NO_TOKENIZER = "this engine has no tokenizer: submit token ids"


@dataclass(slots=True)
class Prompt:
    """What a caller submitted. t_arrival: on the engine's clock."""

    request_id: int
    content: str | list[int]
    params: SamplingParams
    t_arrival: float
    priority: int = 0
    salt: str | None = None


@dataclass(slots=True)
class _Chat:
    """A conversation, its running request, and the turns that wait for it."""

    conversation: Conversation
    waiting: deque[Prompt] = field(default_factory=deque)
    running: int | None = None


class Turns:
    """All conversations of one engine. post: puts a command into the inbox of the engine."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: TextTokenizer | None,
        post: Callable[[Callable[[], None]], None],
        *,
        allow_special: bool = False,
    ) -> None:
        self._allow_special = allow_special
        self._core = core
        self._tokenizer = tokenizer
        self._post = post
        self._opened = core.clock()
        self._chats: dict[int, _Chat] = {}

    def open(self, number: int, system: str | None, name: str) -> None:
        """Begin conversation `number`. Raises SetupError without a tokenizer."""
        self._chats[number] = self._chat(system, name)

    def take_ids(self, prompt: Prompt, spans: list[Span]) -> None:
        """Queue a prompt of token ids."""
        assert not isinstance(prompt.content, str)
        self._add(prompt, prompt.content, spans=spans)

    def take_text(
        self, prompt: Prompt, conversation: int | None, system: str | None = None, name: str = ""
    ) -> None:
        """Queue a text as the next turn of `conversation`; None: as a new conversation."""
        if self._tokenizer is None:
            self._refuse(prompt, _NO_TOKENIZER)
        elif conversation is None:
            self._ask(prompt, None, self._chat(system, name))
        elif conversation in self._chats:
            self._chats[conversation].waiting.append(prompt)
            self._next(conversation)
        else:
            self._refuse(prompt, f"there is no conversation {conversation}")

    def abort(self, request_id: int) -> None:
        """End a waiting turn. All other requests belong to the core."""
        for chat in self._chats.values():
            for prompt in [p for p in chat.waiting if p.request_id == request_id]:
                chat.waiting.remove(prompt)
                self._drop(prompt)

    def close(self) -> None:
        """End all waiting turns."""
        for chat in self._chats.values():
            while chat.waiting:
                self._drop(chat.waiting.popleft())

    def finished(self, request: Request) -> None:
        """A request has finished. Its answer becomes part of its conversation."""
        number = request.conversation
        if number is None:
            return
        chat = self._chats[number]
        if chat.running != request.request_id:
            return
        chat.running = None
        if chat.waiting:
            # Its prompt depends on this answer, so its time to the first token begins now.
            chat.waiting[0].t_arrival = self._core.clock()
        # The next turn must not be queued in the middle of a commit.
        self._post(lambda: self._next(number))
        if request.branches:  # a refused turn is not part of the conversation
            branch = request.branches[0]
            text = branch.detok.text if branch.detok else ""
            chat.conversation.commit(list(branch.output_ids), text, request.finish_reason or "stop")

    # ---------------------------------------------------------------- inside

    def _chat(self, system: str | None, name: str) -> _Chat:
        if self._tokenizer is None:
            raise SetupError(_NO_TOKENIZER)
        return _Chat(Conversation(self._tokenizer, system, name, allow_special=self._allow_special))

    def _next(self, number: int) -> None:
        chat = self._chats[number]
        while chat.running is None and chat.waiting:
            self._ask(chat.waiting.popleft(), number, chat)

    def _ask(self, prompt: Prompt, number: int | None, chat: _Chat) -> None:
        assert isinstance(prompt.content, str)
        try:
            rendered = chat.conversation.turn(prompt.content)
            full = None if number is None else self._full(chat, prompt.content, len(rendered.token_ids))
        except Exception as error:
            self._refuse(prompt, _why(error))
            return
        if number is not None:
            chat.running = prompt.request_id
        self._add(prompt, rendered.token_ids, number, rendered.spans, rendered.rewrote_history, full)

    def _full(self, chat: _Chat, prompt: str, tokens: int) -> str | None:
        """Why this turn no longer fits in the context, and what trimming would cost; None if it fits."""
        limit = self._core.runner.max_model_len
        if tokens < limit:
            return None
        cost = chat.conversation.cost_of_trimming(prompt)
        if cost is None:
            return None  # its first turn: an ordinary prompt that is too long
        return (
            f"this conversation is full: {tokens:,} tokens, the context holds {limit:,}. Start a new one; "
            f"without the oldest turn it would be {cost[0]:,} tokens, of which {cost[1]:,} computed again"
        )

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(_NO_TOKENIZER)
        return self._tokenizer.encode(text)

    def _refuse(self, prompt: Prompt, reason: str) -> None:
        self._add(prompt, [], refuse=reason)

    def _drop(self, prompt: Prompt) -> None:
        """End a prompt that was never queued. It must still be visible in the events."""
        self._add(prompt, [], refuse="aborted while an earlier turn of its conversation ran", ends="abort")

    def _add(
        self,
        prompt: Prompt,
        token_ids: list[int],
        conversation: int | None = None,
        spans: list[Span] | None = None,
        rewrote_history: bool = False,
        refuse: str | None = None,
        ends: Literal["refused", "abort"] = "refused",
    ) -> None:
        params = prompt.params
        try:
            if params.bad_words:
                params = params.with_words(self._encode)
        except Exception as error:
            refuse = refuse or _why(error)
        self._core.add_request(
            prompt.request_id,
            token_ids,
            params,
            # A prompt that came while the model was loading arrives when the engine is ready. It was stamped with real
            # time, but the engine may have a virtual clock.
            t_arrival=min(max(prompt.t_arrival, self._opened), self._core.clock()),
            priority=prompt.priority,
            salt=prompt.salt,
            conversation=conversation,
            spans=spans,
            template_rewrote_history=rewrote_history,
            refuse=refuse,
            ends=ends,
        )


def _why(error: Exception) -> str:
    """Why a prompt is refused: a ValueError says it in its own words."""
    return str(error) if isinstance(error, ValueError) else one_line(error)
