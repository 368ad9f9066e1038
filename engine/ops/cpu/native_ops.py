"""NativeCpuOps: bfloat16 on AVX-512, a whole decoder as one call into the C kernels.

Owns the scratch memory of a step and its task lists. Residual, sums and logits are float32. Only the inputs of the
matrix products and the KV cache are rounded to bfloat16. Invariant: the result of a token does not depend on the
other tokens of the batch, because every sum runs in a fixed order.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.ops.base import (
    AttentionWeights,
    DecoderWeights,
    MlpWeights,
    Ops,
    Packed,
    RopeTable,
    State,
    StepInput,
    StepPlan,
)
from engine.ops.cpu import library as native
from engine.ops.cpu.threads import FreeCores, ThreadChoice, TorchThreads
from engine.ops.fp8 import Fp8Kv, Kv
from engine.ops.sampler import SampleRows
from engine.ops.weights import Fp8, Int8, Quantised, Quantization

if TYPE_CHECKING:
    from engine.ops.profiling.step_profile import Timer

_BF16, _F32 = 0, 1
"""Modes of kvtop_linear."""


def available(model: ModelConfig) -> bool:
    """Whether the kernels can be used here and support this model's shape."""
    return (
        model.head_dim % 32 == 0
        and model.head_dim <= native.MAX_DIM
        and model.hidden_size % 2 == 0
        and model.intermediate_size % native.PANEL == 0
        and native.load() is not None
    )


@dataclass(slots=True)
class _Plan(StepPlan):
    """`native` points into `keep`, the scratch and the batch."""

    native: native.Step
    keep: tuple[object, ...]


@dataclass(slots=True)
class _Panels:
    """A packed weight: `struct` points into the tensors."""

    struct: native.Linear
    data: Tensor
    bias: Tensor | None
    scale: Tensor | None


