"""Branches: the sequences that are alive, and what the branches of one request share.

Owns which request each sequence belongs to, how far each one is computed, and for every request with several branches
how many blocks they hold. Invariant: an event costs what it names, however long the branches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtop.state.part import Copied

if TYPE_CHECKING:
    from engine.events import PoolSnapshot
    from kvtop.state.request_view import RequestView

NO_PLACE = -1
"""The place of a beam that was dropped."""


@dataclass(slots=True, eq=False)
class SequenceView(Copied):
    """One branch that is alive. The pool has its block table, the request has what it wrote."""

    seq_id: int
    request_id: int | None = None
    """None until RequestAdmitted names it."""
    num_computed: int = 0
    """Tokens whose KV is written."""
    num_output: int = 0
    """Tokens that it sampled, those before it was forked included."""
    branch: int = 0
    """Its place among the branches of the request. The answer is the text of the first one."""
    pruned: bool = False
    """A beam that was dropped."""
    t_last: float | None = None
    evicted_ids: list[int] = field(default_factory=list)
    """Blocks whose content was evicted for this sequence before its request was known."""

    def follow(self, parent: SequenceView) -> None:
        """Begin where the parent is."""
        self.num_computed, self.num_output, self.t_last = (
            parent.num_computed,
            parent.num_output,
            parent.t_last,
        )


class Held(Copied):
    """The blocks in the tables of one request's branches."""

    __slots__ = ("_tables", "unshared")

    def __init__(self) -> None:
        self._tables: dict[int, int] = {}
        """Block -> how many of the tables contain it."""
        self.unshared = 0
        """Blocks that the branches would need without sharing: the lengths of their tables added up."""

    @property
    def blocks(self) -> int:
        """Blocks, each counted once."""
        return len(self._tables)

    def add(self, ids: Iterable[int]) -> None:
        """A table has got these blocks."""
        tables = self._tables
        for b in ids:
            tables[b] = tables.get(b, 0) + 1
            self.unshared += 1

    def remove(self, ids: Iterable[int]) -> None:
        """A table has lost these blocks."""
        tables = self._tables
        for b in ids:
            left = tables.pop(b, 0) - 1
            if left > 0:
                tables[b] = left
            self.unshared -= 1


class Branches(Copied):
    """See the module."""

    __slots__ = ("_held", "_moved", "alive", "request_of")

    def __init__(self) -> None:
        self.alive: dict[int, SequenceView] = {}
        """By sequence id."""
        self.request_of: dict[int, int] = {}
        """Sequence id -> request id, also after the sequence has ended."""
        self._held: dict[int, Held] = {}
        """By request id, only for requests with several branches."""
        self._moved: set[int] = set()
        """Requests of several branches whose tables have changed since `count_moved`."""

    def at(self, seq_id: int, rows: Mapping[int, RequestView]) -> SequenceView:
        """The sequence with this id. Makes one if an event names it for the first time."""
        sequence = self.alive.get(seq_id)
        if sequence is None:
            sequence = self.alive[seq_id] = SequenceView(seq_id, self.request_of.get(seq_id))
            view = None if sequence.request_id is None else rows.get(sequence.request_id)
            if view is not None:
                sequence.branch = view.seq_ids.index(seq_id) if seq_id in view.seq_ids else NO_PLACE
        return sequence

    def bind(self, sequence: SequenceView, view: RequestView, table: list[int]) -> None:
        """This sequence, whose block table is given, is a branch of that request."""
        known = sequence.seq_id in view.seq_ids
        sequence.branch = view.add_branch(sequence.seq_id)
        if not known and view.request_id in self._held:
            self._held[view.request_id].add(table)

    def share(self, view: RequestView, tables: Iterable[list[int]]) -> None:
        """Count the blocks of this request from now on; its branches have these tables."""
        held = self._held[view.request_id] = Held()
        for table in tables:
            held.add(table)

    def shares(self, request_id: int) -> bool:
        """The blocks of this request are counted."""
        return request_id in self._held

    def prune(self, sequence: SequenceView, view: RequestView) -> bool:
        """A beam is dropped. Returns whether it was the first one, which was shown as the answer."""
        sequence.pruned = True
        if sequence.seq_id not in view.seq_ids:
            return False
        was_first = view.seq_ids[0] == sequence.seq_id
        view.drop_branch(sequence.seq_id)
        for place, i in enumerate(view.seq_ids):
            if i in self.alive:
                self.alive[i].branch = place
        sequence.branch = NO_PLACE
        return was_first

    def end(self, seq_id: int) -> None:
        """Its table is empty, and it gets no more blocks."""
        self.alive.pop(seq_id, None)

    def forget(self, view: RequestView) -> None:
        """No reader can ask for this request any more."""
        for i in (*view.seq_ids, *view.dropped_ids):
            self.request_of.pop(i, None)

    # ------------------------------------------------------------------------------------- blocks

    def gain(self, request_id: int | None, ids: Iterable[int]) -> None:
        """A table of this request has got blocks."""
        held = None if request_id is None else self._held.get(request_id)
        if held is not None and request_id is not None:
            held.add(ids)
            self._moved.add(request_id)

    def lose(self, request_id: int | None, ids: Iterable[int]) -> None:
        """A table of this request has lost blocks."""
        held = None if request_id is None else self._held.get(request_id)
        if held is not None:
            held.remove(ids)

    def count_moved(self, rows: Mapping[int, RequestView]) -> None:
        """Note how much the branches share, for the requests whose tables have changed."""
        for i in self._moved:
            view, held = rows.get(i), self._held.get(i)
            if view is not None and held is not None and len(view.seq_ids) > 1:
                view.held_peak = max(view.held_peak, held.blocks)
                view.unshared_peak = max(view.unshared_peak, held.unshared)
        self._moved.clear()

    def stop_counting(self, request_id: int) -> None:
        """The request has ended."""
        self._held.pop(request_id, None)
        self._moved.discard(request_id)

    # ----------------------------------------------------------------------------------- snapshot

    def differences(self, e: PoolSnapshot) -> list[str]:
        """Where a snapshot contradicts the computed tokens that are known here, one line each."""
        known = {i: self.alive[i].num_computed if i in self.alive else 0 for i in e.seq_ids}
        return [
            f"computed tokens of sequence {i}: replayed {known[i]}, the pool says {computed}"
            for i, computed in zip(e.seq_ids, e.computed, strict=True)
            if known[i] != computed
        ]

    def load(self, e: PoolSnapshot, rows: Mapping[int, RequestView]) -> None:
        """Take over a snapshot after events were lost."""
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            self.at(i, rows).num_computed = computed
        alive = set(e.seq_ids)
        self.alive = {i: s for i, s in self.alive.items() if i in alive}
        tables = dict(zip(e.seq_ids, e.tables, strict=True))
        for request_id in list(self._held):
            view = rows.get(request_id)
            if view is not None:
                self.share(view, [tables.get(i, []) for i in view.seq_ids])
