"""Queues: the requests that run, wait or were preempted, then the latest finished ones.

Invariants: a prefill bar is full only when every prompt token has its KV. A finished request keeps its last figures.
The row of the first waiting request says why it waits, with numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtop.text import safe_text
from kvtop.units import NONE, count, duration, percent
from kvtop.widgets.base.counts import queue_counts
from kvtop.widgets.base.lines import Part, Row
from kvtop.widgets.base.panel import Scrolling
from kvtop.widgets.base.table import Cell, Column, fit, progress, table

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState
    from kvtop.state.request_view import RequestView

_COLUMNS = (
    Column("id", 5, right=True, keep=9),
    Column("state", 9, keep=8),
    Column("prefill", 11, grow=3, keep=7),
    Column("out", 5, right=True, keep=5),
    Column("blocks", 6, right=True, keep=4),
    Column("cached", 6, right=True, keep=6),
    Column("TTFT", 7, right=True, keep=3),
    Column("", 14, grow=4, keep=2),
)
_ORDER = {"running": 0, "preempted": 1, "queued": 2, "finished": 3}
_PREFILL = 2
"""Index of the column whose figures are shortened to its width."""
_BAR = 6
_STATES = {"running": "decode", "queued": "waiting"}


class QueuesPanel(Scrolling):
    """One row for each request."""

    TITLE = "queues"
    FIGURES = (
        (
            "state",
            "prefill, decode: running. waiting: not admitted. preempted: gave its blocks up, starts over.",
        ),
        ("waiting", "Requests that hold no blocks yet, and turns that wait for the answer before them."),
        ("prefill", "Prompt tokens whose KV exists, of all; +n is the chunk that the last step computed."),
        ("out", "Tokens generated so far."),
        ("blocks", "Blocks in its block table."),
        ("cached", "Share of its prompt tokens read from the prefix cache at the first admission."),
        ("TTFT", "From arrival to the first token, ms."),
        (
            "right column",
            "Why the head of the queue waits (blocks needed, blocks free), how a request ended, or how often it "
            "was preempted, and the part of its lost tokens that the cache gave back.",
        ),
    )

    _held = 0

    @property
    def held(self) -> int:
        """Prompts that were sent and have not arrived at the engine: a turn waits for the one before it."""
        return self._held

    @held.setter
    def held(self, count: int) -> None:
        if count != self._held:
            self._held = count
            self.changed()

    def rows(self, state: DashboardState, now: float, width: int, height: int) -> list[Row]:
        """One line of counts, then the table."""
        views = list(_in_order(state.requests.values()))
        running, waiting, preempted = queue_counts(state, self.held)
        finished = sum(view.phase == "finished" for view in views)
        head = self.figures(
            width,
            ("", f"{running} running", self.ink("active")),
            ("", f"{waiting} waiting", self.ink("text")),
            ("", f"{preempted} preempted", self.ink("evicted" if preempted else "muted")),
            ("", f"{finished} finished", self.ink("muted")),
        )
        if not views:
            return [head, self.say("no request yet")]
        shown = self.window(len(views), max(0, height - 2))
        room = fit(_COLUMNS, width)[_PREFILL]
        cells = [self._row(state, views[i], now, room) for i in shown]
        return [head, *table(_COLUMNS, cells, width, self.ink("muted"))]

    def _row(self, state: DashboardState, view: RequestView, now: float, room: int) -> list[Cell]:
        muted, text = self.ink("muted"), self.ink("text")
        live = view.phase in ("running", "preempted")
        plain = text if live else muted
        name, look = self._state(view)
        ids = state.table(view.request_id) if view.phase == "running" else []
        cached = percent(view.cached_tokens, view.prompt_tokens) if view.looked_up else NONE
        return [
            (f"#{view.request_id}", self.ink("active") if live else muted),
            (name, look),
            self._prefill(view, room),
            (count(view.num_output) if view.num_output else NONE, plain),
            (count(len(ids)) if ids else NONE, plain),
            (cached, self.ink("hit") if view.cached_tokens else plain),
            (duration(view.ttft), self.ink("hit" if view.cached_tokens else "ttft") if view.ttft else muted),
            self._why(view, now),
        ]

    def _state(self, view: RequestView) -> Part:
        if view.phase == "running":
            prefilling = view.num_computed < view.prompt_tokens
            return ("prefill", self.ink("prefill")) if prefilling else ("decode", self.ink("decode"))
        looks = {"preempted": "evicted", "queued": "text"}
        return _STATES.get(view.phase, view.phase), self.ink(looks.get(view.phase, "muted"))

    def _prefill(self, view: RequestView, room: int) -> tuple[Part, ...]:
        muted = self.ink("muted")
        done, total = min(view.num_computed, view.prompt_tokens), view.prompt_tokens
        if view.phase == "finished":
            return ((_tokens(total, room), muted),)
        if done >= total:
            return ((_tokens(total, room), self.ink("text")),)
        full = progress(done / total if total else 0, _BAR)
        # Tokens from the cache were not computed by this request: they have another glyph in the bar.
        read = int(_BAR * view.cached_tokens / total) if view.phase == "running" else 0
        chunk = f" +{count(view.chunk[1])}" if view.chunk and view.phase == "running" else ""
        figures = f"{done:,}/{total:,}{chunk}"
        if _BAR + 1 + len(figures) > room:
            figures = percent(done, total)
        return (
            ("◆" * read, self.ink("hit")),
            (full[read:] + " ", self.ink("prefill")),
            (figures, self.ink("text")),
        )

    def _why(self, view: RequestView, now: float) -> Part:
        muted = self.ink("muted")
        if view.blocked is not None and view.phase in ("queued", "preempted"):
            blocked = view.blocked
            return (
                f"{safe_text(blocked.reason)}: needs {count(blocked.need)}, {count(blocked.free)} free",
                self.ink("warning"),
            )
        if view.phase == "finished":
            if view.error:
                return safe_text(view.error), self.ink("error")
            return view.finish_reason or "", muted
        if view.phase == "queued":
            return f"waits {duration(max(0.0, now - view.t_arrival))}", muted
        if view.preemptions:
            back = f", {percent(view.tokens_back, view.tokens_lost)} back" if view.resumed else ""
            return f"preempted {view.preemptions}×{back}", self.ink("evicted")
        return "", muted


def _tokens(number: int, room: int) -> str:
    text = f"{count(number)} tokens"
    return text if len(text) <= room else count(number)


def _in_order(views: Iterable[RequestView]) -> Iterable[RequestView]:
    """Running, preempted, waiting by number; finished ones last, the latest first."""
    return sorted(
        views, key=lambda v: (_ORDER[v.phase], -v.request_id if v.phase == "finished" else v.request_id)
    )
