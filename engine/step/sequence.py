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
from typing import TYPE_CHECKING

from engine.params import SamplingParams
from engine.step.beam import BeamSearch
from engine.step.detok import Detokenizer

if TYPE_CHECKING:
    from engine.step.runner import Row


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
        "detok",
        "finish_reason",
        "hashes",
        "high_computed",
        "in_flight",
        "num_computed",
        "num_known",
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
        """Tokens whose KV the table's blocks hold; grows when a step is committed."""
        self.high_computed = 0
        """The most that num_computed ever was: what a preemption makes the engine compute again."""
        self.in_flight: list[Row] = []
        """Its rows in steps that are planned and not yet committed, oldest first: a row that is dropped
        (abort, preemption, an end that showed late) leaves, and its output is nobody's."""
        self.num_known = len(self.tokens)
        """Tokens known at submission or at the last resume; what is after them was sampled since."""
        self.num_published = 0
        """Leading table entries that this sequence need not publish (hit or already stored)."""
        self.table_changed_from = 0
        self.detok: Detokenizer | None = None
        """Text of this branch, or None where nobody wants text."""
        self.finish_reason: str | None = None

    @property
    def output_ids(self) -> array[int]:
        """Tokens sampled so far."""
        return self.tokens[self.request.prompt_tokens :]

    @property
    def num_scheduled(self) -> int:
        """Tokens that are computed or in flight: where the next row starts."""
        rows = self.in_flight
        return rows[-1].start + rows[-1].n if rows else self.num_computed

    @property
    def num_tokens(self) -> int:
        """Tokens, those included that steps in flight will sample."""
        rows = self.in_flight
        return len(self.tokens) + sum(row.sample for row in rows) if rows else len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        """The next token to compute is one that was sampled."""
        rows = self.in_flight
        return (rows[-1].start + rows[-1].n if rows else self.num_computed) >= self.num_known

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

    status: Status = Status.WAITING
    branches: list[Sequence] = field(default_factory=list)
    """Those that ended included; of a beam search without the pruned ones, in the end the best alone."""
    parted: bool = False
    """Its prompt is computed, and its samples or beams are branches of their own."""
    search: BeamSearch | None = None
    t_admitted: float | None = None
    t_first_token: float | None = None
    t_last_token: float | None = None
    t_finished: float | None = None
    cached_tokens: int = 0
    """Hit at the first admission."""
    cache_write_tokens: int = 0
    high_published: int = 0
    """Leading blocks that this request has published at least once."""
    stored: list[tuple[int, bytes]] = field(default_factory=list)
    """(block, hash) of everything it published: dropped if its KV proves bad."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def live(self) -> list[Sequence]:
        """Branches that still generate."""
        return [s for s in self.branches if s.finish_reason is None]

    @property
    def fans_out(self) -> bool:
        """Its samples or beams are still one branch: they part at the prompt's first sampled token."""
        return not self.parted and (self.params.n > 1 or self.search is not None)

    @property
    def width(self) -> int:
        """Sequences that it runs at once, or will once its prompt is computed."""
        if self.search is not None:
            return self.search.width
        return self.params.n if self.fans_out else len(self.live)

    @property
    def num_output(self) -> int:
        """Tokens sampled over all branches."""
        return sum(len(s) - self.prompt_tokens for s in self.branches)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_token_ids)
