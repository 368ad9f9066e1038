"""How long a step of a decoder takes on a simulated GPU: a roofline for each part, plus overheads.

Owns the model and its constants, each with its source. A step is the sum of its parts. A part takes
max(bytes / bandwidth, operations / rate), both at the fraction of the published limit that real kernels reach.
Nothing is fitted per model or per device: all of them use the same eight fractions and five overheads. Against 40
published figures (tests/benchmarks/cost_model.py) the mean error is 9 %, the worst 22 %. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import SetupError
from engine.files.hf_config import Keys
from engine.sim.hardware import Machine
from engine.sizing.kv_shape import KvShape, text_part
from engine.sizing.kv_size import BITS
from engine.sizing.weight_count import count_parameters

# Fractions of a published limit.
READ_WEIGHTS = 0.85
"""Of the memory bandwidth, for matrices of 16 or 8 bits that tensor cores multiply directly. gpt-fast's README:
1,411 GB/s of an A100's 2,039 including all overhead. A plain copy on an H200 reaches 0.90."""
READ_PACKED = 0.64
"""The same for weights that must be unpacked first (int4, int8, FP8 without FP8 cores). gpt-fast's int8 and int4 lines:
863 to 1,031 GB/s including all overhead."""
READ_KV = 0.80
"""Of the memory bandwidth, for attention in decode: what paged kernels reach from about 64 MB of KV on."""
READ_REST = 0.85
"""Of the memory bandwidth, for norms, rotary embedding and activation functions: they read and write like a copy."""
GEMM_16 = 0.68
"""Of the tensor cores' BF16 rate. TensorRT-LLM, first token of Llama 2 7B after 2,048 tokens on an A100: 0.68."""
GEMM_8 = 0.55
"""Of their FP8 rate, which power and the quantisation of activations limit. TensorRT-LLM 1.0, Llama 3.3 70B, 2,048 in
and 128 out on an H200: 0.50 over everything."""
ATTEND = 0.50
"""Of the BF16 rate, for attention over a prompt. On an H100 FlashAttention in Triton: 0.48, FlashAttention-3: 0.62."""
EXCHANGE = 0.70
"""Of the rate of a link, for an all-reduce of large tensors (NCCL's bus bandwidth over NVLink)."""

# Overheads, in seconds.
KERNELS = 10
"""Kernels a layer in a fused decoder: norm, QKV, rotary and store, attention and its combine, output, norm, up,
activation, down."""
BOUNDARY = 3.8e-6
"""Between two kernels inside a CUDA graph: 1.3 us for the launch (Hazy Research, no-bubbles megakernel), and the rest
to empty and fill the memory pipelines. Chosen so that vLLM's 7.28 ms a token for Qwen3-8B on an H100 comes out."""
HOP = 8e-6
"""One empty all-reduce over NVLink."""
STEP = 0.5e-3
"""Host time of a step that nothing overlaps: scheduling, inputs, the way back of the sampled tokens."""
PER_SEQUENCE = 6e-6
"""For each sequence and step: its row, its sampling, its share of the scheduler."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a decoder does for a token, from its config.json. The parameters are also the multiply-adds."""

    shape: KvShape
    hidden: int
    dense: int
    """Parameters that every token passes through, without embeddings and head."""
    experts: int
    """Parameters of all experts of all layers; 0 in a dense model."""
    chosen: float
    """Part of the experts that one token passes through."""
    head: int
    """Parameters of the output projection."""
    wide: int
    """Values per token that the kernels between the matrices move, in sizes that several GPUs share."""
    narrow: int
    """The same in the size of the hidden state, which every GPU moves as a whole."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Work:
        """From a config.json. Raises SetupError for a family whose weights cannot be counted."""
        shape = KvShape.from_config(config)
        part = {k: v for k, v in text_part(config).items() if k != "vision_config"}
        counted = count_parameters(part)
        if counted is None:
            raise SetupError(
                f"simulating a {shape.model_type or 'model without model_type'!s:.40} is not implemented: how many "
                "parameters it has is not known; `kvtop size list` shows models that are"
            )
        keys = Keys(part, "config.json")
        hidden, layers = keys.count("hidden_size"), shape.layers
        head = keys.count("vocab_size") * hidden
        tied = keys.get("tie_word_embeddings", bool, False)
        held, picked = _experts(keys)
        idle = counted.total - counted.active
        experts = idle * held // (held - picked) if idle else 0
        inner = keys.count("intermediate_size") if not idle else picked * _expert_width(keys)
        width = sum(g.layers * (g.full_values + g.values) for g in shape.groups)
        return cls(
            shape,
            hidden,
            counted.active - (1 if tied else 2) * head - (experts - idle),
            experts,
            picked / held if idle else 1.0,
            head,
            # the rotary embedding reads and writes Q and K; the gate reads two halves and writes one
            width + 3 * inner * layers,
            # two norms with their residual: each reads two and writes two
            8 * hidden * layers,
        )


class StepTime(NamedTuple):
    """Seconds of one step by part, and the bytes moved. total: from the start of one step to that of the next."""

    linear: float
    attention: float
    between: float
    """Norms, rotary embedding, activation functions."""
    exchange: float
    """All-reduces, if there are several GPUs."""
    launch: float
    sample: float
    """Output projection and sampling."""
    host: float
    moved: float
    """Bytes between memory and one GPU's cores."""

    @property
    def forward(self) -> float:
        """Seconds of the GPU before it samples."""
        return self.linear + self.attention + self.between + self.exchange + self.launch

    @property
    def gpu(self) -> float:
        """Seconds in which a kernel runs or is being launched."""
        return self.forward + self.sample

    @property
    def total(self) -> float:
        return self.gpu + self.host


