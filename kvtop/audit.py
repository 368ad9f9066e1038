"""Audit: does a stream of events make sense, event by event? The laws beside the pool's own.

Owns what each kind of event demands of those before it: a life of a request, the life of a step, what a
look-up may find, what must be published, what the figures at the end must say. The pool's transitions
are PoolMirror's. Written from the contract (engine.events, ARCHITECTURE's invariants), not from the
engine's code, so that the two can contradict each other. Redundancy is the point: an event that is
missing shows even if whoever took it out renumbered the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from xxhash import xxh3_128_digest

from engine import events as ev
from kvtop.pool_mirror import PoolMirror, StateError


class Broken(Exception):
    """One law that an event breaks."""


def need(ok: bool, text: str) -> None:
    """Raise Broken(text) unless ok."""
    if not ok:
        raise Broken(text)


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence. `computed` tokens have KV, `known` were there at its admission, `published` blocks
    need no storing any more, `bad`: its last logits were not finite."""

    seq_id: int
    request: Life
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    high: int = 0
    known: int = 0
    published: int = 0
    bad: bool = False
    chain: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Life:
    """A request."""

    queued: ev.RequestQueued
    prompt: int
    phase: str = "queued"
    branches: list[Branch] = field(default_factory=list)
    lookup: ev.PrefixLookup | None = None
    looked_up: bool = False
    cached: int | None = None
    output: int = 0
    preemptions: int = 0
    recomputed: int = 0
    cache_write: int = 0
    high_published: int = 0
    before_step: tuple[int, int] | None = None
    """(cache_write, high_published) before what it published for the step in the making."""