class NativeCpuOps(Ops):
    """Create it only if `available` returns True."""

    name = "cpu"
    fused = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        model: ModelConfig,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(device, dtype, quantization)
        lib = native.load()
        if lib is None:
            raise RuntimeError("no C kernels on this machine: ask available() first")
        self._lib: ctypes.CDLL = lib
        self._model = model
        self._scratch: dict[str, Tensor] = {}
        free = FreeCores()
        self._torch = TorchThreads(free)
        self._threads = ThreadChoice(torch.get_num_threads, free)

    # ------------------------------------------------------------------------ once at the start

    def pack_plain(self, weight: Tensor, bias: Tensor | None) -> Packed:
        n, k = weight.shape
        kp = -(-k // 2)
        data = torch.empty(-(-n // native.PANEL) * kp * native.PANEL * 2, dtype=self.dtype)
        self._lib.kvtop_pack(weight.data_ptr(), n, k, data.data_ptr())
        return self._packed(n, k, 16, data, None, bias)

    def pack_quantised(self, weight: Quantised, bias: Tensor | None) -> Packed:
        assert not isinstance(weight, Fp8)  # get_ops takes CpuOps for it
        (n, k), panels = weight.shape, -(-weight.shape[0] // native.PANEL)
        pairs = -(-k // 2)
        if isinstance(weight, Int8):
            data = torch.empty(panels * pairs * native.PANEL * 2, dtype=torch.int8)
            self._lib.kvtop_pack8(weight.codes.contiguous().data_ptr(), n, k, data.data_ptr())
            return self._packed(n, k, 8, data, weight.scale.contiguous(), bias)
        data = torch.empty(panels * pairs * native.PANEL, dtype=torch.uint8)
        parts = [t.contiguous() for t in (weight.codes, weight.scale, weight.minimum)]
        scales = torch.empty(panels * parts[1].shape[1] * 2 * native.PANEL, dtype=torch.float16)
        pointers = (t.data_ptr() for t in parts)
        self._lib.kvtop_pack4(*pointers, n, k, data.data_ptr(), scales.data_ptr())
        return self._packed(n, k, 4, data, scales, bias)

    def _packed(
        self, n: int, k: int, bits: int, data: Tensor, scale: Tensor | None, bias: Tensor | None
    ) -> Packed:
        b = None if bias is None else bias.float().contiguous()
        pointers = (None if t is None else t.data_ptr() for t in (data, b, scale))
        at, of_bias, of_scale = pointers
        struct = native.Linear(n, k, -(-k // 2), at, of_bias, bits, of_scale)
        return Packed(k, n, _Panels(struct, data, b, scale), b)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    # ------------------------------------------------------------------------------ once a step

    def plan(self, batch: StepInput, rope: RopeTable) -> _Plan:
        self._torch.follow()  # sampling and masks are torch's, and wait at barriers too
        m = self._model
        tokens = len(batch.token_ids)
        tasks = _Tasks.of(batch, m.num_heads // m.num_kv_heads)
        heads = m.num_heads * m.head_dim
        kv = tasks.packed_blocks * m.num_kv_heads * native.KEYS * m.head_dim
        buffers = {
            "x": self._buffer("x", tokens * m.hidden_size),
            "qkv": self._buffer("qkv", tokens * (heads + 2 * m.num_kv_heads * m.head_dim)),
            "q": self._buffer("q", tokens * heads),
            "y": self._buffer("y", tokens * heads),
            "act": self._buffer("act", tokens * m.intermediate_size),
            "keys": self._buffer("keys", kv),
            "values": self._buffer("values", kv),
            "partial": self._buffer(
                "partial", tasks.partials * m.num_heads * (m.head_dim + 2), torch.float32
            ),
        }
        step = native.Step(
            tokens=tokens,
            threads=self._threads.choose(tokens),
            table_stride=batch.tables.stride(0),
            num_decode=len(tasks.decode),
            num_pack=len(tasks.pack),
            num_tiles=len(tasks.tiles),
            num_merge=len(tasks.merge),
            decode=tasks.decode.ctypes.data,
            pack=tasks.pack.ctypes.data,
            tiles=tasks.tiles.ctypes.data,
            merge=tasks.merge.ctypes.data,
            part_start=tasks.part_start.ctypes.data,
            cos=rope.cos.data_ptr(),
            sin=rope.sin.data_ptr(),
            **{n: getattr(batch, n).data_ptr() for n in _POINTERS},
            **{n: b.data_ptr() for n, b in buffers.items()},
        )
        return _Plan(batch, rope, step, (tasks, buffers))

    def took(self, seconds: float) -> None:
        self._threads.took(seconds)

    # ------------------------------------------------------------------------- small operations

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return super().embed(table, token_ids).float()

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        return self._linear(x, w, _BF16, torch.empty(len(x), w.out_features, dtype=self.dtype))

    def logits(self, x: Tensor, head: Packed) -> Tensor:
        return self._linear(x, head, _F32, torch.empty(len(x), head.out_features))

    def _linear(self, x: Tensor, w: Packed, mode: int, out: Tensor) -> Tensor:
        x = x.contiguous()
        self._lib.kvtop_linear(
            x.data_ptr(), byref(w.data.struct), out.data_ptr(), len(x), mode, self._threads.most
        )
        return out

    def add_rms_norm(
        self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual if delta is None else residual + delta
        return torch.nn.functional.rms_norm(residual, weight.shape, weight, eps).to(self.dtype), residual

    def qkv_prepare(self, qkv: Tensor, w: AttentionWeights, kv: Kv, plan: StepPlan) -> Tensor:
        step = native.Step.from_buffer_copy(self._step(plan, kv))
        qkv = qkv.contiguous()
        q = torch.empty(len(qkv), w.heads, w.head_dim, dtype=self.dtype)
        step.qkv, step.q = qkv.data_ptr(), q.data_ptr()
        self._lib.kvtop_qkv_prepare(byref(step), byref(_attention(w)), *_addresses(kv))
        return q

    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        step = native.Step.from_buffer_copy(self._step(plan, kv))
        q = q.contiguous()
        out = torch.empty_like(q)
        step.q, step.y = q.data_ptr(), out.data_ptr()
        self._lib.kvtop_attention(byref(step), byref(_attention(w)), *_addresses(kv))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(self.dtype)

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[list[int], list[int]]:
        m, vocab = logits.shape
        logits = logits.float().contiguous()
        params, positions = np.ascontiguousarray(rows.params), np.ascontiguousarray(rows.position)
        threads = min(self._threads.most, m)
        ids = torch.empty(m, dtype=torch.int64)
        self._lib.kvtop_sample(
            logits.data_ptr(),
            m,
            vocab,
            params.ctypes.data,
            positions.ctypes.data,
            self._buffer("sample", threads * 2 * (vocab + 64), torch.float32).data_ptr(),
            ids.data_ptr(),
            threads,
        )
        tokens = ids.tolist()
        return tokens, [i for i, token in enumerate(tokens) if token < 0]

    # ------------------------------------------------------------------------------ whole blocks

    def attention_block(self, state: State, w: AttentionWeights, kv: Kv, plan: StepPlan) -> State:
        residual = _sum(state)
        step = self._step(plan, kv)
        self._lib.kvtop_attention_block(
            byref(step), byref(_attention(w)), *_addresses(kv), residual.data_ptr()
        )
        return None, residual

    def mlp_block(self, state: State, w: MlpWeights, plan: StepPlan) -> State:
        assert isinstance(plan, _Plan)
        residual = _sum(state)
        self._lib.kvtop_mlp_block(byref(plan.native), byref(_mlp(w)), residual.data_ptr())
        return None, residual

    # ------------------------------------------------------------------------------ whole models

    def decoder(self, w: DecoderWeights, cache: Kv, plan: StepPlan) -> Tensor:
        """One native call for all layers. After each call the thread must get the GIL back, and while a dashboard
        draws, each of sixty calls would have to wait for it."""
        batch, (vocab, hidden) = plan.batch, w.embed.shape
        samples = len(batch.logit_rows)
        step = self._step(plan, cache[0])
        step.x = self._buffer("x", max(step.tokens, samples) * hidden).data_ptr()
        residual = self._buffer("residual", step.tokens * hidden, torch.float32)
        last = self._buffer("last", samples * hidden, torch.float32)
        logits = torch.empty(samples, vocab)
        pointers = (t.data_ptr() for t in (batch.token_ids, batch.logit_rows))
        made = (t.data_ptr() for t in (residual, last, logits))
        self._lib.kvtop_decoder(
            byref(step), byref(_decoder(w)), *_addresses(cache), *pointers, samples, *made
        )
        return logits

    def timed_decoder(self, w: DecoderWeights, cache: Kv, plan: StepPlan, timer: Timer) -> Tensor:
        assert isinstance(plan, _Plan)
        times = (ctypes.c_double * (len(native.KERNELS) + 1))()
        plan.native.times = ctypes.addressof(times)
        logits = self.decoder(w, cache, plan)
        plan.native.times = None
        for kernel, seconds in zip(native.KERNELS, times[:-1], strict=True):
            timer.add(kernel, seconds)
        return logits

    def _step(self, plan: StepPlan, kv: Kv) -> native.Step:
        assert isinstance(plan, _Plan)
        plan.native.num_blocks, plan.native.block_size = kv.shape[1], kv.shape[3]
        return plan.native

    def _buffer(self, name: str, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Scratch of at least `size` values, kept for the next step."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._scratch[name] = torch.empty(max(size, 1), dtype=dtype)
        return buffer


_POINTERS = ("positions", "rows", "q_starts", "kv_lens", "tables", "slots")


@dataclass(slots=True)
class _Tasks:
    """The work of a step as (sequence, part) pairs, int32 [*, 2].

    For sequences with one query: decode, a part of KEYS keys, and merge, (sequence, number of parts).
    For sequences with several queries: pack, a block of keys, and tiles, (sequence, first query row).
    part_start int64 [S]: where the partial results or the packed key blocks of a sequence begin.
    """

    decode: NDArray[np.int32]
    merge: NDArray[np.int32]
    pack: NDArray[np.int32]
    tiles: NDArray[np.int32]
    part_start: NDArray[np.int64]
    partials: int
    packed_blocks: int

    @classmethod
    def of(cls, batch: StepInput, group: int) -> _Tasks:
        n, keys = np.array(batch.q_lens), np.array(batch.kv_lens_host)
        parts = -(-keys // native.KEYS)
        single = n == 1
        of_decode, of_prefill = np.where(single, parts, 0), np.where(single, 0, parts)
        tiles = _pairs(np.where(single, 0, -(-n * group // native.ROWS)))
        tiles[:, 1] *= native.ROWS
        merge = np.stack([np.flatnonzero(single), parts[single]], 1).astype(np.int32)
        start = np.where(single, _before(of_decode), _before(of_prefill)).astype(np.int64)
        return cls(
            _pairs(of_decode),
            merge,
            _pairs(of_prefill),
            tiles,
            start,
            int(of_decode.sum()),
            int(of_prefill.sum()),
        )


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(counts) - counts


def _pairs(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """(i, 0), (i, 1) ... (i, counts[i] - 1) for every i."""
    i = np.repeat(np.arange(len(counts)), counts)
    part = np.arange(len(i)) - np.repeat(_before(counts), counts)
    return np.ascontiguousarray(np.stack([i, part], 1).astype(np.int32))


def _addresses(kv: Kv) -> tuple[int, int | None]:
    """Addresses of the values and, with FP8, of the scales."""
    return (kv.data.data_ptr(), kv.scale.data_ptr()) if isinstance(kv, Fp8Kv) else (kv.data_ptr(), None)


def _sum(state: State) -> Tensor:
    delta, residual = state
    return residual if delta is None else residual + delta


def _attention(w: AttentionWeights) -> native.Attention:
    if w.native is None:
        w.native = native.Attention(
            qkv=w.qkv.data.struct,
            out=w.out.data.struct,
            norm=w.norm.data_ptr(),
            q_norm=None if w.q_norm is None else w.q_norm.data_ptr(),
            k_norm=None if w.k_norm is None else w.k_norm.data_ptr(),
            heads=w.heads,
            kv_heads=w.kv_heads,
            dim=w.head_dim,
            eps=w.eps,
        )
    struct: native.Attention = w.native
    return struct


def _decoder(w: DecoderWeights) -> native.Decoder:
    if w.native is None:
        n = len(w.layers)
        attention = (native.Attention * n)(*(_attention(a) for a, _ in w.layers))
        mlp = (native.Mlp * n)(*(_mlp(m) for _, m in w.layers))
        struct = native.Decoder(
            hidden=w.embed.shape[1],
            layers=n,
            embed=w.embed.data_ptr(),
            attention=ctypes.addressof(attention),
            mlp=ctypes.addressof(mlp),
            norm=w.norm.data_ptr(),
            eps=w.eps,
            head=w.head.data.struct,
        )
        w.native = struct, attention, mlp  # keeps the arrays alive as long as the struct that points to them
    decoder: native.Decoder = w.native[0]
    return decoder


def _mlp(w: MlpWeights) -> native.Mlp:
    if w.native is None:
        w.native = native.Mlp(w.gate_up.data.struct, w.down.data.struct, w.norm.data_ptr(), w.eps)
    struct: native.Mlp = w.native
    return struct
