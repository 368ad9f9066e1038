"""Flight: one step, from its planning to its commit, as a single value.

Owns everything about a step that is not committed: the plan for the runner, the rows that still count, and what was
copied, published and touched for it. EngineCore has the only `Flights` and passes it to scheduler and paging, so what a
sequence has in flight is stored only once. Invariant: a row counts exactly as long as its sequence is in `live`.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.events import StepScheduled
from engine.step.runner import NewSequence, Plan, Row

if TYPE_CHECKING:
    from engine.step.sequence import Request, Sequence


class Publication(NamedTuple):
    """Blocks that a sequence published ahead of its forward, and its request's counts before that."""

    ids: list[int]
    high_before: int
    tokens_before: int


@dataclass(slots=True, eq=False)
class Flight:
    """One step that is planned and not yet committed."""

    plan: Plan
    budget: int
    """Tokens that the step may compute."""
    left: int
    """Tokens of the budget that no row has taken."""
    seqs: list[Sequence] = field(default_factory=list)
    """The sequence of each row of the plan."""
    live: dict[Sequence, Row] = field(default_factory=dict)
    """Rows that count, in the plan's order. A row leaves when its sequence is preempted or ends."""
    copies: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(writer, source, copy) in the order in which they must run."""
    published: dict[Sequence, Publication] = field(default_factory=dict)
    """What must be unpublished if the writer's row does not run."""
    touched: dict[Sequence, list[int]] = field(default_factory=dict)
    """Cached blocks that each sequence took for this step; some may be written only by this step."""
    hits: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    """What the admissions of this step read from the cache."""
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    """Requests that could not be planned, and why."""
    announced: list[Row] | None = None
    """The rows of its StepScheduled; None before that event."""
    ticket: Any = None
    """What the runner returned for it."""
    error: Exception | None = None
    """Why it could not be launched."""
    t_schedule: float = 0.0
    """Seconds that planning took."""

    def drop(self, seq: Sequence) -> None:
        """The row of this sequence, if there is one, does not count any more."""
        row = self.live.pop(seq, None)
        if row is not None:
            self.left += row.n

    def seal(self, retired: list[int]) -> None:
        """Planning is over: the plan gets the rows and copies that are left."""
        self.seqs = list(self.live)
        self.plan.rows = list(self.live.values())
        self.plan.copies = [(src, dst) for _, src, dst in self.copies]
        self.plan.retired = retired

    def note_touched(self, seq: Sequence, ids: list[int]) -> None:
        """`seq` took these cached blocks."""
        self.touched.setdefault(seq, []).extend(ids)

    def note_published(self, seq: Sequence, ids: list[int]) -> None:
        """`seq` published these blocks, which this step will write. Call before its request's counts change."""
        request = seq.request
        self.published[seq] = Publication(ids, request.high_published, request.cache_write_tokens)

    def announce(self) -> StepScheduled:
        """The event of the rows that count now."""
        rows = self.announced = list(self.live.values())
        return StepScheduled(
            [r.seq_id for r in rows],
            [r.start for r in rows],
            [r.n for r in rows],
            [r.drafts for r in rows] if any(r.drafts for r in rows) else [],
        )

    def num_tokens(self) -> tuple[int, int, int]:
        """Tokens that were computed: decoded, prefilled, and for rows that were not announced any more."""
        rows, announced = self.plan.rows, self.announced or []
        ids = None if len(announced) == len(rows) else set(map(id, announced))
        decoded = prefilled = overrun = 0
        for seq, row in zip(self.seqs, rows, strict=True):
            if ids is not None and id(row) not in ids:
                overrun += row.n
            elif row.start >= seq.num_known:
                decoded += row.n
            else:
                prefilled += row.n
        return decoded, prefilled, overrun


class Flights(deque[Flight]):
    """The steps in flight, oldest first. While a step is being planned it is the last of them."""

    __slots__ = ()

    def newest(self, seq: Sequence) -> Row | None:
        """The last row that counts of this sequence."""
        for flight in reversed(self):
            row = flight.live.get(seq)
            if row is not None:
                return row
        return None

    def num_scheduled(self, seq: Sequence) -> int:
        """Tokens that are computed or in flight: where the next row starts."""
        row = self.newest(seq)
        return seq.num_computed if row is None else row.start + row.n

    def num_tokens(self, seq: Sequence) -> int:
        """Tokens, including those that steps in flight will sample."""
        rows = (flight.live.get(seq) for flight in self)
        return len(seq.tokens) + sum(1 for row in rows if row is not None and row.draws)

    def drop(self, seq: Sequence) -> None:
        """None of its rows counts any more, and its copies need not run."""
        for flight in self:
            flight.drop(seq)
            if flight.copies:
                flight.copies = [copy for copy in flight.copies if copy[0] is not seq]

    def cancel(self) -> None:
        """The step that was being planned has no rows. What it touched stays touched, and may be what an earlier
        step has yet to write."""
        dropped = self.pop()
        if self:
            for seq, ids in dropped.touched.items():
                self[-1].note_touched(seq, ids)


def row_of(
    seq: Sequence,
    start: int,
    n: int,
    draws: tuple[int, ...] = (),
    drafts: tuple[int, ...] = (),
    top: int = 0,
) -> Row:
    """The row that computes tokens [start, start + n) of `seq`, as data. What it says of the table is not said
    again: it must reach the runner, or the table must be released."""
    tokens = seq.tokens[start : start + n - len(drafts)]
    if drafts:
        tokens.extend(drafts)
    table, sent = seq.table, seq.table_sent
    seq.table_sent = len(table)
    if sent < 0:
        return Row(seq.seq_id, start, n, tokens, draws, len(drafts), top, 0, table[:], _new(seq))
    rest = table[sent:] if sent < len(table) else ()
    return Row(seq.seq_id, start, n, tokens, draws, len(drafts), top, sent, rest)


def _new(seq: Sequence) -> NewSequence:
    request = seq.request
    return NewSequence(
        request.params,
        seq.branch,
        request.prompt_tokens,
        request.eos_token_ids,
        seq.tokens[:] if request.params.shapes_logits else array("i"),
    )
