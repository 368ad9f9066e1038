"""Turns: prompts on their way to the core, as texts of conversations or as token ids.

Owns the conversations and the turns that wait for the running one of theirs. Invariant: every turn that is
taken becomes a request that comes to an end in the event stream, whatever a template makes of its text.
Lives in the engine thread.
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
class Turn:
    """What a caller submitted. t_arrival: on the engine's clock."""

    request_id: int
    prompt: str | list[int]
    params: SamplingParams
    t_arrival: float
    priority: int = 0
    salt: str | None = None


@dataclass(slots=True)
class _Chat:
    """A conversation and the turns that wait for its running one."""

    conversation: Conversation
    waiting: deque[Turn] = field(default_factory=deque)
    running: int | None = None


class Turns:
    """All conversations of one engine. post: leaves a command in the engine's inbox."""

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

    def take_ids(self, turn: Turn, spans: list[Span]) -> None:
        """A prompt of token ids, queued as it is."""
        assert not isinstance(turn.prompt, str)
        self._add(turn, turn.prompt, spans=spans)

    def take_text(
        self, turn: Turn, conversation: int | None, system: str | None = None, name: str = ""
    ) -> None:
        """The next turn of `conversation`, or (None) all of one of its own."""
        if self._tokenizer is None:
            self._refuse(turn, _NO_TOKENIZER)
        elif conversation is None:
            self._ask(turn, None, self._chat(system, name))
        elif conversation in self._chats:
            self._chats[conversation].waiting.append(turn)
            self._next(conversation)
        else:
            self._refuse(turn, f"there is no conversation {conversation}")

    def abort(self, request_id: int) -> None:
        """End a turn that waits; others are the core's."""
        for chat in self._chats.values():
            for turn in [t for t in chat.waiting if t.request_id == request_id]:
                chat.waiting.remove(turn)
                self._drop(turn)

    def close(self) -> None:
        """End all that wait."""
        for chat in self._chats.values():
            while chat.waiting:
                self._drop(chat.waiting.popleft())

    def finished(self, request: Request) -> None:
        """A request of the core came to its end: its answer belongs to the conversation."""
        number = request.conversation
        if number is None:
            return
        chat = self._chats[number]
        if chat.running != request.request_id:
            return
        chat.running = None
        if request.branches:  # a refused turn leaves no trace
            branch = request.branches[0]
            text = branch.detok.text if branch.detok else ""
            chat.conversation.commit(list(branch.output_ids), text, request.finish_reason or "stop")
        if chat.waiting:
            # Its prompt did not exist before this answer: its time to the first token begins here.
            chat.waiting[0].t_arrival = self._core.clock()
        # The next turn must not be queued in the middle of a commit.
        self._post(lambda: self._next(number))

    # ---------------------------------------------------------------- inside

    def _chat(self, system: str | None, name: str) -> _Chat:
        if self._tokenizer is None:
            raise SetupError(_NO_TOKENIZER)
        return _Chat(Conversation(self._tokenizer, system, name, allow_special=self._allow_special))

    def _next(self, number: int) -> None:
        chat = self._chats[number]
        while chat.running is None and chat.waiting:
            self._ask(chat.waiting.popleft(), number, chat)

    def _ask(self, turn: Turn, number: int | None, chat: _Chat) -> None:
        assert isinstance(turn.prompt, str)
        try:
            rendered = chat.conversation.turn(turn.prompt)
        except Exception as error:
            self._refuse(turn, str(error) if isinstance(error, ValueError) else one_line(error))
            return
        full = None
        if number is not None:
            chat.running = turn.request_id
            full = self._full(chat, turn.prompt, len(rendered.token_ids))
        self._add(turn, rendered.token_ids, number, rendered.spans, rendered.rewrote_history, full)

    def _full(self, chat: _Chat, prompt: str, tokens: int) -> str | None:
        """Why this turn does not fit its conversation any more, and what trimming would cost."""
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

    def _refuse(self, turn: Turn, reason: str) -> None:
        self._add(turn, [], refuse=reason)

    def _drop(self, turn: Turn) -> None:
        """It was never queued, but whoever watches must learn that it came and went."""
        self._add(turn, [], refuse="aborted while an earlier turn of its conversation ran", ends="abort")

    def _add(
        self,
        turn: Turn,
        token_ids: list[int],
        conversation: int | None = None,
        spans: list[Span] | None = None,
        rewrote_history: bool = False,
        refuse: str | None = None,
        ends: Literal["refused", "abort"] = "refused",
    ) -> None:
        params = turn.params
        if params.bad_words:
            if self._tokenizer is None:
                refuse = refuse or _NO_TOKENIZER
            else:
                params = params.with_words(self._tokenizer.encode)
        self._core.add_request(
            turn.request_id,
            token_ids,
            params,
            # What came while the model was loading arrives when there is an engine; its time was the wall's,
            # the engine's may be virtual.
            t_arrival=min(max(turn.t_arrival, self._opened), self._core.clock()),
            priority=turn.priority,
            salt=turn.salt,
            conversation=conversation,
            spans=spans,
            template_rewrote_history=rewrote_history,
            refuse=refuse,
            ends=ends,
        )
