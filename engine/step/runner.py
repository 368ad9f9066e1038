"""ModelRunner: the seam between the scheduler's plan and whatever computes it.

Owns the Plan and StepOutput types and the protocol. A Plan is data: it can be pickled and sent to another process,
and a runner keeps what it must remember of a sequence under the sequence's id. Implementations: TorchRunner
(engine/model), SimulatedRunner (engine/sim), ToyRunner (tests), which proves KV data without a model. A runner
stores the KV of the whole batch in every layer before any attention reads, and never splits a step so that a
reader precedes its writer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from engine.events import Event
from engine.params import SamplingParams


class NewSequence(NamedTuple):
    """What a runner must know of a sequence that it has no row of. tokens: all that are known, where the request's
    logits are shaped by them, else empty; later ones come with the rows."""

    params: SamplingParams
    branch: int
    prompt_tokens: int
    eos_token_ids: frozenset[int]
    tokens: array[int]


class Row(msgspec.Struct, eq=False, gc=False):
    """One scheduled sequence: compute its tokens [start, start + n), then sample."""

    seq_id: int
    start: int
    n: int
    tokens: array[int]
    """The n tokens to compute; the last one is missing while a step in flight has yet to sample it."""
    draws: tuple[int, ...] = ()
    """Branch number of each token to sample; empty if none is. Several where samples of a prompt part, or one
    before each draft and one after the last."""
    drafts: int = 0
    """How many of the last tokens are drafts, which are not part of the sequence yet."""
    top: int = 0
    """Over 0 for a beam: nothing is drawn, the log probabilities of that many likeliest tokens are returned."""
    table_from: int = 0
    table: Sequence[int] = ()
    """The block table from index `table_from` on, as far as the runner does not know it. What comes before has
    not changed."""
    new: NewSequence | None = None
    """Given at first sight, with the whole table. It replaces what the runner may still hold under this id."""

    @property
    def parts(self) -> bool:
        """The samples become branches of their own."""
        return len(self.draws) > 1 and not self.drafts


@dataclass(slots=True)
class Plan:
    """A step as data. `copies` run in order before any write, a new launch wherever a block id
    repeats; `retired` are sequences whose rows the runner may reuse; they come before the rows."""

    step: int
    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)


class Logprob(NamedTuple):
    """Natural logarithms of probability: the sampled token's, and the k likeliest tokens' in falling order."""

    sampled: float
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class StepOutput:
    """token_ids: per row one for each of its draws, empty where nothing was sampled. bad_rows: rows whose
    logits were not finite (their token_ids are empty). errors: row -> why nothing could be sampled for it, though
    its KV is sound (its token_ids are empty). logprobs: row -> one for each of its token_ids, where the request
    asks; of a beam the one that was asked for, with a token that does not count. Times in seconds."""

    token_ids: list[list[int]]
    bad_rows: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    t_prepare: float = 0.0
    t_forward: float = 0.0
    t_sample: float = 0.0
    t_gpu: float | None = None
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    """The runner's own events, none of the pool's."""
    slowed: bool = False
    """It was measured in a way that took time of its own, which belongs to no request's latency."""


class Recomputed(NamedTuple):
    """errors: of each block, the largest distance of a token's K or V in any head and layer, relative to its
    length; tolerance: what this dtype and these ops may differ by."""

    errors: list[float]
    tolerance: float


class ModelRunner(Protocol):
    """What EngineCore needs of a runner. `execute` may raise: then the step counts as not executed."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    weights_bytes: int
    vocab_size: int
    max_model_len: int
    model_name: str
    device: str
    dtype: str

    def execute(self, plan: Plan) -> StepOutput:
        """Copies, writes, attention, sampling of one step."""
        ...

    def audit(self, token_ids: Sequence[int], blocks: list[int]) -> Recomputed:
        """Computes these tokens outside the cache and compares with what `blocks` hold of them. May raise,
        for lack of memory for example. A runner without KV compares nothing: no errors."""
        ...

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """Tokens a step may take with this longest context, at most max_num_batched_tokens (a CPU
        shrinks it so that a step stays under half a second)."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """A ModelRunner that computes while the host goes on. Steps are computed in the order of their launches, each
    wholly before the next, including copies and KV writes: a block that changes hands is written by its new
    holder later. A row whose token is not sampled yet on the host (`Row.tokens` lacks it) takes the one that
    its sequence drew in the step before."""

    ahead: int
    """Steps that may be launched while one is in flight: 0 or 1."""

    def launch(self, plan: Plan) -> Any:
        """Takes over all that the step needs from the host. May raise: then it is not executed. What it
        returns goes to collect() once, in the same order."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Waits for the step. May raise: then the step counts as not executed."""
        ...
