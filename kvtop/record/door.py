"""Door: checks the batches of a recording before any reader gets them.

Owns the checks over more than one number. The range of a single number belongs to its field in engine.events and is
checked while it is decoded. Invariant: after the door every number is in the range of its field, columns have equal
lengths, ids are inside the pool, and no value makes a reader allocate or loop beyond a small multiple of the file's
size and of MOST_BLOCKS. The door does not check whether the events are true; that is what verify does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from engine import events as ev

MOST_BLOCKS = 1 << 22
"""Physical blocks. A reader needs up to 300 bytes for each of them."""
MOST_BLOCK_SIZE = 1 << 14
"""Tokens in a block. Readers keep the filled slots of a block as int16."""
MOST_STEP_TOKENS = 1 << 20
"""Tokens that one step can sample."""
MOST_PROMPT = 1 << 24
"""Tokens of a prompt whose length only its spans give."""
MOST_BRANCHES = 1024
"""Samples or beams of one request."""


class Refused(Exception):
    """One line: the event's type, the field, and what is wrong with it."""


class Door:
    """The door of one stream. `check` may get a batch twice, because readers seek."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """0 before EngineStarted."""
        self.block_size = 1
        self.num_tokens = 0
        """Tokens in the whole pool, so the most that one sequence can have."""
        self._checks: dict[type, Callable[[Any], None]] = {
            ev.EngineStarted: self._started,
            ev.BlocksAllocated: self._ids,
            ev.BlocksTouched: self._ids,
            ev.BlocksReleased: self._ids,
            ev.BlocksCopied: self._copied,
            ev.BlocksStored: self._stored,
            ev.BlocksEvicted: self._evicted,
            ev.PoolSnapshot: self._snapshot,
            ev.HitAudited: self._audited,
            ev.KernelsProfiled: self._profiled,
            ev.RequestQueued: self._queued,
            ev.PrefixLookup: self._lookup,
            ev.RequestAdmitted: self._admitted,
            ev.StepScheduled: self._scheduled,
            ev.TokensSampled: self._sampled,
            ev.TokenLogprobs: self._logprobs,
            ev.TokenPieces: self._pieces,
        }

    def check(self, batch: ev.StepBatch) -> None:
        """Raises Refused at the first impossible value."""
        checks = self._checks
        for e in batch.events:
            check = checks.get(type(e))
            if check is not None:
                check(e)

    # ------------------------------------------------------------------------------- engine and pool

    def _started(self, e: ev.EngineStarted) -> None:
        _within("EngineStarted.num_blocks", e.num_blocks, 2, MOST_BLOCKS)
        _within("EngineStarted.block_size", e.block_size, 1, MOST_BLOCK_SIZE)
        if e.hash_seed is not None:
            _within("EngineStarted.hash_seed", e.hash_seed, 0, (1 << 64) - 1)
        if not self.num_blocks:  # a second EngineStarted is a broken law and changes nothing here
            self.num_blocks, self.block_size = e.num_blocks, e.block_size
            self.num_tokens = e.num_blocks * e.block_size

    def _ids(self, e: ev.BlocksAllocated | ev.BlocksTouched | ev.BlocksReleased) -> None:
        ids = e.ids
        if ids and max(ids) >= self.num_blocks:
            self._outside(e, "ids", ids)

    def _copied(self, e: ev.BlocksCopied) -> None:
        if e.src >= self.num_blocks or e.dst >= self.num_blocks:
            self._blocks(e, "src", [e.src])
            self._blocks(e, "dst", [e.dst])
        if e.index >= self.num_blocks:
            raise Refused(f"BlocksCopied.index is {e.index:,}, a table has under {self.num_blocks:,} entries")

    def _stored(self, e: ev.BlocksStored) -> None:
        self._ids(e)  # type: ignore[arg-type]
        n = len(e.ids)
        if len(e.ids) != len(e.hashes):
            _columns(e, "ids", "hashes")
        if e.token_ids and len(e.token_ids) != n * self.block_size:
            raise Refused(
                f"BlocksStored.token_ids has {len(e.token_ids):,} tokens for {n:,} blocks of {self.block_size:,}"
            )
        if e.start_index + n > self.num_blocks:
            raise Refused(f"BlocksStored.start_index is {e.start_index:,}, beyond any block table")

    def _evicted(self, e: ev.BlocksEvicted) -> None:
        self._ids(e)  # type: ignore[arg-type]
        if len(e.ids) != len(e.hashes):
            _columns(e, "ids", "hashes")

    def _snapshot(self, e: ev.PoolSnapshot) -> None:
        n = self.num_blocks
        if len(e.refs) % 3:
            raise Refused("PoolSnapshot.refs is not made of triples (first, count, ref)")
        if len(e.queue) % 2:
            raise Refused("PoolSnapshot.queue is not made of pairs (first, count)")
        for name, first, count in (
            ("refs", e.refs[::3], e.refs[1::3]),
            ("queue", e.queue[::2], e.queue[1::2]),
        ):
            if 0 in count or sum(map(abs, count)) >= n:
                raise Refused(
                    f"PoolSnapshot.{name} has a count of 0, or more blocks than the pool's {n - 1:,}"
                )
            ends = [f + c - (1 if c > 0 else -1) for f, c in zip(first, count, strict=True)]
            if ends and not (min(ends) > 0 and max(ends) < n):
                raise Refused(f"PoolSnapshot.{name} names a block outside 1..{n - 1:,}")
        if e.refs and max(e.refs[2::3]) > MOST_BLOCKS:
            raise Refused("PoolSnapshot.refs has an impossible reference count")
        self._blocks(e, "hashed_ids", e.hashed_ids)
        _columns(e, "hashed_ids", "hashes")
        _columns(e, "seq_ids", "tables", "computed")
        if any(len(t) >= n for t in e.tables):
            raise Refused("PoolSnapshot.tables has a table longer than the pool")
        self._blocks(e, "tables", list(chain.from_iterable(e.tables)))
        self._tokens(e, "computed", e.computed)

    def _audited(self, e: ev.HitAudited) -> None:
        self._blocks(e, "blocks", e.blocks)
        self._blocks(e, "bad", e.bad)

    def _profiled(self, e: ev.KernelsProfiled) -> None:
        _columns(e, "names", "calls", "seconds", "bytes", "flops")

    # ---------------------------------------------------------------------------- requests and steps

    def _queued(self, e: ev.RequestQueued) -> None:
        _within("RequestQueued.n", e.n, 1, MOST_BRANCHES)
        width = e.params.get("beam_width", 1)
        if type(width) is not int or not 0 <= width <= MOST_BRANCHES:
            raise Refused(
                f"RequestQueued.params.beam_width is {str(width)[:20]}, at most {MOST_BRANCHES:,} can be"
            )
        most = len(e.prompt_token_ids) or MOST_PROMPT
        for start, end, _, _ in e.spans:
            if not start <= end <= most:
                raise Refused(f"RequestQueued.spans has ({start:,}, {end:,}), outside its {most:,} tokens")

    def _lookup(self, e: ev.PrefixLookup) -> None:
        if not e.hit_blocks <= len(e.hashes):
            raise Refused(f"PrefixLookup.hit_blocks is {e.hit_blocks:,} of {len(e.hashes):,} hashes")
        if not e.queried_blocks <= len(e.hashes):
            raise Refused(f"PrefixLookup.queried_blocks is {e.queried_blocks:,} of {len(e.hashes):,} hashes")
        self._tokens(e, "hit_tokens", [e.hit_tokens])
        _within("PrefixLookup.prompt_tokens", e.prompt_tokens, 0, MOST_PROMPT)

    def _admitted(self, e: ev.RequestAdmitted) -> None:
        self._tokens(e, "cached_tokens", [e.cached_tokens])

    def _scheduled(self, e: ev.StepScheduled) -> None:
        if not len(e.seq_ids) == len(e.start) == len(e.n):
            _columns(e, "seq_ids", "start", "n")
        if e.drafts and len(e.drafts) != len(e.n):
            _columns(e, "n", "drafts")
        if e.n and max(max(e.start), max(e.n)) > self.num_tokens:
            self._tokens(e, "start", e.start)
            self._tokens(e, "n", e.n)

    def _sampled(self, e: ev.TokensSampled) -> None:
        rows, tokens = len(e.seq_ids), sum(e.counts)
        if not rows == len(e.counts) == len(e.num_computed) == len(e.text):
            _columns(e, "seq_ids", "counts", "num_computed", "text")
        if tokens != len(e.token_ids) and (e.token_ids or tokens > MOST_STEP_TOKENS):
            raise Refused(f"TokensSampled.counts say {tokens:,} tokens, token_ids has {len(e.token_ids):,}")
        self._tokens(e, "num_computed", e.num_computed)

    def _logprobs(self, e: ev.TokenLogprobs) -> None:
        _columns(e, "seq_ids", "token_ids", "logprobs", "top_ids", "top_logprobs")
        for place, (ids, logprobs) in enumerate(zip(e.top_ids, e.top_logprobs, strict=True)):
            if len(ids) != len(logprobs):
                raise Refused(
                    f"TokenLogprobs.top_ids[{place}] has {len(ids)} ids, top_logprobs {len(logprobs)}"
                )

    def _pieces(self, e: ev.TokenPieces) -> None:
        _columns(e, "ids", "bytes")

    # --------------------------------------------------------------------------------------- inside

    def _blocks(self, e: ev.Event, name: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.num_blocks:
            self._outside(e, name, ids)

    def _outside(self, e: ev.Event, name: str, ids: Iterable[int]) -> None:
        where = f"{type(e).__name__}.{name}"
        if not self.num_blocks:
            raise Refused(f"{where}: no EngineStarted came before it")
        block = max(ids)
        raise Refused(f"{where}: block {block:,} is outside the pool, 1 to {self.num_blocks - 1:,}")

    def _tokens(self, e: ev.Event, name: str, tokens: Sequence[int]) -> None:
        """One sequence cannot have more tokens than fit in the pool."""
        if tokens and max(tokens) > self.num_tokens:
            raise Refused(
                f"{type(e).__name__}.{name} is {max(tokens):,}, the pool holds {self.num_tokens:,} tokens"
            )


def _within(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Refused(f"{what} is {value:,}, it can be from {least:,} to {most:,}")


def _columns(e: ev.Event, first: str, *others: str) -> None:
    rows = len(getattr(e, first))
    for name in others:
        if len(getattr(e, name)) != rows:
            raise Refused(
                f"{type(e).__name__}.{name} has {len(getattr(e, name)):,} rows, {first} has {rows:,}"
            )
