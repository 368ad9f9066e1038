"""Attention problems on the card: random caches in shuffled blocks, and steps that read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.ops.base import AttentionWeights, Packed, RopeTable, StepInput
from engine.ops.fp8 import Fp8Kv, quantise

QWEN3_8B = ModelConfig(
    "qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960, rms_norm_eps=1e-6, qk_norm=True
)  # fmt: skip


@dataclass
class Problem:
    """A step of sequences (tokens computed, tokens attended to) over one layer's cache."""

    model: ModelConfig
    lengths: list[tuple[int, int]]
    block_size: int
    device: torch.device
    dtype: torch.dtype
    poison: bool = True
    """Slots that no sequence holds are NaN."""

    def __post_init__(self) -> None:
        c, size = self.model, self.block_size
        counts = [-(-total // size) for _, total in self.lengths]
        blocks = sum(counts) + 1
        g = np.random.default_rng(0)
        order = g.permutation(np.arange(1, blocks)).astype(np.int32)
        tables = np.zeros((len(counts), max(counts)), np.int32)
        at = 0
        for row, n in enumerate(counts):
            tables[row, :n] = order[at : at + n]
            at += n
        q_lens = [n for n, _ in self.lengths]
        kv_lens = [total for _, total in self.lengths]
        positions = np.concatenate([np.arange(total - n, total) for n, total in self.lengths])
        rows = np.repeat(np.arange(len(counts)), q_lens)
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        ends = np.cumsum(q_lens)

        def to(a: np.ndarray, kind: type) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a.astype(kind))).to(self.device)

        self.batch = StepInput(
            token_ids=to(g.integers(0, c.vocab_size, len(rows)), np.int64),
            positions=to(positions, np.int32), slots=to(slots, np.int64), tables=to(tables, np.int32),
            rows=to(np.arange(len(counts)), np.int32), q_starts=to(np.append(0, ends), np.int32),
            kv_lens=to(np.array(kv_lens), np.int32), logit_rows=to(ends - 1, np.int64),
            q_lens=q_lens, kv_lens_host=kv_lens,
        )  # fmt: skip
        self.blocks = blocks
        self.tokens = len(rows)

    def cache(self) -> Tensor:
        """A random cache [2, block, kv_head, slot, dim]."""
        c = self.model
        kv = torch.randn(2, self.blocks, c.num_kv_heads, self.block_size, c.head_dim, device=self.device).to(
            self.dtype
        )
        if self.poison:
            kv[:, 0] = float("nan")
            for row, total in enumerate(self.batch.kv_lens_host):
                last, used = divmod(total, self.block_size)
                if used:
                    kv[:, int(self.batch.tables[row, last]), :, used:] = float("nan")
        return kv

    def fp8(self, kv: Tensor) -> Fp8Kv:
        """The same cache in FP8."""
        bits, scale = quantise(kv.nan_to_num())
        return Fp8Kv(bits, scale.masked_fill(kv.isnan().any(-1), float("nan")))

    def q(self) -> Tensor:
        """[T, heads, dim]."""
        return torch.randn(self.tokens, self.model.num_heads, self.model.head_dim, device=self.device).to(
            self.dtype
        )

    def weights(self) -> AttentionWeights:
        """Only the fields that attention and the cache write need."""
        c = self.model
        norm = torch.rand(c.head_dim, device=self.device).to(self.dtype) + 0.5
        none = Packed(0, 0, None, None)
        return AttentionWeights(
            norm, none, none, norm, norm, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
        )  # fmt: skip

    def rope(self) -> RopeTable:
        """A RoPE table for all positions of the step."""
        longest = max(self.batch.kv_lens_host)
        frequency = 1e6 ** -(torch.arange(0, self.model.head_dim, 2) / self.model.head_dim)
        angle = (torch.arange(longest)[:, None] * frequency).to(self.device)
        return RopeTable(angle.cos(), angle.sin())
