"""TritonOps: our own Triton kernels and the GEMMs of cuBLAS, on NVIDIA GPUs from sm_80 on.

Owns the work list of a step and the choice of the kernel in engine.ops.nvidia.kernels. Invariant: each operation
gives what ReferenceOps gives, up to rounding; tests compare every kernel. With TRITON_INTERPRET=1 it runs on a
CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.ops.base import AttentionWeights, Extras, Packed, RopeTable, StepInput, StepPlan, launches
from engine.ops.fp8 import Fp8Kv, Kv, parts
from engine.ops.nvidia import scaled
from engine.ops.nvidia.kernels import attention, copy, draw, norm, qkv, quantised, silu
from engine.ops.nvidia.kernels.combine import combine
from engine.ops.nvidia.kernels.cutoff import cutoffs
from engine.ops.nvidia.split import MOST_SPLITS, work_list
from engine.ops.nvidia.tiles import Tiles, tiles_for
from engine.ops.reference import ReferenceOps
from engine.ops.sampler import SampleRows
from engine.ops.weights import Fp8, Quantization


@dataclass(slots=True)
class _Group:
    """Sequences that share a tile size. work int32 [W, 5] and merges int32 [M, 4] are those of
    engine.ops.nvidia.split, on the device. parts: memory for their partial results; the layers use it in turn."""

    tile: attention.Tile
    work: Tensor
    merges: Tensor
    parts: tuple[Tensor, Tensor] | None
    most: int


@dataclass(slots=True)
class _List:
    """A group's work list and its merges on the host, one after the other. split: where the merges begin. parts:
    how many pieces need memory for a partial result."""

    tile: attention.Tile
    host: NDArray[np.int32]
    split: int
    parts: int
    most: int


@dataclass(slots=True)
class _Plan(StepPlan):
    groups: list[_Group]


@dataclass(slots=True)
class StaticPlan(StepPlan):
    """A plan for decode steps. `fill` rewrites it in place."""


@dataclass(slots=True)
class _StaticPlan(_Plan, StaticPlan):
    """device: the memory from which the kernels read the work list and the merges."""

    device: Tensor


class TritonOps(ReferenceOps):
    """For bfloat16 and float32. Raises SetupError for what no kernel supports."""

    name = "triton"
    attention_backend = "triton"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        model: ModelConfig,
        quantization: Quantization | None = None,
        *,
        fp8_kv: bool = False,
    ) -> None:
        super().__init__(device, dtype, quantization)
        refuse(device, dtype, model)
        self._kv_heads = model.num_kv_heads
        self._dim = model.head_dim
        self._groups = model.num_heads // model.num_kv_heads
        capability, processors = (9, 0), 1
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            capability, processors = (found.major, found.minor), found.multi_processor_count
        self.capability = capability
        self.padded: Callable[[int], int] = lambda rows: rows
        """Decoding rows -> rows after padding. A CUDA graph needs lists of the same length each time."""
        # GPUs before sm_89 have no FP8 type: there the kernels read its bits as bytes.
        self._native_fp8 = capability >= (8, 9)
        self._scaled = quantization == "fp8" and scaled.works(device, dtype)
        self.tiles: Tiles = tiles_for(capability, processors, dtype, fp8_kv, self._dim, self._groups)

    # ------------------------------------------------------------------------------ once a step

    def extras(self, q_lens: list[int], kv_lens: list[int], rows: SampleRows) -> Extras:
        lists = self._lists(q_lens, kv_lens, None)
        return Extras(packed_params(rows).ravel(), [one.host for one in lists], lists)

    def plan(self, batch: StepInput, rope: RopeTable, window: int | None = None) -> StepPlan:
        """window: that of the layers that use this plan. It changes how the work is split, never the result."""
        lists, sent = batch.note, batch.work
        if lists is None or window is not None:
            lists = self._lists(batch.q_lens, batch.kv_lens_host, window)
            sent = [self._upload(one.host) for one in lists]
        return _Plan(batch, rope, [self._group(one, there) for one, there in zip(lists, sent, strict=True)])

    def _lists(self, q_lens_: list[int], kv_lens_: list[int], window: int | None) -> list[_List]:
        q_lens, kv_lens = np.asarray(q_lens_), np.asarray(kv_lens_)
        few = q_lens * self._groups <= self.tiles.few.rows
        lists = []
        for chosen, tile, programs, least in (
            (few, self.tiles.few, self.tiles.programs_few, self.tiles.least_few),
            (~few, self.tiles.many, self.tiles.programs_many, self.tiles.least_many),
        ):
            index = np.flatnonzero(chosen)
            if not len(index):
                continue
            w = work_list(
                index, q_lens[index], kv_lens[index], block_q=tile.rows // self._groups, keys=tile.keys,
                kv_heads=self._kv_heads, programs=programs, least=least, window=window,
            )  # fmt: skip
            if len(index) == int(q_lens.sum()):  # nothing but decodes
                items, merges = self._static_size(max(len(index), self.padded(len(index))))
            else:
                items, merges = _aligned(len(w.work)), len(w.merges)
            host = np.full(5 * items + 4 * merges, -1, np.int32)
            host[: w.work.size] = w.work.ravel()
            host[5 * items : 5 * items + w.merges.size] = w.merges.ravel()
            lists.append(_List(tile, host, 5 * items, w.parts, w.most))
        return lists

    def _static_size(self, rows: int) -> tuple[int, int]:
        """(work items, merges) that are enough for this many decoding rows, however long they are. A piece is at
        least as long as a program's share, so there cannot be more pieces."""
        return _aligned(rows + self.tiles.programs_few // self._kv_heads), rows

    def _group(self, one: _List, there: Tensor) -> _Group:
        """there: the group's lists on the device."""
        room = None
        if one.parts:
            room = attention.parts_for(one.parts, self._kv_heads, one.tile, self._dim, self.device)
        work, merges = there[: one.split], there[one.split :]
        return _Group(one.tile, work.view(-1, 5), merges.view(-1, 4), room, one.most)

    def static_plan(self, batch: StepInput, rope: RopeTable) -> StaticPlan:
        """A plan for steps in which each row of `batch` decodes one token or none. `fill` says which."""
        tile = self.tiles.few
        items, merges = self._static_size(len(batch.q_lens))
        device = torch.full((items * 5 + merges * 4,), -1, dtype=torch.int32, device=self.device)
        room = attention.parts_for(items, self._kv_heads, tile, self._dim, self.device)
        split = items * 5
        group = _Group(tile, device[:split].view(-1, 5), device[split:].view(-1, 4), room, MOST_SPLITS)
        return _StaticPlan(batch, rope, [group], device)

    def fill(self, plan: StaticPlan, kv_lens: list[int], sent: Tensor | None = None) -> None:
        """Rewrites the work list. kv_lens: tokens to attend to, one entry for each row that decodes. sent: the list, if
        it was copied to the device with the batch."""
        assert isinstance(plan, _StaticPlan)
        if sent is None or sent.numel() != plan.device.numel():
            (one,) = self._lists([1] * len(kv_lens), kv_lens, None)
            sent = self._upload(one.host)
        plan.device.copy_(sent)

    def copy_blocks(self, cache: Kv, pairs: Iterable[tuple[int, int]]) -> None:
        for src, dst in launches(pairs):
            ids = self._upload(np.array((src, dst), np.int64))
            for tensor in parts(cache):
                copy.copy_blocks(tensor, ids[0], ids[1])

    # ------------------------------------------------------------------------- small operations

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        if isinstance(w.data, Tensor):
            return torch.nn.functional.linear(x, w.data, w.bias)
        if isinstance(w.data, Fp8) and self._scaled and len(x) >= scaled.FROM_ROWS and scaled.fits(w.data):
            return scaled.linear(*quantised.rows_to_e4m3(x), w.data, w.bias)
        if len(x) <= quantised.MOST_ROWS:
            return quantised.linear(x, w.data, w.bias, x.dtype)
        return torch.nn.functional.linear(x, quantised.values(w.data, x.dtype), w.bias)

    def logits(self, x: Tensor, head: Packed) -> Tensor:
        if not isinstance(head.data, Tensor) and len(x) <= quantised.MOST_ROWS:
            return quantised.linear(x, head.data, head.bias, torch.float32)
        weight = head.data if isinstance(head.data, Tensor) else quantised.values(head.data, x.dtype)
        if x.is_cuda and x.dtype == torch.bfloat16:
            # cuBLAS sums in float32 anyway. Rounding the sums would lose bits that the sampler can use.
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.nn.functional.linear(x, weight, head.bias).float()

    def add_rms_norm(
        self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(delta, residual, weight, eps), residual

    def qkv_prepare(self, qkv_: Tensor, w: AttentionWeights, kv: Kv, plan: StepPlan) -> Tensor:
        b = plan.batch
        q = torch.empty((len(qkv_), w.heads, w.head_dim), dtype=qkv_.dtype, device=qkv_.device)
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        values, scales = _halves(kv)
        rope = plan.rope
        qkv.prepare(qkv_, q, values, scales, b.slots, b.positions, rope.cos, rope.sin, norms, w.eps)
        return q

    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        return self.attend(q, kv, plan, w.head_dim**-0.5)

    def attend(
        self, q: Tensor, kv: Kv, plan: StepPlan, scale: float, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """See engine.ops.reference.attend."""
        assert isinstance(plan, _Plan)
        b = plan.batch
        out = torch.empty_like(q)
        (k, v), scales = _halves(kv)
        if scales and self._native_fp8:
            k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
        for g in plan.groups:
            attention.attend(
                q, (k, v), scales, b.tables, b.rows, b.q_starts, b.kv_lens, g.work, g.parts, out,
                scale, g.tile, window, softcap,
            )  # fmt: skip
            if g.parts is not None:
                combine(g.parts, b.q_starts, g.merges, out, g.tile.rows, g.most)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu.silu_mul(gate_up)

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[list[int], list[int]]:
        tokens, bad = self.draw(logits, rows).tolist()
        return tokens, [i for i, n in enumerate(bad) if n]

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        sent = self._upload(packed_params(rows).ravel()) if rows.sent is None else rows.sent
        params = sent.view(draw.ROW_WORDS, -1)
        return draw.draw(logits, params, cutoffs(logits, params))

    def _upload(self, host: NDArray[np.generic]) -> Tensor:
        """Copies to the device in the order of the stream, without waiting. torch keeps the pinned copy until the
        transfer is done."""
        tensor = torch.from_numpy(host)
        return (
            tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
        )


def refuse(device: torch.device, dtype: torch.dtype, model: ModelConfig) -> None:
    """Raises SetupError if the kernels cannot run here."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise SetupError("--ops triton needs a GPU of compute capability 8.0 or newer: use --ops reference")
    if dtype not in (torch.bfloat16, torch.float32):
        raise SetupError("--ops triton computes in bfloat16 or float32: use --ops reference for float64")
    dim = model.head_dim
    if dim % 2 or not 16 <= dim <= 256:
        raise SetupError(f"--ops triton has no kernel for a head_dim of {dim}: use --ops reference")


def packed_params(rows: SampleRows) -> NDArray[np.int32]:
    """int32 [ROW_WORDS, R], as engine.ops.nvidia.kernels.draw reads it, so that one copy sends all of them."""
    p = rows.params
    out = np.empty((draw.ROW_WORDS, len(p)), np.int32)
    real = out.view(np.float32)
    real[draw.TEMPERATURE] = np.where(p["top_k"] == 1, 0, p["temperature"])
    real[draw.TOP_P] = p["top_p"]
    with np.errstate(divide="ignore"):
        real[draw.LOG_MIN_P] = np.log(p["min_p"])
    out[draw.TOP_K] = np.minimum(p["top_k"], 2**31 - 1)
    seed = p["seed"].view(np.uint64)
    out.view(np.uint32)[draw.SEED_LOW] = seed & np.uint64(0xFFFFFFFF)
    out.view(np.uint32)[draw.SEED_HIGH] = seed >> np.uint64(32)
    out[draw.BRANCH] = p["branch"]
    out[draw.POSITION] = rows.position
    return out


def _aligned(items: int) -> int:
    """The number of work items, padded so that the data after them starts at a multiple of 16 bytes."""
    return -(-items // 4) * 4


def _halves(kv: Kv) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """(K, V) of one layer, and their scales if the cache has any."""
    if isinstance(kv, Fp8Kv):
        return (kv.data[0], kv.data[1]), (kv.scale[0], kv.scale[1])
    return (kv[0], kv[1]), None
