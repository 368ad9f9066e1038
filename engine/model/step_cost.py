"""StepCost: how long a step on the CPU will take, so that a chunk of a prompt never freezes the dashboard.

The model is seconds = fixed + scale * work. Work counts multiply-adds: of the linear layers per token, of attention
per (query, key) pair. `fixed` is what even the smallest step takes (reading the weights, waiting at barriers). Both
numbers follow what steps really took, so a busy or slow machine gets smaller chunks, but not so small that their
number alone makes it slower. Only the chunks change, never a result.
"""

from __future__ import annotations

import math
from collections import deque

from engine.files.model_config import ModelConfig

SECONDS = 0.4
"""Aim of a step. Half a second is promised; the difference is for what the model does not know."""
_PAIR_PENALTY = 1.6
"""A multiply-add of attention against one of a packed linear: exponentials, ragged edges."""
_SMALLEST = 16
"""Least tokens of a step, so that prompts advance on any machine."""
_DECODES = 8
"""Tokens of a step whose time counts as fixed, and how many of them are remembered."""


class StepCost:
    """Work per token and per attended pair, and the seconds that a unit takes here."""

    def __init__(self, c: ModelConfig) -> None:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._token = c.num_layers * c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
        self._pair = c.num_layers * c.num_heads * c.head_dim * 2 * _PAIR_PENALTY
        self._scale: float | None = None
        self._smallest: deque[float] = deque(maxlen=_DECODES)
        """Times of the newest steps of few tokens."""

    def work(self, tokens: int, pairs: int) -> float:
        """Multiply-adds, attention's weighted."""
        return tokens * self._token + pairs * self._pair

    def observe(self, q_lens: list[int], kv_lens: list[int], seconds: float) -> None:
        """Learns from a step. A step of few tokens mostly reads weights, so it cannot show that the machine is slow.
        It can show that it is faster than thought, and must: one slow first step would keep chunks small for ever."""
        tokens = sum(q_lens)
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
        if tokens <= _DECODES:
            self._smallest.append(seconds)
        scale = max(seconds - self._fixed, seconds / 2) / self.work(tokens, pairs)
        if tokens < 32 and (self._scale is None or scale >= self._scale):
            return
        # The first step of all also compiles and reads pages from the disk. A faster one replaces its time.
        new = self._scale is None or scale < self._scale / 2
        self._scale = scale if new or self._scale is None else 0.8 * self._scale + 0.2 * scale

    def tokens_within(self, context: int) -> int:
        """Most tokens after `context` that stay within SECONDS, a multiple of 16. Where a step's fixed time takes most
        of that: as many as take the same time again, so that the fixed time at most doubles a prompt's."""
        if self._scale is None:
            return 1 << 30
        seconds = max(SECONDS - self._fixed, self._fixed)
        # n * token + (n * context + n^2 / 2) * pair = work, solved for n.
        a, b, c = self._pair / 2, self._token + context * self._pair, seconds / self._scale
        n = (math.sqrt(b * b + 4 * a * c) - b) / (2 * a)
        return max(_SMALLEST, int(n) // 16 * 16)

    @property
    def _fixed(self) -> float:
        """Seconds of the fastest of the newest small steps: one that was held up says nothing about the others."""
        return min(SECONDS, *self._smallest) if len(self._smallest) == _DECODES else 0.0
