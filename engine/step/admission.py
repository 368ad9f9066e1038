"""Admission: which requests are refused at once, in words that say what to do.

Owns the checks that come before a request has a sequence: its token ids, its length, its width, the queue. A request
that can run but has to wait is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.step.scheduler import Scheduler


class Admission:
    """The limits of one engine: its vocabulary, its context, its pool and its queue."""

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, vocab_size: int, max_model_len: int
    ) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._most_requests = config.max_num_queued_requests
        self._most_tokens = config.max_num_queued_tokens

    def foreign_token(self, token_ids: Sequence[int]) -> str | None:
        """A message if the smallest or the largest id is not in the vocabulary."""
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self._vocab_size:
                return f"token id {token} is outside the model's vocabulary of {self._vocab_size:,}"
        return None

    def problem(self, tokens: int, params: SamplingParams) -> str | None:
        """Why a prompt with this number of tokens is refused; None if it is not."""
        named = self.foreign_token(params.token_ids)
        return named or self._never_fits(tokens, params) or self._queue_full(tokens)

    def _never_fits(self, tokens: int, params: SamplingParams) -> str | None:
        limit = self._max_model_len
        if tokens == 0:
            return "the prompt is empty: give at least one token"
        if tokens < limit:
            return self._too_wide(tokens, params) if params.n > 1 or params.beam_width > 1 else None
        size, blocks = self._scheduler.paging.block_size, self._scheduler.paging.pool.num_usable
        why = (
            f", which is what {blocks:,} {'block' if blocks == 1 else 'blocks'} of {size} hold"
            if limit == blocks * size
            else ""
        )
        return f"the prompt has {tokens:,} tokens, the context {limit:,}{why}, one of output included: shorten it"

    def _queue_full(self, tokens: int) -> str | None:
        waiting = len(self._scheduler.waiting)
        most = self._most_requests
        if most is not None and waiting >= most:
            return f"the queue is full: {waiting:,} requests wait, --max-num-queued-requests is {most:,}"
        most = self._most_tokens
        if most is None:
            return None
        queued = self._scheduler.queued_tokens
        if queued + tokens <= most:
            return None
        return (
            f"the queue is full: {queued:,} tokens wait, with {tokens:,} more they would exceed "
            f"--max-num-queued-tokens ({most:,})"
        )

    def _too_wide(self, tokens: int, params: SamplingParams) -> str | None:
        """Why the samples or the beams of this prompt could never all run to their ends."""
        width = max(params.n, params.beam_width)
        who = f"n = {width:,} samples" if params.n > 1 else f"{width:,} beams"
        if width > self._scheduler.max_num_seqs:
            most = self._scheduler.max_num_seqs
            return f"{who} run at once, --max-num-seqs is {most:,}: ask for fewer or raise it"
        size, usable = self._scheduler.paging.block_size, self._scheduler.paging.pool.num_usable
        shared = tokens // size
        tail = -(-min(self._max_model_len, tokens + params.max_tokens) // size) - shared
        need = shared + width * tail
        if need <= usable:
            return None
        sum_ = f"{shared:,} of the prompt and {width:,} x {tail:,} of their own"
        return (
            f"{who} take {need:,} blocks ({sum_}), the pool has {usable:,}: ask for fewer or lower max_tokens"
        )
