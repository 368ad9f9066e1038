"""Books: what the events of a stream have said so far, shared by all laws.

Owns the records of requests and their branches, built from the events alone, the definition of a block's hash, and the
error of a broken law. What only one law needs, that law keeps itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from engine import events as ev
from kvtop.record.door import MOST_BLOCK_SIZE, MOST_BLOCKS
from kvtop.state.pool_mirror import PoolMirror


class Broken(Exception):
    """An event breaks a law."""


def need(ok: bool, text: str) -> None:
    """Raise Broken(text) unless ok."""
    if not ok:
        raise Broken(text)


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence.

    computed: tokens with KV. high: the most that `computed` ever was. known: tokens at its admission. published: blocks
    that are stored. bad: its last logits were not finite. pruned: a beam that was dropped. chain: hashes of its blocks.
    """

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
    """The branch that an admission looks up: the first that still generates."""
    lookup: ev.PrefixLookup | None = None
    looked_up: bool = False
    cached: int | None = None
    output: int = 0
    preemptions: int = 0
    recomputed: int = 0
    cache_write: int = 0
    high_published: int = 0
    searches: bool = False
    """It is a beam search: beams wait for each other, and dropped beams do not count at the end."""
    before_step: tuple[int, int] | None = None
    """(cache_write, high_published) before it published blocks for the step that is sampled next."""
    before_next: tuple[int, int] | None = None
    """The same for the step after that, if one is planned ahead."""


class Books:
    """Raises Broken for an impossible EngineStarted."""

    def __init__(self, started: ev.EngineStarted) -> None:
        need(started.schema <= ev.SCHEMA, f"schema {started.schema} is newer than {ev.SCHEMA}")
        need(2 <= started.num_blocks <= MOST_BLOCKS, f"{started.num_blocks} blocks are impossible")
        need(
            1 <= started.block_size <= MOST_BLOCK_SIZE,
            f"blocks of {started.block_size} tokens are impossible",
        )
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
        """Published blocks that the step that is sampled next will write."""
        self.stored_next: set[int] = set()
        """Published blocks that the step after it will write."""
        self.publishing: list[Life] = []
        self.scheduled: ev.StepScheduled | None = None
        self.born: dict[int, int] = {}
        """Branches that were forked in this step -> tokens that the parent has computed after it."""
        self.sampled = self.completed = self.failed = False
        self.t_before = self.t = 0.0
        """Time of the batch before, and of this batch."""
        self.knobs = started.knobs
        self.max_model_len = started.max_model_len

    def begin_batch(self, batch: ev.StepBatch) -> None:
        """The events of this batch come next."""
        self.t_before, self.t = self.t, batch.t

    def end_batch(self) -> None:
        """Every law has checked the batch."""
        self.scheduled = None
        self.sampled = self.completed = self.failed = False

    def resync(self, s: ev.PoolSnapshot) -> None:
        """Take over the snapshot after a broken law, so that the same error is not reported again."""
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
        """The first sequence of a request, which has its prompt."""
        return Branch(seq_id, life, list(life.queued.prompt_token_ids), life.prompt)

    def written(self) -> None:
        """The blocks published for this step are written or withdrawn. Those of the next step become the current
        ones."""
        self.stored_now, self.stored_next = self.stored_next, set()
        for life in self.publishing:
            life.before_step, life.before_next = life.before_next, None
        self.publishing = [life for life in self.publishing if life.before_step is not None]

    def block_hash(self, branch: Branch, block: int) -> str:
        """Hash of a block, computed by its definition from the tokens of the sequence."""
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
