"""Chat: what was asked, what it cost, and the answer as it streams.

Owns the scroll position and which attached pages are unfolded. Every line of prompt or answer knows its
tokens, so pointing at it finds its blocks and the other way round. Invariant: only requests in view are
laid out, and a finished one is laid out once a width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.selection import Selection

from kvtop.text import cut, safe_text
from kvtop.units import count
from kvtop.widgets.base.lines import Lines, Part, Row
from kvtop.widgets.chat import lookup
from kvtop.widgets.chat.answer import INDENT, Line
from kvtop.widgets.chat.layout import Layouter, Sheet, plain

if TYPE_CHECKING:
    from kvtop.play.composer import SentPrompt
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import RequestView

_CACHE = 256
"""Requests whose layout is kept."""
_MOST_SENT = 400
"""Characters of a prompt that has not arrived."""


class Chat(Lines):
    """Focus it to scroll with the arrow and page keys; end follows again."""

    can_focus = True
    MOVES = True
    ALLOW_SELECT = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_lines(1)", "Scroll", show=False),
        Binding("down,j", "scroll_lines(-1)", "", show=False),
        Binding("pageup", "scroll_lines(10)", "", show=False),
        Binding("pagedown", "scroll_lines(-10)", "", show=False),
        Binding("home", "scroll_lines(1000000)", "Oldest", show=False),
        Binding("end", "scroll_lines(-1000000)", "Newest, and follow", show=False),
    ]

    @dataclass
    class Pointed(Message):
        """Logical blocks of a request under the mouse (none: it left); clicked: they were selected."""

        request_id: int
        indices: range
        clicked: bool

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.back = 0
        """Lines between the end and the bottom row; 0 follows the stream."""
        self.unfolded: set[int] = set()
        self.link: frozenset[int] = frozenset()
        self.title = "chat"
        self.topic: str | None = None
        """What the prompt is about, for the title; None: what the latest request was about."""
        self.sent: Sequence[SentPrompt] = ()
        """Prompts that have not arrived at the engine."""
        self.invites: Sequence[str] = ()
        """What to do while nothing was asked."""
        self.progress = ""
        """How far the recording is with loading; shown while there is no request to show."""
        self._layouts: dict[int, tuple[tuple[object, object], list[Line], Sheet]] = {}
        """By request: (its figures, its text), the lines that show them, and what they are made from."""
        self._ids: Sequence[int] = ()
        """Requests of the last round, and those of them that had not arrived."""
        self._waiting_ids: dict[int, SentPrompt] = {}
        self._between = False
        self._view: list[tuple[int, Line]] = []
        self._block_size = 16

    @property
    def is_empty(self) -> bool:
        """It shows no request."""
        return not self._view

    def set_link(self, ids: Iterable[int]) -> None:
        """Light up the text of these physical blocks."""
        self.link = frozenset(ids)

    def forget(self) -> None:
        """Theme or size changed."""
        super().forget()
        self._layouts.clear()

    # ------------------------------------------------------------------------------- painting

    def paint(self, state: DashboardState, now: float) -> None:
        """The newest requests at the bottom."""
        width, height = self.size
        if width < 1 or height < 1:
            return
        self._block_size = state.started.block_size if state.started is not None else 16
        sent = {h.request_id: h for h in self.sent if h.request_id not in state.requests}
        # In the order of asking: a turn that had to wait for its conversation arrives after later ones.
        self._ids, self._waiting_ids = sorted((*state.requests, *sent), reverse=True), sent
        if self.progress and self.is_empty:
            self.set_rows(self._in_the_middle([self.progress], width, height))
            return
        if not state.requests and (state.started is None or not sent):
            self._view, self.back = [], 0
            self.title = self._title(state)
            self.set_rows(self._welcome(state, width, height))
            return
        self._paint_requests(state, width, height)

    def paint_between(self, state: DashboardState, now: float) -> None:
        """The answers that grow."""
        width, height = self.size
        if (
            self._view
            and width
            and height
            and all(i in state.requests or i in self._waiting_ids for i in self._ids)
        ):
            self._between = True
            try:
                self._paint_requests(state, width, height)
            finally:
                self._between = False

    def _paint_requests(self, state: DashboardState, width: int, height: int) -> None:
        shown: list[tuple[int, Line]] = []
        want, sent = height + self.back, self._waiting_ids
        for rid in self._ids:
            lines = (
                self._waiting(sent[rid], width)
                if rid in sent
                else self._lines(state, state.requests[rid], width)
            )
            shown[:0] = [(rid, line) for line in lines[len(shown) - want :]]  # the last that are missing
            if len(shown) >= want:
                break
        else:
            self.back = min(self.back, max(0, len(shown) - height))
        self.title = self._title(state)
        stop = len(shown) - self.back
        self._view = shown[max(0, stop - height) : stop]
        if len(self._layouts) > _CACHE:
            keep = {rid for rid, _ in self._view}
            self._layouts = {r: v for r, v in self._layouts.items() if r in keep}
        tables: dict[int, list[int]] = {}
        rows = []
        for rid, line in self._view:
            if self.link and rid not in tables and rid in state.requests:
                tables[rid] = lookup.table_of(state, state.requests[rid])
            rows.append(self._row(line, tables.get(rid, [])))
        self.set_rows(rows, scrolls=True)

    def _title(self, state: DashboardState) -> str:
        topic = self.topic
        if topic is None and state.requests:
            spans = state.requests[next(reversed(state.requests))].spans
            topic = next((f"{safe_text(name)} attached" for _, _, _, name in spans if name), "")
        back = f"{count(self.back)} lines back" if self.back else ""
        return " · ".join(word for word in ("chat", topic, back) if word)

    def _waiting(self, sent: SentPrompt, width: int) -> list[Line]:
        """A prompt that has not arrived."""
        muted, bold = self.ink("muted"), self.ink("text") + Style(bold=True)
        head = f"#{sent.request_id} "
        indent = max(INDENT, len(head))
        question = list(plain(safe_text(sent.text[:_MOST_SENT], newlines=True), width - indent))
        lines = [
            Line([(head if n == 0 else " " * indent, muted)], [(t, bold)]) for n, t in enumerate(question)
        ]
        why = "waiting" if sent.after is None else f"waiting for the turn before, #{sent.after}"
        return [*lines, Line([(" " * INDENT, muted)], [(cut(why, max(1, width - INDENT)), muted)])]

    def _welcome(self, state: DashboardState, width: int, height: int) -> list[list[Part]]:
        if state.started is None:
            return self._loading(state, width, height)
        texts = ["Nothing was asked yet.", *([""] if self.invites else []), *self.invites]
        if self.invites and "blocks" in state.started.capabilities:
            usable, tokens, size_ = state.num_blocks - 1, state.block_size, state.started.bytes_per_block
            texts += ["", f"{count(usable)} blocks × {tokens} tokens = {count(usable * tokens)} tokens"]
            if size_:
                texts.append(f"a block {count(size_)} B, a token {count(size_ / tokens)} B")
        return self._in_the_middle(texts, width, height)

    def _in_the_middle(self, texts: Sequence[str], width: int, height: int) -> list[list[Part]]:
        top = max(0, (height - len(texts)) // 2)
        muted = self.ink("muted")
        lines = [[(cut(t, width).center(width), muted)] for t in texts]
        return [[("", muted)]] * top + lines

    def _loading(self, state: DashboardState, width: int, height: int) -> list[list[Part]]:
        """Real progress of the start, or what went wrong."""
        muted, step = self.ink("muted"), state.engine.loading
        rows: list[list[Part]] = [[("", muted)]] * max(0, (height - 3) // 2)
        if state.engine.errors:
            for text in plain(safe_text(state.engine.errors[-1].message), width - 4):
                rows.append([("  ", muted), (text, self.ink("error"))])
            return rows
        what = "Starting the engine" if step is None else safe_text(step.what)
        if self.sent:
            what += f" · {count(len(self.sent))} prompt{'s' * (len(self.sent) != 1)} waiting"
        rows.append([(cut(what, width).center(width), self.ink("text"))])
        if step is not None and step.total > 0:
            bar = max(4, min(40, width - 12))
            done = min(1.0, step.done / step.total)
            full, part = divmod(int(done * bar * 8), 8)
            blocks = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
            left = " " * max(0, (width - bar - 6) // 2)
            rows.append(
                [
                    (left, muted),
                    (blocks, self.ink("active")),
                    ("·" * (bar - len(blocks)), self.ink("free")),
                    (f" {done * 100:3.0f} %", muted),
                ]
            )
        return rows

    def _lines(self, state: DashboardState, view: RequestView, width: int) -> list[Line]:
        rid = view.request_id
        text = (
            len(view.output_ids),
            len(view.text),
            sum(map(len, view.branch_texts())) if view.width > 1 else 0,
        )
        figures = (
            width,
            view.phase,
            view.unshared_peak,
            view.num_computed if view.t_first is None else None,
            view.cached_tokens,
            view.t_first,
            view.blocked,
            view.looked_up,
            rid in self.unfolded,
        )
        known = self._layouts.get(rid)
        if known is None or not known[2].is_of(view):
            sheet = Sheet(view.prompt_token_ids)
        elif known[0] == (figures, text) or (self._between and known[0][0] != figures):
            return known[1]
        else:
            sheet = known[2]
        lines = list(Layouter(state, width, self.ink, rid in self.unfolded, sheet).lines(view))
        self._layouts[rid] = ((figures, text), lines, sheet)
        return lines

    def _row(self, line: Line, table: list[int]) -> Row:
        if self.link:
            return self._painted(line, table)
        if line.row is None:
            line.row = self._painted(line, table)
        return line.row

    def _painted(self, line: Line, table: list[int]) -> Row:
        row = list(line.lead)
        if line.passage is not None:
            row += self._text(line, table)
        if line.fold and line.passage is not None:
            used = sum(cell_len(t) for t, _ in row) + sum(cell_len(t) for t, _ in line.parts)
            row.append((" " * max(0, self.size.width - used), line.style))
        return (*row, *line.parts)

    def _text(self, line: Line, table: list[int]) -> list[Part]:
        """The slice of the passage. Linked tokens and names of special tokens are marked."""
        passage = line.passage
        assert passage is not None
        text = passage.text[line.start : line.end].replace("\n", " ")
        names = [(a, b) for a, b in passage.names if a < line.end and b > line.start]
        linked = bool(self.link and table)
        if not text or not (linked or names):
            return [(text, line.style)]
        lit, name = line.style + self.palette.on("select"), line.style + self.ink("warning")

        def style(char: int) -> Style:
            index = passage.token(char) // self._block_size
            if linked and index < len(table) and table[index] in self.link:
                return lit
            return name if any(a <= char < b for a, b in names) else line.style

        chars = zip(text, map(style, range(line.start, line.end)), strict=True)
        runs = groupby(chars, key=lambda pair: id(pair[1]))
        return [("".join(c for c, _ in run), run[0][1]) for run in (list(group) for _, group in runs)]

    # ------------------------------------------------------------------- pointing and scrolling

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text itself: without numbers, gutter and indent, and with line breaks only where it has some."""
        parts: list[str] = []
        before: Line | None = None
        for y, (_, line) in enumerate(self._view):
            span = selection.get_span(y)
            if span is None:
                continue
            first, last = span
            text = "".join(part for part, _ in (self._text(line, []) if line.passage else line.parts))
            lead = sum(len(part) for part, _ in line.lead)
            chosen = text[max(0, first - lead) : len(text) if last == -1 else max(0, last - lead)]
            if before is not None:
                same = line.passage is not None and line.passage is before.passage
                parts.append(line.passage.text[before.end : line.start] if same and line.passage else "\n")
            parts.append(chosen)
            before = line
        copied = "".join(parts)
        return (copied, "\n") if copied.strip() else None

    def _under(self, x: int, y: int) -> tuple[int, range] | None:
        if not 0 <= y < len(self._view):
            return None
        rid, line = self._view[y]
        if line.passage is None:
            return rid, range(0)
        cells = x - sum(cell_len(t) for t, _ in line.lead)
        char = line.start
        while char < line.end and cells > 0:
            cells -= cell_len(line.passage.text[char])
            char += 1
        if cells > 0 or x < 1:
            return rid, range(0)
        index = line.passage.token(min(char, line.end)) // self._block_size
        return rid, range(index, index + 1)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Point at the blocks of the text under the mouse."""
        if (under := self._under(event.x, event.y)) is not None:
            self.post_message(self.Pointed(*under, clicked=False))

    def on_leave(self, _event: events.Leave) -> None:
        """Point at nothing."""
        if self._view:
            self.post_message(self.Pointed(self._view[-1][0], range(0), clicked=False))

    def on_click(self, event: events.Click) -> None:
        """Unfold the page, or select the block of this text."""
        if (under := self._under(event.x, event.y)) is None:
            return
        rid, line = self._view[event.y]
        chip = self.size.width - sum(cell_len(t) for t, _ in line.parts)
        if line.fold and (line.passage is None or event.x >= chip):
            self.fold(rid)
        else:
            self.post_message(self.Pointed(*under, clicked=True))

    def fold(self, request_id: int) -> None:
        """Fold or unfold the page (or the long prompt) of a request."""
        self.unfolded ^= {request_id}
        self.wake()

    def fold_latest(self) -> bool:
        """Of the lowest request in view that has something to fold. False if none has."""
        for rid, line in reversed(self._view):
            if line.fold:
                self.fold(rid)
                return True
        return False

    def action_scroll_lines(self, lines: int) -> None:
        """Up by `lines` (towards older text)."""
        self.back = max(0, self.back + lines)
        self.wake()

    def on_mouse_scroll_up(self) -> None:
        """One notch of the wheel."""
        self.action_scroll_lines(3)

    def on_mouse_scroll_down(self) -> None:
        """One notch of the wheel."""
        self.action_scroll_lines(-3)
