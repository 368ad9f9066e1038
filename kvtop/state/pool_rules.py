"""PoolRules: what the seven pool events and the pool's snapshots do to the facts.

Owns the bookkeeping around PoolView: evictions and who they were for, hits, duplicates, moments, and the way
back after a loss. The transitions themselves are PoolMirror's.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.state.facts import Facts
from kvtop.state.history import Gone, Stored
from kvtop.state.pool_mirror import StateError


class PoolRules(Facts):
    """One method a kind of event."""

    def _on_allocated(self, e: ev.BlocksAllocated) -> None:
        self.pool.allocated(e, self.t)
        self._note_moved(self._view_of(self._sequence(e.seq_id)))

    def _on_touched(self, e: ev.BlocksTouched) -> None:
        self.pool.touched(e, self.t)
        sequence = self._sequence(e.seq_id)
        request_id = sequence.request_id
        # Of hits, and of a sibling that comes back, all slots are filled; a step may be told much later.
        if e.why == "hit" or (not sequence.num_computed and sequence.output_ids):
            sequence.num_computed = len(self.pool.mirror.tables.get(e.seq_id, ())) * self.block_size
        if e.why == "hit":
            self._moment("hit", e.ids, request_id)
            if request_id is not None:
                self._note_hits(self.requests.get(request_id), e.seq_id)
        else:
            self._note_moved(self._view_of(sequence))
            self._moment("forked", e.ids, request_id)

    def _on_copied(self, e: ev.BlocksCopied) -> None:
        self.pool.copied(e, self.t)
        self.copies += 1
        self._note_moved(self._view_of(self._sequence(e.seq_id)))
        self._moment("copied", (e.src, e.dst), self._sequence(e.seq_id).request_id, f"{e.src}→{e.dst}")

    def _on_released(self, e: ev.BlocksReleased) -> None:
        sequence = self._sequence(e.seq_id)
        view = self._view_of(sequence)
        if view is not None and not view.done and len(e.ids) == len(sequence.table) and sequence.branch == 0:
            view.last_table = sequence.table[:]
        self.pool.released(e, self.t)
        sequence.table = self.pool.mirror.tables.get(e.seq_id, [])
        if not sequence.table and (view is None or view.done or sequence.pruned):
            self.sequences.pop(e.seq_id, None)
        self._moment("released", e.ids, sequence.request_id)

    def _on_stored(self, e: ev.BlocksStored) -> None:
        if self.block_size and len(e.token_ids) not in (0, len(e.ids) * self.block_size):
            raise StateError(f"BlocksStored: {len(e.token_ids)} tokens for {len(e.ids)} blocks")
        self.duplicates += self.pool.stored(e, self.t)
        parent, size = e.parent, self.block_size
        for k, h in enumerate(e.hashes):
            tokens = tuple(e.token_ids[k * size : (k + 1) * size])
            salt = e.salt if e.start_index + k == 0 else None
            self.history.stored(Stored(h, parent, e.start_index + k, tokens, salt, e.seq_id, self.t))
            parent = h
        self._moment("stored", e.ids, self._sequence(e.seq_id).request_id, hashes=e.hashes)

    def _on_evicted(self, e: ev.BlocksEvicted) -> None:
        told = [(self.pool.hits_of(b), self.pool.born_at[b]) for b in e.ids if 0 <= b < self.num_blocks]
        self.pool.evicted(e)
        for h, (hits, born) in zip(e.hashes, told, strict=True):
            if h not in self.pool.mirror.where:
                self.history.left(h, Gone(self.t, e.why, e.by_seq, hits, born))
        request_id = None
        if e.why == "reallocated":
            self.evictions += len(e.ids)
            self.series.evictions.add(self.t, len(e.ids))
            if e.by_seq is not None:
                sequence = self._sequence(e.by_seq)
                request_id, view = sequence.request_id, self._view_of(sequence)
                (sequence if view is None else view).evicted_ids.extend(e.ids)
        self._moment("evicted", e.ids, request_id, e.why, e.hashes)

    def _on_cleared(self, e: ev.CacheCleared) -> None:
        hits = {
            h: (self.pool.hits_of(b[0]), self.pool.born_at[b[0]]) for h, b in self.pool.mirror.where.items()
        }
        ids = self.pool.cleared()
        for h, (n, born) in hits.items():
            self.history.left(h, Gone(self.t, "reset", None, n, born))
        self._moment("cleared", ids)

    def _on_snapshot(self, e: ev.PoolSnapshot) -> None:
        mirror = self.pool.mirror
        if self.strict:
            wrong = mirror.differences(e)
            for i, computed in zip(e.seq_ids, e.computed, strict=True):
                mine = self.sequences[i].num_computed if i in self.sequences else 0
                if mine != computed:
                    wrong.append(
                        f"computed tokens of sequence {i}: replayed {mine}, the pool says {computed}"
                    )
            if wrong:
                raise StateError(f"PoolSnapshot: {wrong[0]}")
            return
        if self.synced:
            hashed = sum(len(b) for b in mirror.where.values())
            if sum(e.refs[1::3]) == mirror.active and len(e.hashed_ids) == hashed:
                return
            self.losses += 1
        self._resync(e)

    def _resync(self, e: ev.PoolSnapshot) -> None:
        self.pool.load(e, self.t)
        self.synced = True
        self.generation += 1
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            self._sequence(i).num_computed = computed
        alive = set(e.seq_ids)
        for i in list(self.sequences):
            if i not in alive:
                del self.sequences[i]
            else:
                self.sequences[i].table = self.pool.mirror.tables.get(i, [])
        for i in [i for i in self.running if alive.isdisjoint(self.requests[i].seq_ids)]:
            self._close(self.requests[i], None)
