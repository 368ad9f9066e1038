"""The KV cache: one tensor [layer, 2, block, kv_head, slot, dim], under FP8 with its scales; size and memory.

Computes how many blocks fit, and the sum that explains it. Block 0 is the null block: it fills unused entries of
block tables, and no token is ever written into it. The slots of one (block, head) are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.ops.fp8 import SCALE_BYTES, Fp8Kv, Kv, dequantise

DEFAULT_CPU_BYTES = 192 << 20

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "fp8": 0.25}
"""By the KV's dtype: how large `distance` may be between two computations in other chunks and batches."""


def tolerance(kv_dtype: str, quantization: str | None) -> float:
    """TOLERANCE, but for FP8 weights 0.8: a difference in the last bit of an input may become a whole step
    of e4m3, a sixteenth of the value. Measured on the built-in model: 0.3, and 0.4 between few rows and many,
    whose inputs stay in bfloat16 or not. The KV of other tokens is some 1.4 away."""
    return max(TOLERANCE[kv_dtype], 0.8 if quantization == "fp8" else 0.0)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache, in blocks, and where it comes from."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int
    block_size: int
    num_blocks: int
    """The null block included."""
    scale_bytes: int = 0
    """Bytes of the scale that a token has per head for K; another one is for V."""

    @property
    def bytes_per_token(self) -> int:
        """layers x kv heads x 2 (K and V) x (head dim x bytes per value + bytes of the scale)."""
        per_head = self.head_dim * self.bytes_per_value + self.scale_bytes
        return self.layers * self.kv_heads * 2 * per_head

    @property
    def bytes_per_block(self) -> int:
        """block size x bytes per token."""
        return self.block_size * self.bytes_per_token

    @property
    def usable_tokens(self) -> int:
        """Tokens that fit into all blocks but the null block."""
        return (self.num_blocks - 1) * self.block_size

    def __str__(self) -> str:
        each = f"{self.head_dim} head dim x 2 (K, V) x {self.bytes_per_value} bytes"
        if self.scale_bytes:
            each = f"2 (K, V) x ({self.head_dim} head dim x 1 byte + {self.scale_bytes} of scale)"
        return (
            f"{self.layers} layers x {self.kv_heads} kv heads x {each} = "
            f"{size(self.bytes_per_token)} a token, x {self.block_size} = "
            f"{size(self.bytes_per_block)} a block, x {self.num_blocks} blocks = "
            f"{size(self.num_blocks * self.bytes_per_block)}, {self.usable_tokens:,} tokens"
        )


def size(n: float) -> str:
    """Bytes in a readable unit: 22.5 KiB, 192 MiB."""
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while n >= 1024:
        n, unit = n / 1024, next(units)
    return f"{n:.3g} {unit}" if n < 1000 else f"{n:,.0f} {unit}"


