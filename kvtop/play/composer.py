"""Composer: what the prompt sends, in which conversation, and what the next Enter will do.

Owns the current conversation and the number of examples that were sent. A typed prompt continues the latest typed
conversation, or the one about an example's page while that page is attached. An example starts a new conversation for
each of its prompts. Invariants: an example is sent only after the one before it has finished, so each shows what it is
meant to show, however fast Enter is pressed; what the hint says is true of the state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine import SamplingParams

if TYPE_CHECKING:
    from engine import Engine
    from kvtop.play.examples import Example
    from kvtop.state.dashboard import DashboardState

NEARLY_FULL = 0.9
"""Share of the context from which on the hint recommends a new conversation."""


def branching(text: str, params: SamplingParams) -> tuple[str, SamplingParams] | None:
    """`/n 4 question` and `/beam 4 question` -> the question and its params. Without a question the params are for
    all later ones. None for any other text. Raises ValueError, one line, for a number that makes no sense."""
    found = re.fullmatch(r"/(n|beam)(?:\s+(\S+)(?:\s+(.*))?)?", text, re.DOTALL)
    if found is None:
        return None
    name, number, question = found[1], found[2] or "", (found[3] or "").strip()
    if not re.fullmatch(r"[0-9]{1,6}", number):
        raise ValueError(f"/{name} needs a number")
    if name == "n":
        return question, replace(params, n=int(number), beam_width=1)
    return question, replace(params, n=1, beam_width=int(number))


@dataclass(frozen=True, slots=True)
class NextEnter:
    """What Enter does now, and why that is worth seeing."""

    says: str
    why: str


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt that was sent, while no event names it yet: the state knows only what events say, so the screen gets
    it from here. after: the request before it in its conversation."""

    request_id: int
    text: str
    after: int | None


