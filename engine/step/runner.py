"""ModelRunner: the seam between the scheduler's plan and whatever computes it.

Owns the Plan and StepOutput types and the protocol. Implementations: TorchRunner (torch_runner.py),
ToyRunner (toy.py, proves KV data without a model). A runner stores the KV of the whole batch
in every layer before any attention reads, and never splits a step so that a reader precedes its writer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.events import Event
from engine.step.sequence import Sequence


@dataclass(slots=True)
class Row:
    """One scheduled sequence: compute its tokens [start, start + n); sample one more if `sample`, or one
    for each of `branches` where the samples of a prompt part here."""

    seq: Sequence
    start: int
    n: int
    sample: bool
    branches: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    """The last of the n tokens, which are not the sequence's yet: one is sampled before each and one after."""
    top: int = 0
    """A beam: nothing is drawn, the log probabilities of so many likeliest tokens are told."""

    @property
    def draws(self) -> tuple[int, ...]:
        """Branch number of each token to sample; empty if none is."""
        if not self.sample:
            return ()
        return self.branches or (self.seq.branch,) * (1 + len(self.drafts))

    @property
    def tokens(self) -> array[int]:
        """The n tokens to compute; without the last one while a step in flight has yet to sample it."""
        end = self.start + self.n - len(self.drafts)
        return self.seq.tokens[self.start : end] + array("i", self.drafts)


@dataclass(slots=True)
class Plan:
    """A step as data. `copies` run in order before any write, a new launch wherever a block id
    repeats; `retired` are sequences whose rows the runner may reuse."""

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
    logits were not finite (their token_ids are empty). logprobs: row -> one for each of its token_ids,
    where the request asks; of a beam the one that was asked for, beside a token that does not count.
    Times in seconds."""

    token_ids: list[list[int]]
    bad_rows: list[int] = field(default_factory=list)
    t_prepare: float = 0.0
    t_forward: float = 0.0
    t_sample: float = 0.0
    t_gpu: float | None = None
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    """What the runner has to tell: its own, none of the pool's."""
    slowed: bool = False
    """It was measured in a way that took time of its own, which is nobody's latency."""


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

    def audit(self, token_ids: SequenceOf[int], blocks: list[int]) -> Recomputed:
        """Computes these tokens beside the cache and compares with what `blocks` hold of them. May raise,
        for lack of memory for example. A runner without KV compares nothing: no errors."""
        ...

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """Tokens a step may take with this longest context, at most max_num_batched_tokens (a CPU
        shrinks it so that a step stays under half a second)."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """A ModelRunner that computes beside the host. Steps are computed in the order of their launches, each
    wholly before the next, copies and KV writes included: a block that changes hands is written by its new
    holder later. A row whose token is not sampled yet on the host (`Row.tokens` lacks it) takes the one that
    its sequence drew in the step before."""

    ahead: int
    """Steps that may be launched beside the one in flight: 0 or 1."""

    def launch(self, plan: Plan) -> Any:
        """Takes over all that the step needs from the host. May raise: then it is not executed. What it
        returns goes to collect() once, in the same order."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Waits for the step. May raise: then the step counts as not executed."""
        ...