class Audit:
    """Call `event` for each event in order, `end_batch` after each batch, `close` at the end. All raise
    Broken or StateError; a stream may be audited further after that, up to the caller."""

    def __init__(self, started: ev.EngineStarted) -> None:
        need(started.schema <= ev.SCHEMA, f"schema {started.schema} is newer than {ev.SCHEMA}")
        need(2 <= started.num_blocks <= 1 << 24, f"{started.num_blocks} blocks cannot be")
        need(1 <= started.block_size <= 1 << 16, f"blocks of {started.block_size} tokens cannot be")
        self.size = started.block_size
        self.mirror = PoolMirror(started.num_blocks, started.block_size)
        self.redacted = started.hash_seed is None
        self.lives: dict[int, Life] = {}
        self.steps = 0
        seed = started.hash_seed
        need(seed is None or 0 <= seed < 1 << 64, f"hash_seed {seed} is out of range")
        self._root = xxh3_128_digest((seed or 0).to_bytes(8, "big"))
        self._caching: bool = bool(started.knobs.get("enable_prefix_caching", True))
        self._text = "text" in started.capabilities
        self._branches: dict[int, Branch] = {}
        self._pieces: set[int] = set()
        self._used: set[int] = set()
        self._withdrawn: set[int] = set()
        self._stored_now: set[int] = set()
        self._publishing: list[Life] = []
        self._scheduled: ev.StepScheduled | None = None
        self._sampled = self._completed = self._failed = False
        self._closing: ev.PoolSnapshot | None = None

    def event(self, e: Any) -> None:
        """The next event."""
        if type(e) is not ev.EngineStopped:
            self._closing = None
        handler = self._handlers.get(type(e))
        if handler is not None:
            handler(self, e)

    def end_batch(self, step: int) -> None:
        """All events of a batch are in; `step` is the batch's."""
        scheduled, self._scheduled = self._scheduled, None
        sampled, completed, failed = self._sampled, self._completed, self._failed
        self._sampled = self._completed = self._failed = False
        self._written()
        if scheduled is not None:
            need(sampled or failed, "StepScheduled without TokensSampled or an EngineError")
            need(completed, "StepScheduled without StepCompleted")
        need(step == self.steps, f"step is {step} after {self.steps} StepScheduled")
        if self._text and not self.redacted:
            missing = self._used - self._pieces
            self._pieces |= self._used
            self._used.clear()
            need(not missing, f"TokenPieces is missing for token {min(missing, default=0)}")

    def close(self) -> None:
        """The stream is over."""
        open_ = [i for i, life in self.lives.items() if life.phase != "finished"]
        need(not open_, f"request {open_[0] if open_ else 0} never finished")
        need(self._closing is not None, "no closing PoolSnapshot right before the end")

    def resync(self, s: ev.PoolSnapshot) -> None:
        """Believe the pool after a broken law, so that the next one is told for itself."""
        self.mirror.load(s)
        for i, computed in zip(s.seq_ids, s.computed, strict=True):
            if i in self._branches:
                self._branches[i].computed = computed
                self._branches[i].published = len(self.mirror.tables.get(i, []))

    # ---------------------------------------------------------------------------------- the pool

    def _on_allocated(self, e: ev.BlocksAllocated) -> None:
        self._withdrawn.difference_update(e.ids)
        self.mirror.allocated(e)
        self._branch(e.seq_id)

    def _on_touched(self, e: ev.BlocksTouched) -> None:
        branch = self._branch(e.seq_id)
        at = len(self.mirror.tables.get(e.seq_id, ()))
        lookup = branch.request.lookup
        if e.why == "hit":
            for i, b in enumerate(e.ids, at):
                carried = self.mirror.hash[b] if 0 < b < self.mirror.num_blocks else None
                need(carried is not None, f"block {b} was hit but carries no hash")
                if lookup is not None and branch is branch.request.branches[0]:
                    need(i < lookup.hit_blocks, f"block {b} was hit beyond the look-up's {lookup.hit_blocks}")
                    need(lookup.hashes[i] == carried, f"block {b} was hit but the look-up asked for another")
                elif not self.redacted:
                    need(self._hash(branch, i) == carried, f"block {b} was hit but holds other tokens")
        self.mirror.touched(e)
        if e.why == "hit":
            branch.published = at + len(e.ids)
            branch.computed = branch.published * self.size
        else:
            need(at == 0 and branch.computed > 0, "a fork starts with a parent's computed blocks")
            need(
                len(e.ids) == -(-branch.computed // self.size),
                f"a fork shares {len(e.ids)} blocks for {branch.computed} computed tokens",
            )
            branch.published = min(branch.published, len(e.ids))

    def _on_copied(self, e: ev.BlocksCopied) -> None:
        self._withdrawn.discard(e.dst)
        self.mirror.copied(e)

    def _on_released(self, e: ev.BlocksReleased) -> None:
        branch = self._branch(e.seq_id)
        before = self.mirror.tables.get(e.seq_id, [])
        last = len(before) - 1
        unpublished = [
            b
            for i, b in enumerate(e.ids)
            if last - i < branch.computed // self.size
            and 0 <= b < self.mirror.num_blocks
            and self.mirror.hash[b] is None
            and b not in self._withdrawn
        ]
        self.mirror.released(e)
        left = len(self.mirror.tables.get(e.seq_id, ()))
        branch.published = min(branch.published, left)
        if self._caching and not branch.bad:
            need(not unpublished, f"block {(unpublished or [0])[0]} was full but never stored")

    def _on_stored(self, e: ev.BlocksStored) -> None:
        branch, size, end = self._branch(e.seq_id), self.size, e.start_index + len(e.ids)
        need(
            e.start_index == branch.published,
            f"stores from block {e.start_index} on, after {branch.published} published ones",
        )
        self.mirror.stored(e)
        branch.published = end
        self._stored_now.update(e.ids)
        life = branch.request
        if not self._sampled and life.before_step is None:
            life.before_step = (life.cache_write, life.high_published)
            self._publishing.append(life)
        if end > life.high_published:
            first = max(e.start_index, life.high_published) * size
            life.cache_write += max(0, min(end * size, life.prompt) - first)
            life.high_published = end
        need(
            e.start_index > 0 or e.salt == life.queued.salt,
            "the salt of block 0 is not the request's",
        )
        if self.redacted:
            return
        tokens = branch.tokens[e.start_index * size : end * size]
        need(e.token_ids == tokens, f"the tokens are not those of sequence {e.seq_id}")
        parent = self._hash(branch, e.start_index - 1) if e.start_index else self._root.hex()
        need(e.parent == parent, f"the parent hash is not {parent[:8]}…")
        for i, h in enumerate(e.hashes, e.start_index):
            need(h == self._hash(branch, i), f"the hash of block {i} does not follow from its tokens")

    def _on_evicted(self, e: ev.BlocksEvicted) -> None:
        self.mirror.evicted(e)
        if e.why != "reallocated":
            self._withdrawn.update(e.ids)
        life = None if e.by_seq is None else self._branch(e.by_seq).request
        if e.why == "unwritten" and life is not None and life.before_step is not None:
            life.cache_write, life.high_published = life.before_step

    def _on_cleared(self, e: ev.CacheCleared) -> None:
        self._withdrawn.update(self.mirror.cleared())

    def _on_snapshot(self, e: ev.PoolSnapshot) -> None:
        wrong = self.mirror.differences(e)
        for i, computed in zip(e.seq_ids, e.computed, strict=True):
            mine = self._branches[i].computed if i in self._branches else None
            if mine != computed:
                wrong.append(f"sequence {i} has {computed} computed tokens, the events say {mine}")
        need(not wrong, "; ".join(wrong[:3]))
        self._closing = e

    # ------------------------------------------------------------------------------------ requests

    def _on_queued(self, e: ev.RequestQueued) -> None:
        need(e.request_id not in self.lives, f"request {e.request_id} is queued twice")
        prompt = len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0)
        self.lives[e.request_id] = Life(e, prompt)
        self._used.update(t for t in e.prompt_token_ids if t >= 0)

    def _on_lookup(self, e: ev.PrefixLookup) -> None:
        life = self._life(e.request_id)
        need(life.lookup is None, "a look-up, but its last one led to no admission")
        need(life.phase == ("preempted" if e.resumed else "queued"), f"a look-up while {life.phase}")
        length = life.branches[0].length if life.branches else life.prompt
        need(e.prompt_tokens == length, f"{e.prompt_tokens} tokens looked up, the sequence has {length}")
        need(
            len(e.hashes) == max(0, length - 1) // self.size,
            f"{len(e.hashes)} hashes asked for, {max(0, length - 1) // self.size} blocks could be",
        )
        need(e.hit_tokens == e.hit_blocks * self.size, f"{e.hit_tokens} tokens in {e.hit_blocks} blocks hit")
        need(e.hit_blocks <= e.queried_blocks <= len(e.hashes), "hit <= queried <= asked does not hold")
        found = 0
        while found < len(e.hashes) and e.hashes[found] in self.mirror.where:
            found += 1
        need(e.hit_blocks == found, f"{e.hit_blocks} blocks hit, the hash table has {found}")
        if not self.redacted:
            branch = life.branches[0] if life.branches else self._first(life, -1)
            for i, h in enumerate(e.hashes):
                need(h == self._hash(branch, i), f"hash {i} does not follow from the prompt's tokens")
        life.lookup = e

    def _on_blocked(self, e: ev.AdmissionBlocked) -> None:
        life = self._life(e.request_id)
        need(life.phase in ("queued", "preempted"), f"blocked while {life.phase}")
        need(e.need > e.free, f"blocked although {e.need} are needed and {e.free} are there")
        if e.reason == "blocks":
            queue = self.mirror.num_blocks - 1 - self.mirror.active
            need(e.free <= queue, f"{e.free} blocks free, the queue holds {queue}")

    def _on_admitted(self, e: ev.RequestAdmitted) -> None:
        life = self._life(e.request_id)
        need(
            life.phase == ("preempted" if e.resumed else "queued"),
            f"{'resumed' if e.resumed else 'admitted'} while {life.phase}",
        )
        if e.resumed:
            need(e.seq_id in self._branches, f"resumed as an unknown sequence {e.seq_id}")
        else:
            need(e.seq_id not in self._branches, f"sequence {e.seq_id} exists already")
            branch = self._first(life, e.seq_id)
            life.branches.append(branch)
            self._branches[e.seq_id] = branch
            life.cached = e.cached_tokens
        lookup = life.lookup
        if lookup is None:
            need(not self._caching, "admitted without a PrefixLookup")
            need(e.cached_tokens == 0, "cached tokens without a look-up")
        else:
            need(lookup.resumed == e.resumed, "the look-up before says otherwise about being resumed")
            need(
                lookup.hit_tokens == e.cached_tokens,
                f"{e.cached_tokens} cached tokens, the look-up hit {lookup.hit_tokens}",
            )
        life.looked_up, life.phase = lookup is not None, "running"
        for branch in life.branches:
            branch.known = branch.length

    def _on_preempted(self, e: ev.RequestPreempted) -> None:
        life = self._life(e.request_id)
        need(life.phase == "running", f"preempted while {life.phase}")
        for i in e.seq_ids:
            need(not self.mirror.tables.get(i), f"preempted, but sequence {i} still holds blocks")
        lost = sum(self._branch(i).computed for i in e.seq_ids)
        need(lost == e.tokens_lost, f"{e.tokens_lost} tokens lost, {lost} were computed")
        for i in e.seq_ids:
            self._branch(i).computed = 0
        life.phase, life.lookup = "preempted", None
        life.preemptions += 1

    def _on_finished(self, e: ev.RequestFinished) -> None:
        life = self._life(e.request_id)
        was, life.phase = life.phase, "finished"
        need(was != "finished", "finished twice")
        for branch in life.branches:
            need(
                not self.mirror.tables.get(branch.seq_id), f"finished, but {branch.seq_id} still holds blocks"
            )
        need(e.reason not in ("stop", "length") or was == "running", f"{e.reason} while {was}")
        need(e.reason != "refused" or not life.branches, "refused after its admission")
        bad = any(b.bad for b in life.branches)
        need(not bad or e.reason in ("error", "abort"), "its logits were not finite, yet it did not fail")
        u, cached = e.usage, life.cached or 0
        want = {
            "prompt_tokens": life.prompt,
            "cached_tokens": cached,
            "computed_tokens": life.prompt - cached if life.cached is not None else 0,
            "cache_write_tokens": life.cache_write,
            "output_tokens": sum(b.length - life.prompt for b in life.branches),
            "preemptions": life.preemptions,
            "recomputed_tokens": life.recomputed,
        }
        for name, value in want.items():
            told = getattr(u, name)
            need(told == value, f"usage says {name} {told}, the events {value}")
        t = e.timings
        instants = [x for x in (t.t_arrival, t.t_admitted, t.t_first_token, t.t_last_token) if x is not None]
        need(instants == sorted(instants), "its instants are out of order")
        need((t.t_first_token is None) == (life.output == 0), "a first token without output, or the reverse")

    # --------------------------------------------------------------------------------------- steps

    def _on_forked(self, e: ev.SequenceForked) -> None:
        life, parent = self._life(e.request_id), self._branch(e.parent)
        need(e.child not in self._branches, f"sequence {e.child} exists already")
        need(parent.request is life and life.phase == "running", "forked from a sequence that does not run")
        child = Branch(
            e.child,
            life,
            parent.tokens[:],
            parent.length,
            parent.computed,
            parent.computed,
            parent.known,
            parent.published,
            chain=parent.chain[:],
        )
        self._branches[e.child] = child
        life.branches.append(child)

    def _on_scheduled(self, e: ev.StepScheduled) -> None:
        need(self._scheduled is None, "two StepScheduled in one batch")
        need(len(e.seq_ids) == len(e.start) == len(e.n), "columns of different lengths")
        need(len(set(e.seq_ids)) == len(e.seq_ids), "a sequence is scheduled twice")
        self._scheduled = e
        self.steps += 1
        for i, start, n in zip(e.seq_ids, e.start, e.n, strict=True):
            branch = self._branch(i)
            branch.request.lookup = None
            need(branch.request.phase == "running", f"sequence {i} is scheduled while not running")
            need(start == branch.computed, f"sequence {i} starts at {start}, {branch.computed} are computed")
            end = start + n
            need(
                n > 0 and end <= branch.length, f"sequence {i} computes up to {end} of {branch.length} tokens"
            )
            table = self.mirror.tables.get(i, [])
            need(len(table) * self.size >= end, f"sequence {i} has no block for position {end - 1}")
            for b in table[start // self.size : -(-end // self.size)]:
                need(self.mirror.ref[b] == 1 or b in self._stored_now, f"block {b} is written while shared")
                need(
                    self.mirror.hash[b] is None or b in self._stored_now,
                    f"block {b} is written although it is sealed",
                )
            if self._caching:
                for b in table[: min(end, branch.known) // self.size]:
                    need(self.mirror.hash[b] is not None, f"block {b} of a known prompt was not published")

    def _on_sampled(self, e: ev.TokensSampled) -> None:
        plan = self._scheduled
        need(plan is not None and not self._sampled, "TokensSampled without its StepScheduled")
        assert plan is not None
        self._sampled = True
        self._written()
        rows = len(e.seq_ids)
        need(rows == len(e.counts) == len(e.num_computed) == len(e.text), "columns of different lengths")
        need(self.redacted or sum(e.counts) == len(e.token_ids), "counts do not add up to the tokens")
        at = 0
        for i, count, computed in zip(e.seq_ids, e.counts, e.num_computed, strict=True):
            need(i in plan.seq_ids, f"sequence {i} was not scheduled")
            row = plan.seq_ids.index(i)
            branch, end = self._branch(i), plan.start[row] + plan.n[row]
            need(computed == end, f"sequence {i} has {computed} computed tokens, {end} were scheduled")
            if end < branch.length:
                need(count == 0, f"sequence {i} sampled before its last token was computed")
            branch.bad = count == 0 and end == branch.length
            life = branch.request
            life.recomputed += max(0, min(end, branch.high) - plan.start[row])
            branch.computed, branch.high = end, max(branch.high, end)
            branch.tokens += e.token_ids[at : at + count]
            branch.length += count
            life.output += count
            at += count
        self._used.update(e.token_ids)
        for i in plan.seq_ids:
            if i not in e.seq_ids:
                need(self._branch(i).request.phase != "running", f"sequence {i} ran but has no row")

    def _on_pieces(self, e: ev.TokenPieces) -> None:
        need(len(e.ids) == len(e.bytes), "columns of different lengths")
        again = self._pieces.intersection(e.ids)
        need(not again, f"token {min(again, default=0)} is explained twice")
        self._pieces.update(e.ids)

    def _on_completed(self, e: ev.StepCompleted) -> None:
        plan, mirror = self._scheduled, self.mirror
        need(plan is not None and not self._completed, "StepCompleted without its StepScheduled")
        assert plan is not None
        self._completed = True
        tokens = e.decode_tokens + e.prefill_tokens
        ran = sum(plan.n) if self._sampled else 0
        need(tokens == ran, f"{tokens} tokens completed, {ran} ran")
        need(tokens <= e.budget, f"{tokens} tokens in a budget of {e.budget}")
        told, mine = (e.free, e.active, e.cached), (mirror.free, mirror.active, mirror.cached)
        need(told == mine, f"free, active, cached are {told}, the events say {mine}")
        phases = [life.phase for life in self.lives.values() if life.phase != "finished"]
        queues = {
            "running": phases.count("running"),
            "waiting": len(phases) - phases.count("running"),
            "preempted": phases.count("preempted"),
        }
        need(e.queues == queues, f"queues are {e.queues}, the events say {queues}")

    def _on_error(self, e: ev.EngineError) -> None:
        self._failed = True

    # -------------------------------------------------------------------------------------- inside

    def _life(self, request_id: int) -> Life:
        need(request_id in self.lives, f"request {request_id} was never queued")
        return self.lives[request_id]

    def _branch(self, seq_id: int) -> Branch:
        need(seq_id in self._branches, f"sequence {seq_id} was never admitted")
        return self._branches[seq_id]

    def _first(self, life: Life, seq_id: int) -> Branch:
        return Branch(seq_id, life, list(life.queued.prompt_token_ids), life.prompt)

    def _written(self) -> None:
        """What was published for this step is now there, or was withdrawn."""
        self._stored_now.clear()
        for life in self._publishing:
            life.before_step = None
        self._publishing.clear()

    def _hash(self, branch: Branch, block: int) -> str:
        """Hash of a block by its definition, from the sequence's own tokens."""
        chain, size = branch.chain, self.size
        while len(chain) <= block:
            i = len(chain)
            tokens = branch.tokens[i * size : (i + 1) * size]
            need(len(tokens) == size, f"block {block} is not full")
            data = (chain[-1] if chain else self._root) + struct.pack(f"<{size}i", *tokens)
            if i == 0 and branch.request.queued.salt is not None:
                data += bytes.fromhex(branch.request.queued.salt)
            chain.append(xxh3_128_digest(data))
        return chain[block].hex()

    _handlers: ClassVar[dict[type, Callable[[Audit, Any], None]]] = {
        ev.BlocksAllocated: _on_allocated,
        ev.BlocksTouched: _on_touched,
        ev.BlocksCopied: _on_copied,
        ev.BlocksReleased: _on_released,
        ev.BlocksStored: _on_stored,
        ev.BlocksEvicted: _on_evicted,
        ev.CacheCleared: _on_cleared,
        ev.PoolSnapshot: _on_snapshot,
        ev.RequestQueued: _on_queued,
        ev.PrefixLookup: _on_lookup,
        ev.AdmissionBlocked: _on_blocked,
        ev.RequestAdmitted: _on_admitted,
        ev.RequestPreempted: _on_preempted,
        ev.RequestFinished: _on_finished,
        ev.SequenceForked: _on_forked,
        ev.StepScheduled: _on_scheduled,
        ev.TokensSampled: _on_sampled,
        ev.TokenPieces: _on_pieces,
        ev.StepCompleted: _on_completed,
        ev.EngineError: _on_error,
    }


def broken(audit: Audit, events: list[Any], step: int) -> Iterator[tuple[str, str]]:
    """(event's name, what it broke) for one batch; a snapshot after a broken law is believed."""
    for e in events:
        try:
            audit.event(e)
        except (Broken, StateError, ValueError, IndexError, KeyError, struct.error) as error:
            yield type(e).__name__, str(error)
            if type(e) is ev.PoolSnapshot:
                try:
                    audit.resync(e)
                except (StateError, ValueError) as worse:
                    yield type(e).__name__, str(worse)
    try:
        audit.end_batch(step)
    except Broken as error:
        yield "", str(error)
