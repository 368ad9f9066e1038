"""Law of audited hits: one of N cache hits is computed again, and a bad block has consequences.

Owns which hits are due (one of `audit` hits, a knob), which of their blocks can still be compared, and what must
follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import events as ev
from kvtop.record.audit.books import Books, Life, need
from kvtop.record.audit.law import Law, takes


@dataclass(slots=True)
class _Due:
    """A hit of the current step that must be audited: its request, and the hashes that it read."""

    life: Life
    seq_id: int
    hashes: list[str]


class HitLaw(Law):
    """A HitAudited comes with the step that follows the hit. It compares the blocks that are still in the hash
    table."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._every = books.knobs.audit
        self._hits = 0
        self._due: list[_Due] = []
        self._read: dict[int, list[int]] = {}
        """Sequence -> blocks that it hit at its admission."""
        self._owed: set[int] = set()
        """Bad blocks that are not evicted yet."""
        self._owed_errors: set[int] = set()
        """Requests that read bad blocks and have not failed yet."""

    @takes(ev.RequestAdmitted)
    def admitted(self, e: ev.RequestAdmitted) -> None:
        """Each admission that reads from the cache counts."""
        if not e.cached_tokens:
            return
        self._hits += 1
        if self._every and self._hits % self._every == 0:
            life = self.books.life(e.request_id)
            hashes = life.lookup.hashes[: e.cached_tokens // self.books.size] if life.lookup else []
            self._due.append(_Due(life, e.seq_id, hashes))

    @takes(ev.BlocksTouched)
    def touched(self, e: ev.BlocksTouched) -> None:
        """The blocks of the hit."""
        if e.why == "hit" and any(d.seq_id == e.seq_id for d in self._due):
            self._read.setdefault(e.seq_id, e.ids)

    @takes(ev.HitAudited)
    def audited(self, e: ev.HitAudited) -> None:
        """All blocks of a due hit that are still cached are compared. A block over the tolerance is bad."""
        place = next((i for i, d in enumerate(self._due) if d.life.queued.request_id == e.request_id), None)
        need(place is not None or not self._every, f"no hit of request {e.request_id} is due for an audit")
        if place is not None:
            left = self._left(self._due.pop(place))
            need(
                e.blocks == left, f"blocks {e.blocks[:3]} were compared, but {left[:3]} of the hit are cached"
            )
        need(set(e.bad) <= set(e.blocks), "a block that was not compared is bad")
        over = e.error is None or e.error > e.tolerance
        need(over == bool(e.bad), f"error {e.error}, tolerance {e.tolerance}, {len(e.bad)} blocks bad")
        self._owed.update(e.bad)
        if e.bad:
            self._owed_errors.add(e.request_id)

    @takes(ev.BlocksEvicted)
    def evicted(self, e: ev.BlocksEvicted) -> None:
        """A bad block leaves the hash table."""
        if e.why == "invalid":
            self._owed.difference_update(e.ids)

    @takes(ev.EngineError)
    def failed(self, e: ev.EngineError) -> None:
        """There is an EngineError for an audit that could not run, and for one that found bad blocks."""
        self._due = [d for d in self._due if d.life.queued.request_id != e.request_id]
        self._owed_errors.discard(-1 if e.request_id is None else e.request_id)

    @takes(ev.StepCompleted)
    def completed(self, e: ev.StepCompleted) -> None:
        """The step that wrote the hit blocks is over, so its audits are over too."""
        due, self._due = self._due, []
        owed, self._owed = self._owed, set()
        errors, self._owed_errors = self._owed_errors, set()
        missing = next((d.life.queued.request_id for d in due if self._left(d)), None)
        self._read.clear()
        need(missing is None, f"HitAudited is missing for request {missing}")
        need(not owed, f"block {min(owed, default=0)} was found bad and is not evicted as invalid")
        need(
            not errors, f"request {min(errors, default=0)} read bad blocks, but there is no EngineError of it"
        )

    def _left(self, due: _Due) -> list[int]:
        carried, num_blocks = self.books.mirror.hash, self.books.mirror.num_blocks
        left: list[int] = []
        for block, h in zip(self._read.get(due.seq_id, []), due.hashes, strict=False):
            if not 0 < block < num_blocks or carried[block] != h:
                break
            left.append(block)
        return left