class Composer:
    """Sends prompts to an engine. Call `tick` each time after batches were applied."""

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
        """What a typed prompt continues; None: it starts a new one."""
        self.attached = system_name
        """Name of the page that conversation is about."""
        self.anew = False
        """The user asked for a new conversation, and has sent nothing in it yet."""
        self.place = 0
        """Examples sent so far."""
        self._typed: tuple[int | None, str] = (None, system_name)
        """The latest typed conversation and its page."""
        self._pending = 0
        self._running: list[int] = []
        self._seen = ""
        self._sent: dict[int, SentPrompt] = {}
        self._unfinished: list[int] = []
        """Requests sent and neither finished nor aborted, as far as is known."""
        self._latest: dict[int, int] = {}
        """Latest request of each conversation."""
        self._asked: dict[tuple[str, str], int] = {}
        """Latest request of each example's prompt, by page and text."""

    def send(self, text: str) -> None:
        """A typed prompt: the next turn of the current conversation, or an example for an empty one."""
        if self.engine.failure is not None:  # the screen says why; nothing would answer
            return
        if not text:
            self._pending = min(self._pending + 1, len(self.examples) or 0)
            self.tick()
            return
        try:
            command = branching(text, self.params)
        except ValueError:  # the hint says what is wrong
            return
        text, params = command or (text, self.params)
        if not text:
            self.params = params
            return
        if self.conversation is None:
            self.conversation = self.engine.new_conversation(self.system, self.system_name)
        self._submit(text, params, self.conversation, self.salt)
        self.anew = False
        self._typed = self.conversation, self.attached

    def new_conversation(self) -> None:
        """The next typed prompt starts a new conversation, with the text of --system if there is one."""
        self.conversation, self.attached, self.anew = None, self.system_name, True

    def abort(self) -> int:
        """Abort every unfinished answer, and drop the examples that wait to be sent. Returns how many these are."""
        self._forget_finished()
        for rid in self._unfinished:
            self.engine.abort(rid)
        count, self._pending, self._unfinished = len(self._unfinished) + self._pending, 0, []
        return count

    def _forget_finished(self) -> None:
        views = self.state.requests
        self._unfinished = [r for r in self._unfinished if r not in views or views[r].phase != "finished"]

    @property
    def busy(self) -> bool:
        """A request of the last example is not finished yet."""
        views = (self.state.requests.get(rid) for rid in self._running)
        return any(view is None or view.phase != "finished" for view in views)

    def sent(self, shown: DashboardState) -> list[SentPrompt]:
        """Prompts that were sent and are not in `shown` yet, in the order of asking. `shown` may be a frozen state."""
        for rid in [rid for rid in self._sent if rid in shown.requests]:
            del self._sent[rid]
        return list(self._sent.values())

    def tick(self) -> None:
        """Send an example that was asked for, once the one before has finished."""
        if self.engine.failure is not None:
            self._pending = 0
        if self._pending and not self.busy and self.state.started is not None:
            self._pending -= 1
            self._send_example()

    def _submit(self, text: str, params: SamplingParams, conversation: int, salt: str | None = None) -> int:
        rid = self.engine.submit(text, params, conversation=conversation, salt=salt)
        self._sent[rid] = SentPrompt(rid, text, self._latest.get(conversation))
        self._latest[conversation] = rid
        self._forget_finished()
        self._unfinished.append(rid)
        return rid

    def _send_example(self) -> None:
        example = self.examples[self.place % len(self.examples)]
        self._seen = example.seen if self._why(example) == example.why else ""
        self.place += 1
        self._running = []
        for prompt in example.prompts:
            conversation = self.engine.new_conversation(prompt.system, prompt.system_name)
            params = replace(self.params, max_tokens=prompt.max_tokens, temperature=0.0)
            rid = self._submit(prompt.text, params, conversation)
            self._running.append(rid)
            self._asked[prompt.system, prompt.text] = rid
        if len(example.prompts) == 1:
            self.conversation, self.attached = conversation, example.prompts[0].system_name
        else:
            self.conversation, self.attached = self._typed
        self.anew = False

    # ---------------------------------------------------------------------------------- the hint

    def next_enter(self, text: str) -> NextEnter:
        """For the hint; `text` is what the prompt holds."""
        if self.state.started is None:
            return NextEnter("the engine is loading; what you send is answered then", "")
        if text:
            return self._command_next(text) or self._typed_next()
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
        says = f"Enter sends example {number} of {total} {again}".rstrip() + f": {example.title}"
        return NextEnter(says, self._why(example))

    def _command_next(self, text: str) -> NextEnter | None:
        """What `/n 4 question` will do."""
        try:
            command = branching(text, self.params)
        except ValueError as error:
            return NextEnter(
                str(error), "/n 4 question asks for 4 samples, /beam 4 question for a beam search"
            )
        if command is None:
            return None
        question, params = command
        if params.beam_width > 1:
            what, why = f"searches with {params.beam_width} beams", "beams share blocks until they differ"
        elif params.n > 1:
            what, why = (
                f"asks for {params.n} samples",
                "they share the prompt's blocks; a writer copies first",
            )
        else:
            what, why = "asks for one answer", ""
        return NextEnter(f"Enter {what}" + ("" if question else ", from the next question on"), why)

    def _typed_next(self) -> NextEnter:
        if self.conversation is None:
            return NextEnter(
                "Enter starts a new conversation" if self.anew else "Enter starts a conversation", ""
            )
        view = self.state.requests.get(self._latest[self.conversation])
        if view is not None and self.state.started is not None:
            limit = self.state.started.max_model_len
            tokens = view.prompt_tokens + view.num_output
            full = f"{tokens:,} of the context's {limit:,} tokens are taken"
            if view.finish_reason == "refused":
                return NextEnter("this conversation is full · ctrl+n starts a new one", view.error or "")
            if tokens > NEARLY_FULL * limit:
                return NextEnter("this conversation is nearly full · ctrl+n starts a new one", full)
        if self.conversation != self._typed[0] and self.attached:
            return NextEnter(f"Enter continues {self.attached} · ctrl+n starts anew", "")
        about = f" about {self.attached}" if self.attached else ""
        return NextEnter(f"Enter goes on with this conversation{about}", "ctrl+n starts a new one")

    def _why(self, example: Example) -> str:
        """The example's own reason, or another one if the state shows that it does not hold now."""
        state = self.state
        views = [state.requests.get(self._asked.get((p.system, p.text), 0)) for p in example.prompts]
        hashes = {h for view in views if view is not None for h in view.lookup_hashes}
        if not hashes:
            others = [v for rid in self._asked.values() if (v := state.requests.get(rid)) is not None]
            if len(example.prompts) > 1 and others and state.block_size:
                # Pages have about the same length: each is counted like the largest one so far.
                need = len(example.prompts) * max(-(-v.prompt_tokens // state.block_size) for v in others)
                if need <= state.pool.blocks_until_eviction:
                    return "they fit into the blocks that are free: nothing has to be evicted"
            return example.why
        cached, total = sum(bool(state.pool.find(h)) for h in hashes), len(hashes)
        if cached == total:
            return f"all its {total:,} full blocks are cached: they are read, and only the end is computed"
        if cached:
            return f"{cached:,} of its {total:,} full blocks are still cached; the others were evicted"
        first = self.place < len(self.examples)
        return example.why if first else "its blocks were evicted since: all of it is computed again"
