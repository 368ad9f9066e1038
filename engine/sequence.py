"""Request, the unit of admission, preemption, abort and refusal; Sequence, one branch of it, the unit
of block tables and execution.

Each owns its numbers: a Sequence its tokens, table and num_computed; a Request its branches, status,
instants and usage. Only paging changes a table, only the scheduler and core a status.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from engine.params import SamplingParams


class Status(IntEnum):
    """Where a request is. PREEMPTED counts as waiting; FINISHED never comes back."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


class Sequence:
    """One branch: tokens so far, its block table, how many tokens have KV.

    `table_changed_from` is for the runner's persistent rows: the lowest table index that changed
    since the runner last copied the table; the runner sets it to len(table).
    """

    __slots__ = (
        "branch",
        "hashes",
        "num_computed",
        "num_published",
        "request",
        "seq_id",
        "table",
        "table_changed_from",
        "tokens",
    )

    def __init__(self, seq_id: int, request: Request, branch: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.branch = branch
        """0 for the prompt's own branch; with the seed and a position it names a sampling draw."""
        self.tokens: array[int] = array("i", request.prompt_token_ids)
        """Prompt and output token ids."""
        self.table: list[int] = []
        """Physical block of each logical block."""
        self.hashes: list[bytes] = []
        """Chain hashes of the full blocks of `tokens`, as far as they were needed."""
        self.num_computed = 0
        """Tokens whose KV is in the table's blocks (or scheduled to be, between begin and finish)."""
        self.num_published = 0
        """Leading table entries that this sequence need not publish (hit or already stored)."""
        self.table_changed_from = 0

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Request:
    """What a caller asked for, and what became of it. Instants are on the engine's clock."""

    request_id: int
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    t_arrival: float
    priority: int = 0
    salt: bytes | None = None
    """Digest (16 bytes) that the hash of block 0 covers."""
    conversation: int | None = None
    spans: list[tuple[int, int, str, str]] = field(default_factory=list)
    template_rewrote_history: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Any = None
    """engine.detok.Detokenizer of branch 0, or None where nobody wants text."""

    status: Status = Status.WAITING
    branches: list[Sequence] = field(default_factory=list)
    t_admitted: float | None = None
    t_first_token: float | None = None
    t_last_token: float | None = None
    t_finished: float | None = None
    cached_tokens: int = 0
    """Hit at the first admission."""
    cache_write_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    num_output: int = 0
    admitted_once: bool = False
    finish_reason: str | None = None
    error: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_token_ids)
