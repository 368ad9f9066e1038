"""The values that both engines get and return, in terms of neither.

Owns the set-up of a run, a request, what a step scheduled, and the pool after the step. `ours` and `theirs` translate.
The tests compare only these values, so this file shows exactly what is compared. Requests have the number that the
driver gave them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

HASH_SEED = 7
VOCAB = 1000


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a run. max_model_len None: as much as the pool holds."""

    num_blocks: int = 65
    block_size: int = 16
    max_model_len: int | None = None
    budget: int = 2048
    max_num_seqs: int = 16
    chunked: bool = True
    caching: bool = True
    threshold: int = 0
    adaptive: bool = False
    priority: bool = False
    watermark: float = 0.0

    @property
    def room(self) -> int:
        """Tokens of all usable blocks. Block 0 is the null block on both sides."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def limit(self) -> int:
        """The longest sequence that can ever be finished."""
        return self.room if self.max_model_len is None else min(self.room, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `stop`: token ids that end it."""

    id: int
    tokens: list[int]
    max_tokens: int = 16
    salt: str | None = None
    priority: int = 0
    stop: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """The decisions of one call of the scheduler, in the order in which they were made."""

    scheduled: list[tuple[int, int, int]] = field(default_factory=list)
    """(request, first token, how many)."""
    admitted: list[tuple[int, int, bool]] = field(default_factory=list)
    """(request, tokens read from the cache, came back from preemption)."""
    preempted: list[int] = field(default_factory=list)
    cache: list[tuple[str, str, str, tuple[int, ...]]] = field(default_factory=list)
    """Changes of the hash table since the last step, one per block: (stored, hash, parent, tokens),
    (removed, hash, "", ()) or (cleared, "", "", ())."""


@dataclass(slots=True)
class State:
    """Queues and pool between two steps, block by block."""

    waiting: list[int]
    running: list[int]
    queue: list[int]
    """Free queue, evicted first at the front."""
    refs: dict[int, int]
    hashes: dict[int, str]
    num_hashes: int
    """Distinct hashes in the table."""
    tables: dict[int, list[int]]
    computed: dict[int, int]
    """Tokens with KV, of the requests that hold blocks."""
    outputs: dict[int, list[int]]
    finished: dict[int, str]


@dataclass(slots=True)
class Counts:
    """Tokens that a run looked up in the prefix cache: at first admissions, and after preemptions."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class Engine(Protocol):
    """One side of the comparison."""

    def add(self, ask: Ask) -> None: ...

    def abort(self, request: int) -> None: ...

    def reset(self, running: bool) -> bool:
        """Drops the cache. With `running` all running requests are preempted first."""
        ...

    def begin(self) -> Step: ...

    def state(self) -> State: ...

    def counts(self) -> Counts: ...


def differences(ours: Any, theirs: Any) -> Iterator[str]:
    """One line for each field in which the two values differ."""
    for f in fields(ours):
        a, b = getattr(ours, f.name), getattr(theirs, f.name)
        if a == b:
            continue
        if isinstance(a, dict):
            keys = [k for k in {**a, **b} if a.get(k) != b.get(k)]
            a, b = {k: a.get(k) for k in keys}, {k: b.get(k) for k in keys}
        yield f"{f.name}: ours {a}, theirs {b}"
