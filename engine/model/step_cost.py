"""StepCost: how long a step on the CPU will take, so that a chunk never freezes the dashboard.

Owns a cost model with one free number: seconds = scale * work, where work counts multiply-adds of the
linear layers per token and of attention per (query, key) pair. The scale follows what steps really
took, so a busy or slow machine gets smaller chunks. Changes only the chunking, never a result.
"""

from __future__ import annotations

import math

from engine.files.model_config import ModelConfig

SECONDS = 0.4
"""Aim of a step. The bound that is promised is half a second; the rest is for what the model misses."""
_PAIR_PENALTY = 1.6
"""A multiply-add of attention against one of a packed linear: exponentials, ragged edges."""
_SMALLEST = 16
"""Tokens of a step at least, so that prompts advance on any machine."""


class StepCost:
    """Work per token and per attended pair, and the seconds that a unit takes here."""

    def __init__(self, c: ModelConfig) -> None:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._token = c.num_layers * c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
        self._pair = c.num_layers * c.num_heads * c.head_dim * 2 * _PAIR_PENALTY
        self._scale: float | None = None

    def work(self, tokens: int, pairs: int) -> float:
        """Multiply-adds, attention's weighted."""
        return tokens * self._token + pairs * self._pair

    def observe(self, q_lens: list[int], kv_lens: list[int], seconds: float) -> None:
        """Learns from a step. One of few tokens reads weights rather than computes: it can only show that
        the machine is faster than thought, and must, or one slow first step would keep chunks small for ever."""
        tokens = sum(q_lens)
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
        scale = seconds / self.work(tokens, pairs)
        if tokens < 32 and (self._scale is None or scale >= self._scale):
            return
        # The first step of all also compiles and pages in: what comes next replaces it if it's faster.
        new = self._scale is None or scale < self._scale / 2
        self._scale = scale if new or self._scale is None else 0.8 * self._scale + 0.2 * scale

    def tokens_within(self, context: int) -> int:
        """Most tokens after `context` that stay within SECONDS, a multiple of 16."""
        if self._scale is None:
            return 1 << 30
        # n * token + (n * context + n^2 / 2) * pair = work, solved for n.
        a, b, c = self._pair / 2, self._token + context * self._pair, SECONDS / self._scale
        n = (math.sqrt(b * b + 4 * a * c) - b) / (2 * a)
        return max(_SMALLEST, int(n) // 16 * 16)
