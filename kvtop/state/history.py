"""History: the content of each hash, and when and why it left the cache. It explains misses.

Owns an immutable record for each hash that was stored, and the children of each parent hash. Invariant: there are at
most about twice `limit` records. Beyond that the oldest ones that have left the hash table are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine import events as ev
from kvtop.state.part import Part, takes

if TYPE_CHECKING:
    from kvtop.state.dashboard import DashboardState


class Gone(NamedTuple):
    """How a content left the hash table.

    why: reallocated, unwritten, invalid or reset. by_seq: the sequence that took the memory. hits: how often the block
    had been read.
    """

    t: float
    why: str
    by_seq: int | None
    hits: int
    born: float


class Stored(NamedTuple):
    """The content of one hash. place: index of the block in its sequence. token_ids: empty in a redacted recording."""

    hash: str
    parent: str
    place: int
    token_ids: tuple[int, ...]
    salt: str | None
    seq_id: int
    t: float
    gone: Gone | None = None


class History(Part):
    """Records by hash, newest last."""

    __slots__ = ("_children", "_records", "limit", "root")

    def __init__(self, limit: int = 50_000) -> None:
        self.limit = limit
        self.root: str | None = None
        """The parent of every block 0; None until one was stored."""
        self._records: dict[str, Stored] = {}
        self._children: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, hash_: str) -> Stored | None:
        """What was stored under this hash; None if it is not kept."""
        return self._records.get(hash_)

    def children(self, parent: str, most: int = 256) -> list[Stored]:
        """At most `most` contents that were stored right after `parent`, newest first."""
        names = self._children.get(parent, [])
        return [self._records[h] for h in names[: -most - 1 : -1]]

    @takes(ev.EngineStarted)
    def _started(self, e: ev.EngineStarted, state: DashboardState) -> None:
        self.limit = limit(e.num_blocks)

    @takes(ev.BlocksStored)
    def _stored(self, e: ev.BlocksStored, state: DashboardState) -> None:
        parent, size, t = e.parent, state.block_size, state.stream.t
        for k, h in enumerate(e.hashes):
            tokens = tuple(e.token_ids[k * size : (k + 1) * size])
            salt = e.salt if e.start_index + k == 0 else None
            self._remember(Stored(h, parent, e.start_index + k, tokens, salt, e.seq_id, t))
            parent = h

    @takes(ev.BlocksEvicted)
    def _evicted(self, e: ev.BlocksEvicted, state: DashboardState) -> None:
        for content in state.pool.lost:
            self._left(content.hash, Gone(state.stream.t, e.why, e.by_seq, content.hits, content.born))

    @takes(ev.CacheCleared)
    def _cleared(self, e: ev.CacheCleared, state: DashboardState) -> None:
        for content in state.pool.lost:
            self._left(content.hash, Gone(state.stream.t, "reset", None, content.hits, content.born))

    def _remember(self, record: Stored) -> None:
        """A content has entered the hash table, perhaps again."""
        old = self._records.pop(record.hash, None)
        self._records[record.hash] = record
        if record.place == 0:
            self.root = record.parent
        if old is None:
            self._children.setdefault(record.parent, []).append(record.hash)
            if len(self._records) > 2 * self.limit:
                self._trim()

    def _left(self, hash_: str, gone: Gone) -> None:
        """The last block with this content has lost its hash."""
        record = self._records.get(hash_)
        if record is not None:
            self._records[hash_] = record._replace(gone=gone)

    def _trim(self) -> None:
        spare = len(self._records) - self.limit
        for h in [h for h, r in self._records.items() if r.gone is not None][:spare]:
            parent = self._records.pop(h).parent
            kin = self._children[parent]
            kin.remove(h)
            if not kin:
                del self._children[parent]
        if len(self._records) > self.limit * 3 // 2:
            self.limit = len(
                self._records
            )  # else a hash table larger than the limit would trim at every store


def limit(num_blocks: int) -> int:
    """Records to keep for a pool of this size."""
    return max(4 * num_blocks, 20_000)