def gpu_kv_bytes(total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Bytes for KV on a GPU after a profiled forward.

    total, free: the device's memory; reserved: what this process holds now; peak: the most it held
    during the forward. What others use counts against `utilization`, which is a part of the total.
    """
    others = total - free - reserved
    return int(total * utilization) - others - peak


def plan_size(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, memory: int | None = None
) -> CacheSize:
    """How many blocks `config` asks for or fit: into kv_cache_memory, else `memory` bytes, else 192 MiB.

    Raises SetupError if not even one usable block fits.
    """
    fp8 = config.kv_cache_dtype == "fp8"
    width = 1 if fp8 else dtype.itemsize
    shape = (model.num_layers, model.num_kv_heads, model.head_dim, width, config.block_size)
    scale = SCALE_BYTES if fp8 else 0
    if config.num_blocks is not None:
        return CacheSize(*shape, config.num_blocks, scale)
    memory = config.kv_cache_memory or memory or DEFAULT_CPU_BYTES
    one = CacheSize(*shape, 2, scale)
    blocks = memory // one.bytes_per_block
    if blocks < 2:
        raise SetupError(
            f"too little memory for KV: {size(max(memory, 0))}, but two blocks (one is the null block) take "
            f"{size(2 * one.bytes_per_block)}; raise --kv-cache-memory"
        )
    return CacheSize(*shape, blocks, scale)


def check_cpu_memory(
    weights: int, cache: CacheSize | None, free: int | None, *, rope: int = 0, by_blocks: bool = False
) -> None:
    """Raises SetupError with the sum if weights, cache and the RoPE tables (in bytes) exceed what is free.

    by_blocks: the cache is as large as --num-blocks says, not --kv-cache-memory.
    """
    kv = cache.num_blocks * cache.bytes_per_block if cache else 0
    total = weights + kv + rope
    if free is not None and total > free:
        lower = f"lower --{'num-blocks' if by_blocks else 'kv-cache-memory'} or " if cache else ""
        tables = f" + RoPE {size(rope)}" if rope else ""
        raise SetupError(
            f"too little memory: weights {size(weights)} + KV {size(kv)}{tables} = {size(total)}, "
            f"free {size(free)}; {lower}take a smaller model"
        )


def allocate(cache: CacheSize, device: torch.device, dtype: torch.dtype) -> Kv:
    """The cache, zeroed: values in `dtype`, or FP8 where the size has scales.

    Raises SetupError if there is not enough memory.
    """
    try:
        return _zeros(cache, device, dtype)
    except (RuntimeError, MemoryError) as e:
        need = size(cache.num_blocks * cache.bytes_per_block)
        raise SetupError(
            f"too little memory: KV needs {need}; lower --kv-cache-memory or --num-blocks"
        ) from e


def allocate_what_fits(
    cache: CacheSize,
    device: torch.device,
    dtype: torch.dtype,
    least_tokens: int,
    *,
    exact: bool = False,
    zeros: Callable[[CacheSize, torch.device, torch.dtype], Kv] | None = None,
    free: Callable[[], int] | None = None,
) -> tuple[Kv, CacheSize, str]:
    """`allocate` on a GPU. Other programs use its memory too, so there may be less than was measured: then the cache
    shrinks by a tenth at a time, as long as `least_tokens` fit. Returns the cache, its size, and a notice of one line
    if it is smaller than planned, else "".

    exact: the user asked for this size, so a smaller one is refused. zeros, free: how a cache is made, and how many
    bytes are free; for tests.
    Raises SetupError, which says what would fit.
    """
    make = zeros or _zeros
    least = -(-least_tokens // cache.block_size) + 1
    tenths = [cache.num_blocks * part // 10 for part in range(10, 0, -1)]
    sizes = [n for n in tenths if n > least] + [min(least, cache.num_blocks)]
    for blocks in dict.fromkeys(sizes[:1] if exact else sizes):
        smaller = replace(cache, num_blocks=blocks)
        try:
            kv = make(smaller, device, dtype)
        except torch.OutOfMemoryError:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        if blocks == cache.num_blocks:
            return kv, cache, ""
        asked, had = (size(c.num_blocks * c.bytes_per_block) for c in (cache, smaller))
        return (
            kv,
            smaller,
            (
                f"has {had} for KV instead of {asked}, {smaller.usable_tokens:,} tokens: "
                f"the GPU had no more; lower --gpu-memory-utilization, or end what else uses it"
            ),
        )
    left = free() if free else torch.cuda.mem_get_info(device)[0]
    fits = left // cache.bytes_per_block
    need = size((cache.num_blocks if exact else least) * cache.bytes_per_block)
    what = f"KV needs {need}" if exact else f"KV for {least_tokens:,} tokens needs {need}"
    advice = f"--num-blocks {fits} would fit" if fits >= 2 else "take a smaller model or --quantization int4"
    raise SetupError(f"too little GPU memory: {what}, {size(left)} could be had; {advice}")


def _zeros(cache: CacheSize, device: torch.device, dtype: torch.dtype) -> Kv:
    shape = (cache.layers, 2, cache.num_blocks, cache.kv_heads, cache.block_size, cache.head_dim)
    if not cache.scale_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    data = torch.zeros(shape, dtype=torch.uint8, device=device)
    return Fp8Kv(data, torch.zeros(shape[:-1], device=device))


def distance(a: Kv, a_blocks: list[int], b: Kv, b_blocks: list[int]) -> list[float]:
    """How far each block of `a` is from its counterpart in `b`: the largest |x - y| / |y| over layers, K and V,
    heads and slots, |.| being the length over dim; a y that is shorter than the mean of its block and
    head counts as long as that. NaN or infinity where one is in either."""
    worst = torch.zeros(len(a_blocks), dtype=torch.float64)
    for layer in range(a.shape[0]):
        x, y = _values(a[layer], a_blocks), _values(b[layer], b_blocks)
        length = y.norm(dim=-1)
        length = torch.maximum(length, length.mean(-1, keepdim=True)).clamp(min=torch.finfo(y.dtype).tiny)
        error = ((x - y).norm(dim=-1) / length).amax((0, 2, 3))
        worst = torch.maximum(worst, error.double().cpu())
    return [float(e) for e in worst]


def _values(kv: Kv, blocks: list[int]) -> torch.Tensor:
    """[2, len(blocks), kv_head, slot, dim] of one layer, float64 or float32."""
    if isinstance(kv, Fp8Kv):
        return dequantise(kv.data[:, blocks], kv.scale[:, blocks], torch.float32)
    values = kv[:, blocks]
    return values if values.dtype == torch.float64 else values.float()
