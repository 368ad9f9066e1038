"""The two sides of a roofline: what the kernels of a step have to do, and what the device can do.

Owns the bytes and FLOPs of every kernel, computed from the shapes of a step alone, and the measured rates. All
functions are pure except `roofline`, which measures once a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from engine.ops.base import DecoderWeights, Ops, Packed, StepInput
from engine.ops.fp8 import Kv, parts
from engine.ops.profiling.stopwatch import stopwatch
from engine.ops.weights import linear_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one kernel must read, write and compute in a step, all its calls together."""

    calls: int
    bytes: int
    flops: int


def work(ops: Ops, w: DecoderWeights, batch: StepInput, cache: Kv, logit_bytes: int) -> dict[str, Work]:
    """What the kernels of a forward have to do, in their order. logit_bytes: size of one logit.

    Every weight is read once. Activations are read once and written once. Of the cache, the tokens that are attended to
    are read; a query sees the tokens up to itself. Other traffic of a back end is not counted (weights expanded to a
    wider format, a pass over partial results): it shows as a kernel that is slower than its roofline.
    """
    (a, m), layers = w.layers[0], len(w.layers)
    tokens, samples, size = len(batch.token_ids), len(batch.logit_rows), ops.dtype.itemsize
    hidden, wide, inner = a.qkv.in_features, a.heads * a.head_dim, m.down.in_features
    residual = 4 if ops.fused else size
    token_kv = sum(t[0, :, 0, :, 0].nbytes for t in parts(cache))
    kv_lens = batch.kv_lens_host
    seen = sum(n * length - n * (n - 1) // 2 for n, length in zip(batch.q_lens, kv_lens, strict=True))

    def linear(w: Packed, rows: int, calls: int, out_bytes: int, form: Any = ops.quantization) -> Work:
        if not rows:
            return Work(calls, 0, 0)
        moved = linear_bytes(w.out_features, w.in_features, size, form)
        moved += 0 if w.bias is None else w.bias.nbytes
        moved += rows * w.in_features * size + rows * out_bytes
        return Work(calls, calls * moved, calls * 2 * rows * w.in_features * w.out_features)

    # In fused ops a linear adds to the residual. Otherwise every norm but the first adds.
    added = 2 * residual if ops.fused else size
    normed = 2 * layers * tokens + samples
    norm_bytes = normed * hidden * (residual + size)
    if not ops.fused:
        norm_bytes += (normed - tokens) * hidden * (size + residual)
    queries = layers * tokens * wide * size
    rows = layers * tokens
    found = {
        "embed": Work(1, tokens * hidden * (size + residual), 0),
        "norm": Work(2 * layers + 1, norm_bytes, 5 * normed * hidden),
        "qkv": linear(a.qkv, tokens, layers, a.qkv.out_features * size),
        "qkv_prepare": Work(
            layers,
            rows * (a.qkv.out_features * size + token_kv) + queries,
            rows * 10 * a.qkv.out_features,
        ),
        "attention": Work(layers, layers * sum(kv_lens) * token_kv + 2 * queries, layers * 4 * seen * wide),
        "out": linear(a.out, tokens, layers, hidden * added),
        "gate_up": linear(m.gate_up, tokens, layers, (1 if ops.fused else 2) * inner * size),
        "silu_mul": Work(layers, rows * 3 * inner * size, rows * 5 * inner),
        "down": linear(m.down, tokens, layers, hidden * added),
        "head": linear(
            w.head, samples, 1, w.head.out_features * logit_bytes, "int8" if ops.quantization else None
        ),
    }
    if ops.fused:
        del found["silu_mul"]
    return found


# ---------------------------------------------------------------------------------------------- rates


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates measured on this device. bandwidth: bytes/s of a copy on a GPU, or of a read with all threads on a
    CPU. peak: FLOP/s of a square product in the compute dtype. None if it could not be measured."""

    bandwidth: float | None
    peak: float | None


@once
def roofline(device: torch.device, dtype: torch.dtype, threads: int) -> Roofline:
    """Measures at the first call, in about 0.1 s. threads: how many torch uses now."""
    gpu = device.type == "cuda"
    mib, side = (256, 8192) if gpu else (128, 1024)

    def bandwidth() -> float:
        data = torch.ones(mib << 18, device=device)
        if not gpu:
            return data.nbytes / _best(device, data.sum)
        return 2 * data.nbytes / _best(device, torch.empty_like(data).copy_, data)

    def peak() -> float:
        a = torch.ones(side, side, dtype=dtype, device=device)
        return 2 * side**3 / _best(device, torch.mm, a, a)

    return Roofline(_measured(bandwidth), _measured(peak))


def _measured(f: Callable[[], float]) -> float | None:
    try:
        return f()
    except (RuntimeError, MemoryError):  # not enough memory, or no such product for this dtype
        return None


def _best(device: torch.device, f: Callable[..., object], *args: Tensor) -> float:
    """Seconds of the fastest of three calls, after one for warming up."""
    watch = stopwatch(device)
    f(*args)
    times = []
    for _ in range(3):
        start = watch.stamp()
        f(*args)
        end = watch.stamp()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(watch.seconds(start, end))
    return min(times)
