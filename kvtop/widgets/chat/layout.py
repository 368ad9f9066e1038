"""A request as lines of the chat: question, attached page, what it cost, answer.

Owns the wording of the cost and the tie of every line to its tokens. Makes lines, paints none; a line's
cells are where `Chat` draws them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style

from kvtop.text import cut, safe_text
from kvtop.units import NOT_HERE, count, duration
from kvtop.widgets.base.lines import Part
from kvtop.widgets.chat import lookup
from kvtop.widgets.chat.answer import INDENT, Answer, Line, Passage
from kvtop.wrap import spelled, wrap

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import PromptSpan, RequestView

_FOLDED_PROMPT = 6
"""Lines of a question that are shown folded."""


@dataclass(slots=True)
class Sheet:
    """What stays of a request's layout while it runs. Its answer grows; its question is laid out once."""

    prompt: list[int] | None = None
    """The tokens of the prompt that it is of: numbers of requests are given anew after a warm-up."""
    asked: list[Line] = field(default_factory=list)
    asked_for: tuple[object, ...] = ()
    answer: Answer | None = None

    def is_of(self, view: RequestView) -> bool:
        """It was made for this request."""
        return self.prompt is view.prompt_token_ids


@dataclass(frozen=True, slots=True)
class Layouter:
    """Lays requests out at `width` cells; ink: palette entry to style."""

    state: DashboardState
    width: int
    ink: Callable[[str], Style]
    unfolded: bool
    sheet: Sheet = field(default_factory=Sheet)
    """The request's own, from frame to frame."""

    def lines(self, view: RequestView) -> Iterator[Line]:
        """Question, attached page, cost or error, answer."""
        page = self._page(view)
        asked = self._kept_question(view, page)
        yield from asked
        if page is not None:
            if not asked[0].fold:
                yield self._page_line(view, page)
            if self.unfolded:
                yield from self._unfolded(view, page)
        pad: Part = (" " * INDENT, Style.null())
        if view.error:
            for text in plain(safe_text(view.error), self.width - INDENT):
                yield Line([pad], [(text, self.ink("error"))])
        if view.finish_reason == "refused":
            return
        yield Line([pad], self._cost(view))
        if view.saved is not None:
            yield Line([pad], [(cut(view.sharing(), self.width - INDENT), self.ink("muted"))])
        answer, running = self._answer(view), view.phase == "running"
        if answer.passage.text or (running and view.t_first is not None):
            yield from answer.lines(self.ink("accent") if running else None)
        for place, text in enumerate(view.branch_texts()[1:] if view.n > 1 else (), 2):
            yield from self._sample(place, text)

    def _page(self, view: RequestView) -> PromptSpan | None:
        """The attached page, where it comes in: with the first turn of a conversation."""
        earlier = any(role == "assistant" for _, _, role, _ in view.spans)
        return None if earlier else next((s for s in view.spans if s[3]), None)

    def _kept_question(self, view: RequestView, page: PromptSpan | None) -> list[Line]:
        sheet, wanted = self.sheet, (view.cached_tokens, self.width, self.unfolded)
        if sheet.asked_for != wanted:
            sheet.asked_for, sheet.asked = wanted, list(self._asked(view, page))
        return sheet.asked

    def _asked(self, view: RequestView, page: PromptSpan | None) -> Iterator[Line]:
        """The question; the page behind its first line if there is room."""
        bold = self.ink("text") + Style(bold=True)
        head = f"#{view.request_id} "
        indent = max(INDENT, len(head))
        question = self._question(view)
        chip = self._chip(view, page) if page is not None else []
        lines = wrap(question.text.strip("\n") or " ", max(1, self.width - indent))
        offset = len(question.text) - len(question.text.lstrip("\n"))
        more = 0 if self.unfolded else max(0, len(lines) - _FOLDED_PROMPT)
        if more > 1:
            lines = lines[:-more]
        for n, (start, end) in enumerate(lines):
            start, end = start + offset, end + offset
            lead = [(head, self.ink("muted"))] if n == 0 else [(" " * indent, bold)]
            if question.token(start) < view.cached_tokens:
                lead = [("▌", self.ink("hit")), (lead[0][0][1:], lead[0][1])]
            line = Line(lead, passage=question, start=start, end=end, style=bold)
            used = indent + cell_len(question.text[start:end]) + sum(cell_len(t) for t, _ in chip)
            if n == 0 and chip and used + 2 <= self.width:
                line.parts, line.fold = chip, True
            yield line
        if more > 1:
            yield Line([(" " * indent, bold)], [(f"… {more} more lines ▸", self.ink("muted"))], fold=True)
        yield from self._names_line(question, indent)

    def _question(self, view: RequestView) -> Passage:
        turns = [s for s in view.spans if s[2] == "user"]
        start, end = (turns[-1][0], turns[-1][1]) if turns else (0, len(view.prompt_token_ids))
        if not view.prompt_token_ids:
            return Passage(f"{count(view.prompt_tokens)} tokens, text {NOT_HERE}", [0], 0)
        return self._passage(view, start, end)

    def _passage(self, view: RequestView, start: int, end: int) -> Passage:
        """Tokens start to end of the prompt as text, with the names of special tokens in it."""
        text, starts = spelled(self.state.vocabulary.piece(t) for t in view.prompt_token_ids[start:end])
        started = self.state.started
        names = started.knobs.special_tokens if started is not None else []
        return Passage(text, starts, start, names_in(text, names))

    def _names_line(self, passage: Passage, indent: int) -> Iterator[Line]:
        """What became of the special tokens that this text names."""
        if not passage.names or self.state.started is None:
            return
        acts = self.state.started.knobs.allow_special_tokens
        found = dict.fromkeys(passage.text[a:b] for a, b in passage.names)
        words = f"{', '.join(found)}: {'special, acts as a token' if acts else 'kept as text'}"
        yield Line(
            [(" " * indent, self.ink("text"))], [(cut(words, max(1, self.width - indent)), self.ink("muted"))]
        )

    def _answer(self, view: RequestView) -> Answer:
        answer, room = self.sheet.answer, max(1, self.width - INDENT)
        if answer is None or answer.room != room or not answer.continues(view.output_ids, view.text):
            answer = self.sheet.answer = Answer(room, view.prompt_tokens, self.ink("text"))
        answer.grow(view.output_ids, self.state.vocabulary.piece, view.text)
        return answer

    def _chip(self, view: RequestView, page: PromptSpan) -> list[Part]:
        read = view.cached_tokens > page[0]
        arrow = "▾" if self.unfolded else "▸"
        name = cut(safe_text(page[3]), max(4, self.width // 3))
        return [("▌" if read else " ", self.ink("hit")), (f"{name} {arrow}", self.ink("muted"))]

    def _page_line(self, view: RequestView, page: PromptSpan) -> Line:
        """The attached page in a line of its own, where it does not fit behind the question."""
        read = min(view.cached_tokens, page[1]) > page[0]
        lead = [("  ", self.ink("text")), ("▌" if read else "│", self.ink("hit" if read else "muted"))]
        arrow = "▾" if self.unfolded else "▸"
        name = cut(safe_text(page[3]), max(4, self.width - 24))
        text = f"{name} · {count(page[1] - page[0])} tokens {arrow}"
        return Line(lead, [(text, self.ink("muted"))], fold=True)

    def _unfolded(self, view: RequestView, page: PromptSpan) -> Iterator[Line]:
        passage = self._passage(view, page[0], page[1])
        for start, end in wrap(passage.text, max(1, self.width - INDENT)):
            cached = passage.token(start) < view.cached_tokens
            lead = [
                (" " * (INDENT - 1), self.ink("text")),
                ("▌" if cached else "│", self.ink("hit" if cached else "muted")),
            ]
            yield Line(lead, passage=passage, start=start, end=end, style=self.ink("muted"))
        yield from self._names_line(passage, INDENT)

    def _cost(self, view: RequestView) -> list[Part]:
        """ "cold · computed 1,040 tokens · 690 ms" and its other forms."""
        muted, hit, width = self.ink("muted"), self.ink("hit"), self.width - INDENT
        read, todo = view.cached_tokens, view.prompt_tokens - view.cached_tokens
        if view.phase == "queued":
            text = "waiting"
            if view.blocked is not None:
                need, free = count(view.blocked.need), count(view.blocked.free)
                text = f"waiting for memory: needs {need} blocks, {free} free"
            return [(cut(text, width), muted)]
        if view.phase == "preempted":
            return [
                (cut("preempted: gave its blocks up, waits to compute again", width), self.ink("warning"))
            ]
        first: list[Part] = [(f"read {count(read)}", hit)] if read else [("cold", self.ink("active"))]
        if view.t_first is None and view.phase == "running":
            done = max(0, view.num_computed - read)
            return [*first, (f" · computing {count(done)} of {count(todo)}", muted)]
        end: list[Part] = (
            [(f" · {duration(view.ttft)}", hit if read else muted)] if view.ttft is not None else []
        )
        if times := lookup.speedup(self.state, view):
            end.append((f"   {times}", hit + Style(bold=True)))
        if view.finish_reason in ("length", "abort"):
            word = "aborted" if view.finish_reason == "abort" else f"cut at {_tokens(len(view.output_ids))}"
            end.append((f" · {word}", muted))
        middles = (f" · computed {count(todo)} tokens", f" · computed {count(todo)}", "")
        shorter = [(" · cut" if text.startswith(" · cut") else text, style) for text, style in end]
        for tail, middle in [(end, m) for m in middles[bool(read) :]] + [(shorter, ""), (end[:1], "")]:
            row = [*first, (middle, muted), *tail]
            if sum(cell_len(t) for t, _ in row) <= width:
                break
        return row

    def _sample(self, place: int, text: str) -> Iterator[Line]:
        """The text of another sample, with its number."""
        shown = safe_text(text, newlines=True).strip("\n")
        lead = str(place).rjust(INDENT - 1) + " "
        for line in plain(shown, self.width - INDENT) if shown else ("",):
            yield Line([(lead, self.ink("muted"))], [(line, self.ink("text"))])
            lead = " " * INDENT


def names_in(text: str, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(start, end) of each name in the text. Of names that begin at one place, the longest."""
    shown = sorted({safe_text(name) for name in names if name}, key=len, reverse=True)
    if not shown or not text:
        return ()
    return tuple(found.span() for found in re.finditer("|".join(map(re.escape, shown)), text))


def _tokens(number: int) -> str:
    return f"{count(number)} token{'s' * (number != 1)}"


def plain(text: str, width: int) -> Iterator[str]:
    """Lines of a text that belongs to no tokens."""
    for start, end in wrap(text, max(1, width)):
        yield text[start:end]
