"""ToyRunner: checks the contents of the KV cache in microseconds and without a model.

Owns a real paged array of (token, position). It is filled through slot mapping and block copies, as a model's runner
fills K and V. The next token is a hash of everything that is read back through the block table. So a wrong slot, a copy
hazard, a missed table delta or a read of unwritten KV gives a wrong token at once. `expected` computes the same tokens
without paging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.step.runner import Logprob, Plan, Recomputed, StepOutput


class ToyFault(RuntimeError):
    """Raised if a test makes the runner fail."""


def next_token(tokens: np.ndarray, positions: np.ndarray, branch: int, vocab_size: int) -> int:
    """The toy language: depends on every token, its position and the branch. int32 arrays [n]."""
    data = tokens.astype("<i4").tobytes() + positions.astype("<i4").tobytes()
    return xxh3_64_intdigest(data, seed=branch) % vocab_size


def next_logprobs(tokens: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """The toy language's log probabilities [vocab_size] for beams: as easily upset by any wrong token."""
    data = tokens.astype("<i4").tobytes() + positions.astype("<i4").tobytes()
    logits = np.random.default_rng(xxh3_64_intdigest(data)).standard_normal(vocab_size)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def expected(prompt: Sequence[int], count: int, vocab_size: int, branch: int = 0) -> list[int]:
    """`count` tokens after the prompt, computed without paging."""
    tokens = list(prompt)
    for _ in range(count):
        n = len(tokens)
        tokens.append(next_token(np.array(tokens), np.arange(n), branch, vocab_size))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Launched:
    """A step as a device has it: a table for each row, and None for a token that is not sampled yet."""

    plan: Plan
    tables: list[list[int]]
    tokens: list[list[int | None]]
    output: StepOutput | None = None
    error: Exception | None = None


class ToyRunner:
    """A ModelRunner over (token, position) pairs, and an AsyncRunner that computes as late as possible.

    fault: called with the step and "before" or "after" the writes; may raise. bad: called with the sequence id of a
    row; if it returns True, the logits of the row count as not finite. ahead: see AsyncRunner. late: a step is computed
    when it is collected, so that any change by the host in between becomes visible; else it is computed at its launch.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        vocab_size: int = 1000,
        max_model_len: int | None = None,
        fault: Callable[[int, str], None] | None = None,
        bad: Callable[[int], bool] | None = None,
        ahead: int = 0,
        late: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = 8 * block_size
        self.weights_bytes = 0
        self.vocab_size = vocab_size
        room = (num_blocks - 1) * block_size
        self.max_model_len = room if max_model_len is None else min(room, max_model_len)
        self.model_name, self.device, self.dtype = "toy", "cpu", "int32"
        self.ahead = ahead
        self._late = late
        self._fault = fault or (lambda step, when: None)
        self._bad = bad or (lambda seq_id: False)
        self._kv = np.full((num_blocks, block_size, 2), -1, np.int32)
        self._tables: dict[int, list[int]] = {}
        self._queue: deque[_Launched] = deque()
        self._drawn: dict[int, int] = {}
        """Sequence id -> the token that it drew last, as a device would keep it."""

    def audit(self, token_ids: Sequence[int], blocks: list[int]) -> Recomputed:
        """A slot is right or wrong: 0 or 1."""
        size = self.block_size
        want = np.stack((np.array(token_ids, np.int32), np.arange(len(token_ids), dtype=np.int32)), -1)
        wrong = (self._kv[blocks] != want.reshape(len(blocks), size, 2)).any((1, 2))
        return Recomputed(wrong.astype(float).tolist(), 0.0)

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """The whole budget: a toy step takes no time."""
        return max_num_batched_tokens

    def execute(self, plan: Plan) -> StepOutput:
        """Copies, then all writes, then all reads."""
        return self.collect(self.launch(plan))

    def launch(self, plan: Plan) -> _Launched:
        """Takes over the changes of the tables, and the tokens."""
        for seq_id in plan.retired:
            self._tables.pop(seq_id, None)
        tables: list[list[int]] = []
        for row in plan.rows:
            if row.new is not None:
                self._tables[row.seq_id] = []
            table = self._tables[row.seq_id]
            table[row.table_from :] = row.table
            tables.append(table[:])
        tokens = [[*row.tokens, *[None] * (row.n - len(row.tokens))] for row in plan.rows]
        launched = _Launched(plan, tables, tokens)
        self._queue.append(launched)
        if not self._late:
            self._compute()
        return launched

    def collect(self, ticket: _Launched) -> StepOutput:
        """Computes all launched steps up to this one."""
        while ticket.output is None and ticket.error is None:
            self._compute()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.output is not None
        return ticket.output

    def _compute(self) -> None:
        step = self._queue.popleft()
        try:
            step.output = self._step(step)
        except Exception as error:
            step.error = error

    def _step(self, step: _Launched) -> StepOutput:
        plan = step.plan
        self._fault(plan.step, "before")
        for src, dst in plan.copies:
            self._kv[dst] = self._kv[src]
        for row, table, tokens in zip(plan.rows, step.tables, step.tokens, strict=True):
            at = np.arange(row.start, row.start + row.n)
            blocks = np.array(table)[at // self.block_size]
            drawn = self._drawn.get(row.seq_id, 0)
            self._kv[blocks, at % self.block_size, 0] = [drawn if t is None else t for t in tokens]
            self._kv[blocks, at % self.block_size, 1] = at
        self._fault(plan.step, "after")
        token_ids: list[list[int]] = []
        logprobs: dict[int, list[Logprob]] = {}
        bad_rows = []
        for i, (row, table) in enumerate(zip(plan.rows, step.tables, strict=True)):
            if not row.draws or self._bad(row.seq_id):
                if row.draws:
                    bad_rows.append(i)
                token_ids.append([])
                continue
            at = np.arange(row.start + row.n)
            kv = self._kv[np.array(table)[at // self.block_size], at % self.block_size]
            behind = range(row.drafts, -1, -1) if row.drafts else [0] * len(row.draws)
            seen = [kv[: len(kv) - k] for k in behind]
            token_ids.append(
                [
                    next_token(known[:, 0], known[:, 1], branch, self.vocab_size)
                    for known, branch in zip(seen, row.draws, strict=True)
                ]
            )
            self._drawn[row.seq_id] = token_ids[-1][0]
            if row.top:
                all_ = next_logprobs(kv[:, 0], kv[:, 1], self.vocab_size)
                ids = np.argsort(-all_, kind="stable")[: row.top].tolist()
                logprobs[i] = [Logprob(all_[token_ids[-1][0]], ids, all_[ids].tolist())]
        return StepOutput(token_ids, bad_rows, logprobs=logprobs)