class Cost:
    """A decoder on a machine, with a format of weights (a name in sizing.BITS) and a size of KV values."""

    def __init__(self, work: Work, machine: Machine, weights: str = "bf16", value_bytes: int = 2) -> None:
        gpu, n = machine.gpu, machine.count
        self.work, self.machine, self.weights = work, machine, weights
        eight = weights == "fp8" and gpu.fp8 is not None
        packed = weights in ("int4", "int8") or (weights == "fp8" and not eight)
        self._weight_bytes = BITS[weights] / 8
        self._read = gpu.bandwidth * n * (READ_PACKED if packed else READ_WEIGHTS)
        self._rate = n * (GEMM_8 * (gpu.fp8 or 0) if eight else GEMM_16 * gpu.bf16)
        # quantised models keep the output projection at 16 bits
        self._head_bytes = work.head * 2
        self._head_read, self._head_rate = gpu.bandwidth * n * READ_WEIGHTS, GEMM_16 * gpu.bf16 * n
        # A KV head is never split. With more GPUs than heads, some GPUs hold the same head.
        self._kv_gpus = min(n, work.shape.kv_heads)
        self._kv_read = gpu.bandwidth * self._kv_gpus * READ_KV
        self._groups = [
            (g.layers * g.values * value_bytes, 2 * g.layers * g.full_values, g.window)
            for g in work.shape.groups
        ]
        self._windowless = all(g.window is None for g in work.shape.groups)
        self._token_kv = sum(bytes_ for bytes_, _, _ in self._groups)
        self._pair = sum(ops for _, ops, _ in self._groups)
        # In decode a latent is not expanded: every head attends to the latent itself.
        latent = work.shape.attention == "latent"
        self._decode_pair = 4 * work.shape.heads * work.shape.values if latent else self._pair
        self._attend = ATTEND * gpu.bf16 * n
        self._between = 2 * (work.narrow + work.wide / n)
        self._rest = gpu.bandwidth * READ_REST
        self._launch = KERNELS * work.shape.layers * BOUNDARY
        reduces = 2 * work.shape.layers if n > 1 else 0
        self._exchange_token = reduces * 2 * (n - 1) / n * 2 * work.hidden / (gpu.link * EXCHANGE)
        self._exchange = reduces * HOP

    def step(self, rows: Iterable[tuple[int, int]], samples: int) -> StepTime:
        """rows: (tokens before, tokens now) of each sequence, at least one. samples: how many rows also sample."""
        tokens = count = 0
        decode = read = pairs = 0
        if self._windowless:
            for start, n in rows:
                count += 1
                tokens += n
                if n == 1:
                    decode += start + 1
                else:
                    read += start + n
                    pairs += n * start + n * (n + 1) // 2
            decode_bytes, read_bytes = decode * self._token_kv, read * self._token_kv
            decode_ops, ops = decode * self._decode_pair, pairs * self._pair
        else:
            decode_bytes = read_bytes = decode_ops = ops = 0
            for start, n in rows:
                count += 1
                tokens += n
                for per_token, per_pair, window in self._groups:
                    kv, attended = _windowed(start, n, window)
                    if n == 1:
                        decode_bytes += kv * per_token
                        decode_ops += attended * per_pair
                    else:
                        read_bytes += kv * per_token
                        ops += attended * per_pair
        work = self.work
        touched = work.dense + work.experts * (1 - (1 - work.chosen) ** tokens if work.experts else 0)
        weight_bytes = touched * self._weight_bytes
        multiplied = 2 * tokens * (work.dense + work.experts * work.chosen)
        written = tokens * self._token_kv
        between = tokens * self._between
        head_bytes, sampling = 0, 0.0
        if samples:
            head_bytes = self._head_bytes
            sampling = max(head_bytes / self._head_read, 2 * samples * work.head / self._head_rate)
        return StepTime(
            linear=max(weight_bytes / self._read, multiplied / self._rate),
            attention=max((decode_bytes + written) / self._kv_read, decode_ops / self._attend)
            + max(read_bytes / self._kv_read, ops / self._attend),
            between=between / self._rest,
            exchange=self._exchange + tokens * self._exchange_token,
            launch=self._launch,
            sample=sampling,
            host=STEP + count * PER_SEQUENCE,
            moved=(weight_bytes + head_bytes) / self.machine.count
            + (decode_bytes + read_bytes + written) / self._kv_gpus
            + between,
        )


def _windowed(start: int, n: int, window: int | None) -> tuple[int, int]:
    """For `n` tokens after `start`: tokens whose KV is read, and (query, key) pairs."""
    if window is None:
        return start + n, n * start + n * (n + 1) // 2
    short = max(0, min(n, window - start))  # queries whose window still covers all tokens before them
    pairs = short * start + short * (short + 1) // 2 + (n - short) * window
    return min(start + n, window - 1 + n), pairs


def _experts(keys: Keys) -> tuple[int, int]:
    """(experts of a layer, experts of a token). (1, 1) in a dense model."""
    held = next(
        (keys.count(k) for k in ("n_routed_experts", "num_local_experts", "num_experts") if k in keys.values),
        1,
    )
    return held, keys.count("num_experts_per_tok", 1) if held > 1 else 1


def _expert_width(keys: Keys) -> int:
    return int(keys.count("moe_intermediate_size", keys.count("intermediate_size")))
