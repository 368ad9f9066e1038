"""A naive reader of the seven pool events, written from the contract alone: lists and O(n) moves.

The law: after every batch it agrees with the pool's own snapshot.
"""

from __future__ import annotations

from engine import events as ev


class Mirror:
    """Ref counts, hashes, tables and queue order as the event stream says."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref = [0] * num_blocks
        self.hash: list[str | None] = [None] * num_blocks
        self.queue = list(range(1, num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.hit: set[tuple[int, int]] = set()
        """(sequence, block) that it has from the cache."""
        self.batches = self.events = 0
        self.t = 0.0

    def apply(self, batch: ev.StepBatch) -> None:
        assert batch.seq == self.batches and batch.first_event == self.events
        assert batch.t >= self.t
        self.batches, self.events, self.t = batch.seq + 1, self.events + len(batch.events), batch.t
        for event in batch.events:
            getattr(self, type(event).__name__, lambda e: None)(event)

    def BlocksAllocated(self, e: ev.BlocksAllocated) -> None:
        assert self.queue[: len(e.ids)] == e.ids
        del self.queue[: len(e.ids)]
        for b in e.ids:
            assert self.hash[b] is None, "taken with its hash still in the table"
            self.ref[b] = 1
        self.tables.setdefault(e.seq_id, []).extend(e.ids)
        self.computed.setdefault(e.seq_id, 0)

    def BlocksTouched(self, e: ev.BlocksTouched) -> None:
        for b in e.ids:
            if self.ref[b] == 0:
                self.queue.remove(b)
            self.ref[b] += 1
        table = self.tables.setdefault(e.seq_id, [])
        table.extend(e.ids)
        # Hit blocks are computed, and so is what a branch shares that comes back from preemption.
        if e.why == "hit" or not self.computed.get(e.seq_id):
            self.computed[e.seq_id] = len(table) * self.block_size
        if e.why == "hit":
            self.hit.update((e.seq_id, b) for b in e.ids)

    def BlocksCopied(self, e: ev.BlocksCopied) -> None:
        assert self.queue.pop(0) == e.dst and self.ref[e.src] > 1 and self.tables[e.seq_id][e.index] == e.src
        self.ref[e.dst] = 1
        self.ref[e.src] -= 1
        self.tables[e.seq_id][e.index] = e.dst

    def BlocksReleased(self, e: ev.BlocksReleased) -> None:
        table = self.tables[e.seq_id]
        assert table[::-1][: len(e.ids)] == e.ids
        del table[len(table) - len(e.ids) :]
        if not table:
            del self.tables[e.seq_id]
            self.computed.pop(e.seq_id, None)
        head, tail = [], []
        for b in e.ids:
            self.hit.discard((e.seq_id, b))
            self.ref[b] -= 1
            if self.ref[b] == 0:
                (tail if self.hash[b] else head).append(b)
        self.queue = head + self.queue + tail

    def BlocksStored(self, e: ev.BlocksStored) -> None:
        assert len(e.token_ids) == len(e.ids) * self.block_size
        table = self.tables[e.seq_id]
        assert table[e.start_index : e.start_index + len(e.ids)] == e.ids
        for b, h in zip(e.ids, e.hashes, strict=True):
            assert self.hash[b] is None
            self.hash[b] = h

    def BlocksEvicted(self, e: ev.BlocksEvicted) -> None:
        for b, h in zip(e.ids, e.hashes, strict=True):
            assert self.hash[b] == h
            self.hash[b] = None

    def CacheCleared(self, e: ev.CacheCleared) -> None:
        self.hash = [None] * len(self.hash)

    def TokensSampled(self, e: ev.TokensSampled) -> None:
        self.computed.update(zip(e.seq_ids, e.num_computed, strict=True))

    def RequestAdmitted(self, e: ev.RequestAdmitted) -> None:
        self.computed[e.seq_id] = e.cached_tokens

    def SequenceForked(self, e: ev.SequenceForked) -> None:
        self.computed[e.child] = self.computed.get(
            e.parent, 0
        )  # where samples part, TokensSampled says it again

    def compare(self, snap: ev.PoolSnapshot) -> None:
        refs = [0] * len(self.ref)
        for first, count, ref in zip(snap.refs[::3], snap.refs[1::3], snap.refs[2::3], strict=True):
            refs[first : first + count] = [ref] * count
        assert self.ref == refs
        assert self.queue == list(ev.from_runs(snap.queue))
        assert {b: h for b, h in enumerate(self.hash) if h} == dict(
            zip(snap.hashed_ids, snap.hashes, strict=True)
        )
        assert self.tables == dict(zip(snap.seq_ids, snap.tables, strict=True))
        for seq_id, n in zip(snap.seq_ids, snap.computed, strict=True):
            assert self.computed[seq_id] == n, f"sequence {seq_id}"
