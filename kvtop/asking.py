"""Asking: what the prompt sends, in which conversation, and what the next Enter will do.

Owns the current conversation and the place among the five examples. Typed prompts continue the current
conversation; an example starts one of its own for each of its prompts. Invariant: an example is sent only
after the one before it has finished, so each shows what it is there to show however fast Enter is pressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine import SamplingParams

if TYPE_CHECKING:
    from engine import Engine
    from kvtop.examples import Example
    from kvtop.state import DashboardState


@dataclass(frozen=True, slots=True)
class NextEnter:
    """What Enter does now, and why that is worth seeing."""

    says: str
    why: str


class Asker:
    """The prompt's side of an engine. `tick` after every application of batches."""

    def __init__(
        self,
        engine: Engine,
        state: DashboardState,
        *,
        examples: Sequence[Example] = (),
        params: SamplingParams | None = None,
        system: str | None = None,
        system_name: str = "",
        salt: str | None = None,
    ) -> None:
        self.engine = engine
        self.state = state
        self.examples = tuple(examples)
        self.params = params or SamplingParams()
        self.system, self.system_name, self.salt = system, system_name, salt
        self.conversation: int | None = None
        self.place = 0
        """Examples sent so far."""
        self._pending = 0
        self._running: list[int] = []
        self._seen = ""

    def send(self, text: str) -> None:
        """A typed prompt: the next turn of the current conversation, or an example for an empty one."""
        if not text:
            self._pending = min(self._pending + 1, len(self.examples) or 0)
            self.tick()
            return
        if self.conversation is None:
            self.conversation = self.engine.new_conversation(self.system, self.system_name)
        self.engine.submit(text, self.params, conversation=self.conversation, salt=self.salt)

    def new_conversation(self) -> None:
        """The next typed prompt starts anew, with --system's text if there is one."""
        self.conversation = None

    @property
    def busy(self) -> bool:
        """A request of the last example is not finished yet."""
        views = (self.state.requests.get(rid) for rid in self._running)
        return any(view is None or view.phase != "finished" for view in views)

    def tick(self) -> None:
        """Send an example that was asked for, once the one before has finished."""
        if self._pending and not self.busy and self.state.started is not None:
            self._pending -= 1
            self._send_example()

    def _send_example(self) -> None:
        example = self.examples[self.place % len(self.examples)]
        self.place += 1
        self._seen = example.seen
        self._running = []
        for prompt in example.prompts:
            conversation = self.engine.new_conversation(prompt.system, prompt.system_name)
            params = replace(self.params, max_tokens=prompt.max_tokens, temperature=0.0)
            self._running.append(self.engine.submit(prompt.text, params, conversation=conversation))
        if len(example.prompts) == 1:
            self.conversation = conversation

    def next_enter(self, text: str) -> NextEnter:
        """For the hint; `text` is what the prompt holds."""
        if self.state.started is None:
            return NextEnter("the engine is loading; what you send is answered then", "")
        if text:
            if self.conversation is None:
                return NextEnter("Enter starts a conversation", "")
            return NextEnter("Enter goes on with this conversation", "ctrl+n starts a new one")
        if not self.examples:
            return NextEnter("type a prompt and press Enter", "")
        total = len(self.examples)
        if self._pending:
            return NextEnter(f"example {self.place % total + 1} follows when this one is done", self._seen)
        if self.busy and self._seen:
            return NextEnter(f"example {(self.place - 1) % total + 1}: {self._seen}", "")
        example = self.examples[self.place % total]
        number = self.place % total + 1
        again = "again " if self.place >= total else ""
        return NextEnter(
            f"Enter sends example {number} of {total} {again}".rstrip() + f": {example.title}", example.why
        )
