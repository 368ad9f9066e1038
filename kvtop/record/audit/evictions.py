"""Law of evictions: why a block lost its hash, and for which sequence.

Owns what must follow a BlocksEvicted (its block is taken next, or its request ends), and which sequence published each
block last.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes


class EvictionLaw(Law):
    """reallocated: the next pool event takes these blocks for `by_seq`. unwritten: `by_seq` published them for a step
    that has not run. invalid: the request of `by_seq` computed something bad, or an audit found the blocks bad."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._taken: ev.BlocksEvicted | None = None
        self._stored_by: dict[int, int] = {}
        """Block -> the sequence that published it last."""
        self._audited: set[int] = set()
        """Blocks that an audit of this batch found bad."""
        self._invalid: list[int] = []
        """Sequences for which something was invalid in this batch."""
        self._ended: set[int] = set()
        """Requests that ended in this batch."""

    @takes(*ev.POOL_EVENTS)
    def pool_event(self, e: ev.Event) -> None:
        """The sequence for which a block was evicted takes it in the next pool event."""
        before, self._taken = self._taken, None
        if before is not None:
            self._need_taken(before, e)
        if type(e) is ev.BlocksStored:
            self._stored_by.update(dict.fromkeys(e.ids, e.seq_id))
        elif type(e) is ev.BlocksEvicted:
            self._evicted(e)

    def _need_taken(self, evicted: ev.BlocksEvicted, e: ev.Event) -> None:
        if type(e) is ev.BlocksAllocated:
            seq_id, ids = e.seq_id, e.ids
        elif type(e) is ev.BlocksCopied:
            seq_id, ids = e.seq_id, [e.dst]
        else:
            seq_id, ids = -1, []
        lost = set(evicted.ids) - set(ids)
        need(not lost, f"block {min(lost, default=0)} was evicted as reallocated, but is not taken next")
        need(
            seq_id == evicted.by_seq, f"evicted for sequence {evicted.by_seq}, but sequence {seq_id} took it"
        )

    def _evicted(self, e: ev.BlocksEvicted) -> None:
        if e.why == "reallocated":
            self._taken = e
            return
        books, ids = self.books, set(e.ids)
        unwritten = books.stored_now | books.stored_next
        if e.why == "unwritten":
            need(ids <= unwritten, "evicted as unwritten, but it was written, or never published")
            owners = {self._stored_by.get(b) for b in ids}
            need(
                owners <= {e.by_seq}, f"evicted as unwritten by sequence {e.by_seq}, but another published it"
            )
        elif e.by_seq is None:
            need(ids <= self._audited, "evicted as invalid for no sequence, but no audit found it bad")
        else:
            request = books.branch(e.by_seq).request
            bad = any(b.bad for b in request.branches)
            need(
                bad or bool(self._audited),
                f"evicted as invalid, but sequence {e.by_seq} computed nothing bad",
            )
            first = next((b for b in request.branches if not b.pruned), None)
            need(first is not None and first.seq_id == e.by_seq, "evicted as invalid for a later branch")
            self._invalid.append(request.queued.request_id)

    @takes(ev.HitAudited)
    def audited(self, e: ev.HitAudited) -> None:
        """Blocks that an audit found bad are evicted as invalid."""
        self._audited.update(e.bad)

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """A request that computed something bad ends. An audit may find it after the last token."""
        self._ended.add(e.request_id)

    def end_batch(self, batch: ev.StepBatch) -> None:
        """Every block that was evicted as reallocated was taken."""
        taken, self._taken = self._taken, None
        lost = set(self._invalid) - self._ended
        self._audited.clear()
        self._invalid.clear()
        self._ended.clear()
        need(taken is None, "evicted as reallocated, but no sequence takes it")
        need(not lost, f"request {min(lost, default=0)} computed something bad and did not end")
