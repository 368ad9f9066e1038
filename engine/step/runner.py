"""ModelRunner: the interface between the plan of a step and the code that computes it.

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
    """What a runner needs to know about a new sequence.

    tokens: all known tokens if they shape the logits of the request, else empty. Later tokens come with the rows.
    """

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
    """For a beam: how many likeliest tokens to return with their log probabilities; nothing is drawn. Else 0."""
    table_from: int = 0
    table: Sequence[int] = ()
    """The part of the block table from index `table_from` on that the runner does not know. The part before it has not
    changed."""
    new: NewSequence | None = None
    """Given with the first row of the sequence and the whole table. It replaces older data under this id."""

    @property
    def parts(self) -> bool:
        """Each sample begins a branch."""
        return len(self.draws) > 1 and not self.drafts


@dataclass(slots=True)
class Plan:
    """A step as data.

    copies: run in order before any write; a block id that occurs again needs a new launch. retired: sequences whose
    rows the runner may reuse; they are handled before the rows.
    """

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
    """The result of a step. Times in seconds.

    token_ids: for each row, one token per draw. bad_rows: rows whose logits were not finite. errors: row -> why nothing
    could be sampled, although its KV is right. The token_ids of rows in bad_rows and errors are empty. logprobs: row ->
    one for each of its token_ids, if the request asks; for a beam, one whose sampled token does not count.
    """

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
    """Measuring it made it slower, so its time counts in no latency."""


class Recomputed(NamedTuple):
    """errors: for each block, the largest relative distance of a token's K or V in any head and layer. tolerance: the
    largest distance that this dtype and these ops allow."""

    errors: list[float]
    tolerance: float


class ModelRunner(Protocol):
    """What EngineCore needs. If `execute` raises, the step counts as not executed."""

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
        """Computes these tokens outside the cache and compares the result with `blocks`. May raise, for example if
        there is too little memory. A runner without KV compares nothing and returns no errors."""
        ...

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """Tokens that a step may compute with this longest context, at most max_num_batched_tokens. On a CPU there are
        fewer, so that a step takes less than half a second."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """A ModelRunner that computes while the host continues.

    Steps are computed in the order of their launches, each completely before the next, including copies and KV writes.
    So if a block gets a new owner, the new owner writes it later. A row whose last token is missing in `Row.tokens`
    takes the token that its sequence drew in the step before.
    """

    ahead: int
    """Steps that may be launched while one is in flight: 0 or 1."""

    def launch(self, plan: Plan) -> Any:
        """Takes over everything that the step needs from the host. If it raises, the step is not executed. Its result
        is passed to collect() once, in the same order."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Waits for the step. If it raises, the step counts as not executed."""
        ...
