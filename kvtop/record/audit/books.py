"""Books: what the events of a stream have said so far, for all laws, and the one way a law breaks.

Owns the records of requests and their branches, built from the events alone, and a block's hash by its
definition. What only one law needs is that law's own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from engine import events as ev
from kvtop.record.door import MOST_BLOCK_SIZE, MOST_BLOCKS
from kvtop.state.pool_mirror import PoolMirror


class Broken(Exception):
    """One law that an event breaks."""


def need(ok: bool, text: str) -> None:
    """Raise Broken(text) unless ok."""
    if not ok:
        raise Broken(text)


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence. `computed` tokens have KV, `known` were there at its admission, `published` blocks
    need no storing any more, `bad`: its last logits were not finite, `pruned`: a beam that was dropped."""

    seq_id: int
    request: Life
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    high: int = 0
    known: int = 0
    published: int = 0
    bad: bool = False
    pruned: bool = False
    chain: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Life:
    """A request."""

    queued: ev.RequestQueued
    prompt: int
    phase: str = "queued"
    branches: list[Branch] = field(default_factory=list)
    leader: Branch | None = None
    """The branch that is looked up at an admission: the first that still generates."""
    lookup: ev.PrefixLookup | None = None
    looked_up: bool = False
    cached: int | None = None
    output: int = 0
    preemptions: int = 0
    recomputed: int = 0
    cache_write: int = 0
    high_published: int = 0
    searches: bool = False
    """A beam search: its beams wait for each other, and only those that are not dropped count in the end."""
    before_step: tuple[int, int] | None = None
    """(cache_write, high_published) before what it published for the step that is sampled next."""
    before_next: tuple[int, int] | None = None
    """The same for the step after that, where one is planned ahead."""


class Books:
    """Raises Broken where the EngineStarted cannot be."""

    def __init__(self, started: ev.EngineStarted) -> None:
        need(started.schema <= ev.SCHEMA, f"schema {started.schema} is newer than {ev.SCHEMA}")
        need(2 <= started.num_blocks <= MOST_BLOCKS, f"{started.num_blocks} blocks cannot be")
        need(1 <= started.block_size <= MOST_BLOCK_SIZE, f"blocks of {started.block_size} tokens cannot be")
        self.size = started.block_size
        self.mirror = PoolMirror(started.num_blocks, started.block_size)
        self.redacted = started.hash_seed is None
        self.lives: dict[int, Life] = {}
        self.unfinished: dict[int, Life] = {}
        self.steps = 0
        seed = started.hash_seed
        need(seed is None or 0 <= seed < 1 << 64, f"hash_seed {seed} is out of range")
        self.root = xxh3_128_digest((seed or 0).to_bytes(8, "big"))
        self.caching: bool = started.knobs.enable_prefix_caching
        self.has_text = "text" in started.capabilities
        self.branches: dict[int, Branch] = {}
        self.stored_now: set[int] = set()
        """Blocks that are published and not yet written: by the step that is sampled next."""
        self.stored_next: set[int] = set()
        """By the one after it."""
        self.publishing: list[Life] = []
        self.scheduled: ev.StepScheduled | None = None
        self.born: dict[int, int] = {}
        """Branches that parted in this step, and the tokens that their parents have computed in it."""
        self.sampled = self.completed = self.failed = False
        self.t_before = self.t = 0.0
        """The batches' clock at the end of the batch before, and of this one."""
        self.knobs = started.knobs
        self.max_model_len = started.max_model_len

    def begin_batch(self, batch: ev.StepBatch) -> None:
        """Its events come next."""
        self.t_before, self.t = self.t, batch.t

    def end_batch(self) -> None:
        """Every law has seen it."""
        self.scheduled = None
        self.sampled = self.completed = self.failed = False

    def resync(self, s: ev.PoolSnapshot) -> None:
        """Believe the pool after a broken law, so that the next violation is one of its own."""
        self.mirror.load(s)
        for i, computed in zip(s.seq_ids, s.computed, strict=True):
            if i in self.branches:
                self.branches[i].computed = computed
                self.branches[i].published = len(self.mirror.tables.get(i, []))

    def life(self, request_id: int) -> Life:
        """The request. Raises Broken if it was never queued."""
        need(request_id in self.lives, f"request {request_id} was never queued")
        return self.lives[request_id]

    def branch(self, seq_id: int) -> Branch:
        """The sequence. Raises Broken if it was never admitted."""
        need(seq_id in self.branches, f"sequence {seq_id} was never admitted")
        return self.branches[seq_id]

    def reached(self, branch: Branch) -> int:
        """Tokens that have KV once the step of this batch is sampled."""
        plan = self.scheduled
        if plan is None or self.sampled or branch.seq_id not in plan.seq_ids:
            return branch.computed
        row = plan.seq_ids.index(branch.seq_id)
        return plan.start[row] + plan.n[row]

    def first_branch(self, life: Life, seq_id: int) -> Branch:
        """A request's first sequence, which holds its prompt."""
        return Branch(seq_id, life, list(life.queued.prompt_token_ids), life.prompt)

    def written(self) -> None:
        """What was published for this step is now there, or was withdrawn; the next one's is next."""
        self.stored_now, self.stored_next = self.stored_next, set()
        for life in self.publishing:
            life.before_step, life.before_next = life.before_next, None
        self.publishing = [life for life in self.publishing if life.before_step is not None]

    def block_hash(self, branch: Branch, block: int) -> str:
        """Hash of a block by its definition, from the sequence's own tokens."""
        chain, size = branch.chain, self.size
        while len(chain) <= block:
            i = len(chain)
            tokens = branch.tokens[i * size : (i + 1) * size]
            need(len(tokens) == size, f"block {block} is not full")
            data = (chain[-1] if chain else self.root) + struct.pack(f"<{size}i", *tokens)
            if i == 0 and branch.request.queued.salt is not None:
                data += bytes.fromhex(branch.request.queued.salt)
            chain.append(xxh3_128_digest(data))
        return chain[block].hex()
