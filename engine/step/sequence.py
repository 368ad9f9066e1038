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

from engine.params import SamplingParams
from engine.step.beam import BeamSearch
from engine.step.detok import Detokenizer


class Status(IntEnum):
    """Where a request is. PREEMPTED counts as waiting; FINISHED is final."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


class Sequence:
    """One branch: tokens so far, its block table, how many tokens have KV."""

    __slots__ = (
        "branch",
        "detok",
        "finish_reason",
        "hashes",
        "high_computed",
        "num_computed",
        "num_known",
        "num_published",
        "request",
        "seq_id",
        "table",
        "table_sent",
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
        """The most that num_computed ever was: below it, computing is computing again."""
        self.num_known = len(self.tokens)
        """Tokens known at submission or at the last resume; those after them were sampled since."""
        self.num_published = 0
        """Leading table entries that are cache hits or already stored, and need not be published."""
        self.table_sent = -1
        """Leading table entries that rows have given to the runner and that have not changed since; -1 if the
        next row must bring the whole table."""
        self.detok: Detokenizer | None = None
        """Makes the text of this branch; None if the engine has no tokenizer."""
        self.finish_reason: str | None = None

    @property
    def output_ids(self) -> array[int]:
        """Tokens sampled so far."""
        return self.tokens[self.request.prompt_tokens :]

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
    """Including those that ended. Of a beam search: without the pruned ones, and at the end only the best."""
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
    """Why it fails; set as soon as that is known."""

    def begin(self, branch: Sequence, max_model_len: int) -> None:
        """`branch` is the prompt's own; a beam search starts from it."""
        p = self.params
        if p.beam_width > 1:
            most = min(p.max_tokens, max_model_len - self.prompt_tokens)
            final = self.eos_token_ids | frozenset(p.stop_token_ids)
            self.search = BeamSearch(p.beam_width, most, final, p.length_penalty, p.early_stopping)
            self.search.begin(branch.seq_id)
        self.branches.append(branch)

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
