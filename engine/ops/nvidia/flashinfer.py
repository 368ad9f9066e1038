"""FlashInferOps: TritonOps with FlashInfer's attention, if that is installed.

Owns how our cache and a step are passed to it. Our cache already has FlashInfer's HND layout: K and V of a layer are
passed as a pair. A step becomes page counts, page ids and the tokens in each last page, planned once for all
layers. Steps that only decode use its decode wrapper. All others use its prefill wrapper, which aligns the causal
mask to the last key. The first plan compiles kernels unless flashinfer-jit-cache is installed. Written from its
signatures and tested against a stand-in for it. Not yet run on a card.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.ops.base import RopeTable, StepInput, StepPlan
from engine.ops.fp8 import Kv
from engine.ops.nvidia.attention_library import LibraryOps
from engine.ops.nvidia.triton import StaticPlan

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the partial results of split keys. The wrappers share it: one runs at a time."""
HEAD_DIMS = (64, 128, 256)


@dataclass(slots=True)
class _Plan(StaticPlan):
    """wrapper: FlashInfer's, planned for this step. window: the one that it was planned with."""

    wrapper: Any
    window: int | None


class FlashInferOps(LibraryOps):
    """Raises SetupError for what FlashInfer does not support, and if it is not installed."""

    attention_backend = "flashinfer"
    library = "FlashInfer"

    def connect(self) -> None:
        try:
            self._lib = importlib.import_module("flashinfer")
        except ModuleNotFoundError as e:
            raise self.refusal("is not installed: pip install flashinfer-python, or leave it out") from e
        except (ImportError, OSError, RuntimeError) as e:  # built for another torch
            raise self.refusal(f"does not load ({e!s:.60}): reinstall it or leave it out") from e
        self._workspace: Tensor | None = None
        self._decode: Any = None
        self._prefill: Any = None
        self._copied = torch.cuda.Event() if self.device.type == "cuda" else None
        """Recorded after each plan: the wrapper's pinned memory can be written again once it has passed."""

    def has_kernel(self, head_dim: int) -> bool:
        return head_dim in HEAD_DIMS

    # ------------------------------------------------------------------------------ once a step

    def plan(self, batch: StepInput, rope: RopeTable, window: int | None = None) -> StepPlan:
        """Only one plan is valid at a time: the next one uses the same wrapper."""
        pages = self._pages(batch, batch.kv_lens_host)
        if max(batch.q_lens, default=1) == 1:
            if self._decode is None:
                # With tensor cores there is a kernel for every ratio of query heads to KV heads.
                self._decode = self._lib.BatchDecodeWithPagedKVCacheWrapper(
                    self._room(), "HND", use_tensor_cores=True
                )
            self._plan(self._decode, *pages, *self._shape(), **self._how(window))
            return _Plan(batch, rope, self._decode, window)
        if self._prefill is None:
            self._prefill = self._lib.BatchPrefillWithPagedKVCacheWrapper(self._room(), "HND")
        starts = torch.tensor([0, *np.cumsum(batch.q_lens).tolist()], dtype=torch.int32)
        self._plan(self._prefill, starts, *pages, *self._shape(), causal=True, **self._how(window))
        return _Plan(batch, rope, self._prefill, window)

    def static_plan(self, batch: StepInput, rope: RopeTable) -> StaticPlan:
        """As in TritonOps. The plan has a decode wrapper of its own, with buffers that a graph can read."""
        rows, width = len(batch.q_lens), batch.tables.shape[1]
        sizes = (rows + 1, rows * width, rows)
        indptr, indices, last = (torch.zeros(n, dtype=torch.int32, device=self.device) for n in sizes)
        wrapper = self._lib.BatchDecodeWithPagedKVCacheWrapper(
            self._room(), "HND", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
        )  # fmt: skip
        plan = _Plan(batch, rope, wrapper, None)
        self.fill(plan, [])
        return plan

    def fill(self, plan: StaticPlan, kv_lens: list[int], sent: Tensor | None = None) -> None:
        """Plans again, into the wrapper's buffers. Rows that are padding read the first token of some row, and their
        result is not used."""
        assert isinstance(plan, _Plan)
        padded = kv_lens + [1] * (len(plan.batch.q_lens) - len(kv_lens))
        self._plan(plan.wrapper, *self._pages(plan.batch, padded), *self._shape(), **self._how(None))

    def _plan(self, wrapper: Any, *what: Any, **how: Any) -> None:
        """Another step may be in flight. Its plan was copied before its kernels started, so this waits at most for
        the step before that one."""
        if self._copied:
            self._copied.synchronize()
        wrapper.plan(*what, **how)
        if self._copied:
            self._copied.record()

    def _pages(self, batch: StepInput, kv_lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(page sums int32 [S + 1], page ids int32, tokens in the last page int32 [S]). The first and the last are on
        the host, because FlashInfer plans there and would have to wait for the device."""
        lens = np.asarray(kv_lens, np.int64)
        counts = -(-lens // self.block_size)
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(lens)), counts)
        column = np.arange(len(row)) - np.repeat(ends - counts, counts)
        at = self._upload(np.stack((row, column)))
        ids = batch.tables[batch.rows[at[0]], at[1]]
        indptr = torch.from_numpy(np.append(0, ends).astype(np.int32))
        last = torch.from_numpy((lens - (counts - 1) * self.block_size).astype(np.int32))
        return indptr, ids, last

    def _shape(self) -> tuple[int, int, int, int]:
        return self.heads, self._kv_heads, self._dim, self.block_size

    def _how(self, window: int | None) -> dict[str, Any]:
        # Their window does not count the token itself; ours does.
        left = -1 if window is None else window - 1
        return {"window_left": left, "q_data_type": self.dtype, "kv_data_type": self.dtype}

    def _room(self) -> Tensor:
        if self._workspace is None:  # zeroed: some of its kernels keep counters in it
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return self._workspace

    # ------------------------------------------------------------------------- small operations

    def attend(
        self, q: Tensor, kv: Kv, plan: StepPlan, scale: float, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """See engine.ops.reference.attend. Here scale is 1 / sqrt(head_dim), and there is no soft-cap."""
        assert isinstance(plan, _Plan) and isinstance(kv, Tensor)
        assert softcap is None and window == plan.window and scale == self._dim**-0.5
        out: Tensor = plan.wrapper.run(q, (kv[0], kv[1]))
        return out
