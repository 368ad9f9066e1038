"""FlashAttnOps: TritonOps with FlashAttention's attention, if that is installed.

Owns how our cache and a step are passed to it. On Hopper it uses FlashAttention 3 (`flash_attn_interface`) if that
is installed, which accepts pages of any size. Otherwise it uses FlashAttention 2 (`flash_attn`), whose pages are
multiples of 256 tokens. Both read K and V as [block, slot, kv_head, dim] by strides, so our cache is passed as a
transposed view. Both align the causal mask to the last key, which a chunk after a prefix needs. Written from their
signatures and tested against stand-ins for them. Not yet run on a card.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.ops.base import RopeTable, StepInput, StepPlan
from engine.ops.fp8 import Kv
from engine.ops.nvidia.attention_library import LibraryOps
from engine.ops.nvidia.triton import StaticPlan

PAGE_2 = 256
"""A page of FlashAttention 2 is a multiple of this many tokens."""


@dataclass(slots=True)
class _Plan(StaticPlan):
    """tables int32 [S, blocks]: those of the step's sequences. kv_starts int32 [S + 1]: sums of their kv_lens."""

    tables: Tensor
    kv_starts: Tensor
    most_q: int
    most_kv: int


class FlashAttnOps(LibraryOps):
    """Raises SetupError for what FlashAttention does not support, and if it is not installed."""

    attention_backend = "flash-attn"
    library = "FlashAttention"

    def connect(self) -> None:
        self._third = self._load("flash_attn_interface") if self.capability[0] == 9 else None
        self._second = None if self._third else self._load("flash_attn")
        if self._third is None and self._second is None:
            hopper = " (or FlashAttention 3)" if self.capability[0] == 9 else ""
            raise self.refusal(f"is not installed: pip install flash-attn{hopper}, or leave it out")
        if self._third is None and self.block_size % PAGE_2:
            raise self.refusal(
                f"2 pages KV by multiples of {PAGE_2} tokens: say --block-size {PAGE_2}, or leave it out"
            )

    def _load(self, name: str) -> Any:
        """The module, or None if it is not installed."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            return None
        except (ImportError, OSError) as e:  # built for another torch
            raise self.refusal(
                f"is installed but does not load ({e!s:.60}): reinstall it or leave it out"
            ) from e

    def has_kernel(self, head_dim: int) -> bool:
        return head_dim % 8 == 0

    # ------------------------------------------------------------------------------ once a step

    def plan(self, batch: StepInput, rope: RopeTable, window: int | None = None) -> StepPlan:
        most = max(batch.kv_lens_host, default=0)
        starts = torch.zeros(len(batch.q_lens) + 1, dtype=torch.int32, device=self.device)
        plan = _Plan(batch, rope, batch.tables[batch.rows], starts, max(batch.q_lens, default=0), most)
        torch.cumsum(batch.kv_lens, 0, out=starts[1:])
        return plan

    def static_plan(self, batch: StepInput, rope: RopeTable) -> StaticPlan:
        """As in TritonOps. In a graph the longest sequence is a constant: what a table can hold."""
        rows, width = len(batch.q_lens), batch.tables.shape[1]
        tables = torch.zeros((rows, width), dtype=torch.int32, device=self.device)
        starts = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        plan = _Plan(batch, rope, tables, starts, 1, 0)
        self.fill(plan, [])
        return plan

    def fill(self, plan: StaticPlan, kv_lens: list[int], sent: Tensor | None = None) -> None:
        """Rewrites the tables and lengths of the rows from what is on the device already. Rows that are padding read
        the first tokens of some row, and their result is not used."""
        assert isinstance(plan, _Plan)
        torch.index_select(plan.batch.tables, 0, plan.batch.rows, out=plan.tables)
        torch.cumsum(plan.batch.kv_lens, 0, out=plan.kv_starts[1:])

    # ------------------------------------------------------------------------- small operations

    def attend(
        self, q: Tensor, kv: Kv, plan: StepPlan, scale: float, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """See engine.ops.reference.attend."""
        assert isinstance(plan, _Plan) and isinstance(kv, Tensor)
        b = plan.batch
        k, v = (half.transpose(1, 2) for half in kv.unbind(0))
        more: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            # Their window does not count the token itself; ours does.
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
        }
        out: Tensor
        if self._third:
            out = self._third.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=b.kv_lens, page_table=plan.tables, cu_seqlens_q=b.q_starts,
                max_seqlen_q=plan.most_q, **more,
            )  # fmt: skip
        else:
            most = plan.most_kv or plan.tables.shape[1] * kv.shape[3]
            out = self._second.flash_attn_varlen_func(  # type: ignore[union-attr]
                q, k, v, cu_seqlens_q=b.q_starts, cu_seqlens_k=plan.kv_starts, max_seqlen_q=plan.most_q,
                max_seqlen_k=most, block_table=plan.tables, **more,
            )  # fmt: skip
        return out
