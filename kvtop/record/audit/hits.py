"""Law of audited hits: one of N look-ups that read from the cache is computed again, and a bad block has consequences.

Owns which hits are due (the knob `audit` says how many), what of them can still be compared, and what must follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import events as ev
from kvtop.record.audit.books import Books, Life, need
from kvtop.record.audit.law import Law, takes


@dataclass(slots=True)
class _Due:
    """A hit of the step under way: its request, and the blocks and hashes that it read."""

    life: Life
    seq_id: int
    hashes: list[str]


class HitLaw(Law):
    """HitAudited comes with the step that follows the hit, of all that is still in the hash table."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._every = books.knobs.audit
        self._hits = 0
        self._due: list[_Due] = []
        self._read: dict[int, list[int]] = {}
        """Sequence -> blocks that it read at its admission."""
        self._owed: set[int] = set()
        """Bad blocks that are still findable."""
        self._owed_errors: set[int] = set()
        """Requests that read bad blocks and have not failed."""

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
        """Of a hit that is due, all that is still there; bad is what is over the tolerance."""
        place = next((i for i, d in enumerate(self._due) if d.life.queued.request_id == e.request_id), None)
        need(place is not None or not self._every, f"no hit of request {e.request_id} is due for an audit")
        if place is not None:
            left = self._left(self._due.pop(place))
            need(e.blocks == left, f"blocks {e.blocks[:3]} were compared, of the hit {left[:3]} are there")
        need(set(e.bad) <= set(e.blocks), "a block is bad that was not compared")
        over = e.error is None or e.error > e.tolerance
        need(over == bool(e.bad), f"error {e.error}, tolerance {e.tolerance}, {len(e.bad)} blocks bad")
        self._owed.update(e.bad)
        if e.bad:
            self._owed_errors.add(e.request_id)

    @takes(ev.BlocksEvicted)
    def evicted(self, e: ev.BlocksEvicted) -> None:
        """A bad block is no longer findable."""
        if e.why == "invalid":
            self._owed.difference_update(e.ids)

    @takes(ev.EngineError)
    def failed(self, e: ev.EngineError) -> None:
        """An audit that could not run says so, one that found something does, too."""
        self._due = [d for d in self._due if d.life.queued.request_id != e.request_id]
        self._owed_errors.discard(-1 if e.request_id is None else e.request_id)

    @takes(ev.StepCompleted)
    def completed(self, e: ev.StepCompleted) -> None:
        """The step that wrote what was hit is over: so are its audits."""
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
