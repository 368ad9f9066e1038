"""Stand-ins for flash_attn, flash_attn_interface and flashinfer: their documented signatures and demands, over torch.

Each refuses what the real one refuses (dtypes of indices, sizes of pages, strides, plans before runs, buffers of a
graph), and computes in float32 what its documentation says, so that a layout, an index or a mask that is reported
wrongly comes out wrong.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

I32 = torch.int32


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, softcap: float, causal: bool
) -> Tensor:
    """q [n, heads, dim], k and v [m, kv_heads, dim]; masks aligned to the bottom right; left: keys before the
    query's own that it sees, -1 for all."""
    n, m, groups = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    at, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    hidden = (key > at) if causal else torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (key < at - left)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(q.dtype)


def _indices(*tensors: Tensor) -> None:
    for t in tensors:
        assert t.dtype == I32 and t.stride(-1) == 1, (t.dtype, t.stride())


def _paged(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: list[int], tables: Tensor, **how: Any
) -> Tensor:
    """k and v [block, slot, kv_head, dim]."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.dtype == k.dtype == v.dtype and tables.dim() == 2 and len(tables) == len(lens) == len(starts) - 1
    out = torch.empty_like(q)
    for i, length in enumerate(lens):
        pages = tables[i, : -(-length // k.shape[1])].long()
        rows = slice(int(starts[i]), int(starts[i + 1]))
        own = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        out[rows] = attention(q[rows], *own, **how)
    return out


def flash_attn_2(module: ModuleType) -> None:
    """flash_attn 2.8."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert block_table is not None and softmax_scale is not None and causal
        _indices(cu_seqlens_q, cu_seqlens_k, block_table)
        assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        lens = cu_seqlens_k.diff().tolist()
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= max(lens)
        left, right = window_size
        assert right == (0 if left >= 0 else -1)
        how = {"scale": softmax_scale, "left": left, "softcap": softcap, "causal": causal}
        return _paged(q, k, v, cu_seqlens_q, lens, block_table, **how)

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]


def flash_attn_3(module: ModuleType) -> None:
    """flash_attn_interface of the hopper folder."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
        rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
        rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 0,
    ) -> Tensor:  # fmt: skip
        assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None and causal
        _indices(cache_seqlens, page_table, cu_seqlens_q)
        assert max_seqlen_q is not None and max_seqlen_q >= cu_seqlens_q.diff().max()
        left, right = window_size
        assert right == (0 if left >= 0 else -1)
        how = {"scale": softmax_scale, "left": left, "softcap": softcap, "causal": causal}
        return _paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens.tolist(), page_table, **how)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]


class _Wrapper:
    """What FlashInfer's two wrappers share. What `run` reads of the pages is on the device: in a graph's mode
    the buffers that it was made with."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"
        self._planned: dict[str, Any] = {}
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def _plan(
        self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int,
        head_dim: int, page_size: int, *, causal: bool, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        _indices(starts, indptr, indices, last)
        assert head_dim in (64, 128, 256) and isinstance(kv_data_type, torch.dtype)
        assert indptr.device.type == last.device.type == "cpu", "plan would wait for the device"
        assert len(indptr) == len(last) + 1 == len(starts) and indptr[0] == 0 and indptr[-1] == len(indices)
        assert (indptr.diff() >= 1).all() and (last >= 1).all() and (last <= page_size).all()
        scale = sm_scale or head_dim**-0.5
        self._planned = {
            "starts": starts, "causal": causal, "left": window_left, "scale": scale, "page": page_size,
            "softcap": logits_soft_cap or 0.0, "dtype": (q_data_type, kv_data_type),
            "shape": (heads, kv_heads, head_dim),
        }  # fmt: skip
        if self._buffers is None:
            self._read = (indptr.clone(), indices.clone(), last.clone())
            return
        assert len(last) == len(self._buffers[2]), "the batch size is fixed in cudagraph mode"
        assert len(indices) <= len(self._buffers[1])
        for to, given in zip(self._buffers, (indptr, indices, last), strict=True):
            to[: len(given)] = given
        self._read = self._buffers

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        p, (indptr, indices, last) = self._planned, self._read
        heads, kv_heads, dim = p["shape"]
        k, v = paged_kv_cache
        assert k.shape[1:] == v.shape[1:] == (kv_heads, p["page"], dim) and q.shape[1:] == (heads, dim)
        assert (q.dtype, k.dtype) == p["dtype"] and int(p["starts"][-1]) == len(q)
        out = torch.empty_like(q)
        for i in range(len(last)):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * p["page"] + int(last[i])
            own = (x[pages].transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
            rows = slice(int(p["starts"][i]), int(p["starts"][i + 1]))
            out[rows] = attention(q[rows], *own, p["scale"], p["left"], p["softcap"], p["causal"])
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto", jit_args: None = None,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, **how: Any,
    ) -> None:  # fmt: skip
        starts = torch.arange(len(indptr), dtype=I32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(starts, indptr, indices, last_page_len, *shape, causal=False, **how)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, *pages, *shape, causal=causal, **how)


def flashinfer(module: ModuleType) -> None:
    """flashinfer 0.2 to 0.6."""
    for cls in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, cls.__name__, cls)


LIBRARIES = {"flash_attn": flash_attn_2, "flash_attn_interface": flash_attn_3, "flashinfer": flashinfer}
