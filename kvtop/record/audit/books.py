"""Books: what an audit remembers of a stream, and the one way a law breaks.

Owns the records of requests and their branches, built from the events alone, and a block's hash by its
definition.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from engine import events as ev
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
    """Shared by the laws of the pool, of requests and of steps."""

    def __init__(self, started: ev.EngineStarted) -> None:
        need(started.schema <= ev.SCHEMA, f"schema {started.schema} is newer than {ev.SCHEMA}")
        need(2 <= started.num_blocks <= 1 << 24, f"{started.num_blocks} blocks cannot be")
        need(1 <= started.block_size <= 1 << 16, f"blocks of {started.block_size} tokens cannot be")
        self.size = started.block_size
        self.mirror = PoolMirror(started.num_blocks, started.block_size)
        self.redacted = started.hash_seed is None
        self.lives: dict[int, Life] = {}
        self.unfinished: dict[int, Life] = {}
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
        """Blocks that are published and not yet written: by the step that is sampled next."""
        self._stored_next: set[int] = set()
        """By the one after it."""
        self._publishing: list[Life] = []
        self._scheduled: ev.StepScheduled | None = None
        self._drafts: dict[int, tuple[int, int]] = {}
        """Drafts of a sequence in this step, and how many its tokens say were accepted."""
        self._born: dict[int, int] = {}
        """Branches that parted in this step, and the tokens that their parents have computed in it."""
        self._sampled = self._completed = self._failed = False
        self._closing: ev.PoolSnapshot | None = None

    def _life(self, request_id: int) -> Life:
        need(request_id in self.lives, f"request {request_id} was never queued")
        return self.lives[request_id]

    def _branch(self, seq_id: int) -> Branch:
        need(seq_id in self._branches, f"sequence {seq_id} was never admitted")
        return self._branches[seq_id]

    def _reached(self, branch: Branch) -> int:
        """Tokens that have KV once the step that is told is sampled."""
        plan = self._scheduled
        if plan is None or self._sampled or branch.seq_id not in plan.seq_ids:
            return branch.computed
        row = plan.seq_ids.index(branch.seq_id)
        return plan.start[row] + plan.n[row]

    def _first(self, life: Life, seq_id: int) -> Branch:
        return Branch(seq_id, life, list(life.queued.prompt_token_ids), life.prompt)

    def _written(self) -> None:
        """What was published for this step is now there, or was withdrawn; the next one's is next."""
        self._stored_now, self._stored_next = self._stored_next, set()
        for life in self._publishing:
            life.before_step, life.before_next = life.before_next, None
        self._publishing = [life for life in self._publishing if life.before_step is not None]

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
