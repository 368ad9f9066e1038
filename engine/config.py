"""EngineConfig: every setting of an engine, validated once and frozen.

Owns the knobs and their ranges. Imports no torch, so that help and errors come at once. A wrong value raises
SetupError: one line that says what is wrong and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import SetupError

AttentionBackend = Literal["auto", "triton", "flash-attn", "flashinfer"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every knob of an engine. Raises SetupError on a value out of range."""

    model: str | None = None
    """Hub id, local folder, .gguf file; None is the built-in model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Of weights, activations and KV; auto is bfloat16."""
    ops: Literal["auto", "reference", "cpu", "triton"] = "auto"
    attention_backend: AttentionBackend = "auto"
    """Whose kernels attend on a GPU; auto is triton, our own."""
    block_size: int = 16
    """Tokens per block, a power of two from 1 to 256."""
    num_blocks: int | None = None
    """Physical blocks, the null block included; over kv_cache_memory."""
    kv_cache_memory: int | None = None
    """Bytes for KV; None is 192 MiB on a CPU and gpu_memory_utilization on a GPU."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Of the linears' weights; None computes with `dtype`. The head is INT8 with any."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values; auto is `dtype`, fp8 is e4m3 with a float32 scale per token and head."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that weights, activations and KV may take."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None takes the model's, clamped to what the pool holds."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None is 512 on a CPU, 2,048 on a GPU."""
    speculate: int = 0
    """Tokens a step and sequence that are looked up in the text so far and verified in one forward; 0 is none."""
    max_num_seqs: int = 64
    """Most sequences that run at once."""
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    """A step is planned and launched before the one in flight is done; None is where that wins, on a GPU."""
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or waits until it fits the budget."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step while others wait or run; 0 is no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """The threshold is at least every request's equal share of the step's budget."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission, and the reverse of preemption: by arrival, or by (priority, arrival), lower first."""
    watermark: float = 0.0
    """Part of the usable blocks that an admission leaves free for what runs, 0 to under 1; none if nothing runs."""
    max_num_queued_requests: int | None = None
    """Requests that may wait; one more is refused. None is no limit."""
    max_num_queued_tokens: int | None = None
    """Tokens of all that wait; a request that would exceed them is refused. None is no limit."""
    audit: int = 0
    """Of so many admissions that read from the cache one is computed again and compared; 0 is none."""
    allow_special_tokens: bool = False
    """A special token's name in a prompt becomes that token; else it stays text."""
    seed: int = 0
    """Base of the sampling seeds of requests that bring none."""
    hash_seed: int | None = None
    """Root of the block hashes; None is random at each start."""
    threads: int | None = None
    """Threads of the CPU ops; None is all cores."""

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise SetupError(text)

        a, backends = self.attention_backend, ("auto", "triton", "flash-attn", "flashinfer")
        need(a in backends, f"--attention-backend must be one of {', '.join(backends)}, not {a!r:.40}")
        b = self.block_size
        need(
            1 <= b <= 256 and b & (b - 1) == 0, f"--block-size must be a power of two from 1 to 256, not {b}"
        )
        n = self.num_blocks
        need(n is None or n >= 2, f"--num-blocks must be at least 2 (block 0 is the null block), not {n}")
        m = self.kv_cache_memory
        need(m is None or m > 0, f"--kv-cache-memory must be over 0, not {m}")
        w = self.quantization
        need(w in (None, "int8", "int4", "fp8"), f"--quantization must be int8, int4 or fp8, not {w!r:.40}")
        d = self.kv_cache_dtype
        need(d in ("auto", "fp8"), f"--kv-cache-dtype must be auto or fp8 for a live engine, not {d!r:.40}")
        u = self.gpu_memory_utilization
        need(0 < u <= 1, f"--gpu-memory-utilization must be over 0 and at most 1, not {u}")
        x = self.max_model_len
        need(x is None or x >= 2, f"--max-model-len must be at least 2, not {x}")
        s = self.max_num_seqs
        need(s >= 1, f"--max-num-seqs must be at least 1, not {s}")
        k = self.speculate
        need(0 <= k <= 64, f"--speculate must be from 0 to 64, not {k}")
        t = self.max_num_batched_tokens
        need(t is None or t >= 1, f"--max-num-batched-tokens must be at least 1, not {t}")
        need(
            t is None or t > s,
            f"--max-num-batched-tokens ({t}) must exceed --max-num-seqs ({s}), or decodes alone would fill a step",
        )
        need(
            t is None or t > s * (1 + k),
            f"--max-num-batched-tokens ({t}) must exceed --max-num-seqs x (1 + --speculate) = {s * (1 + k)}",
        )
        most = self.long_prefill_token_threshold
        need(most >= 0, f"--long-prefill-token-threshold must be 0 or more, not {most}")
        p = self.scheduling_policy
        need(p in ("fcfs", "priority"), f"--scheduling-policy must be fcfs or priority, not {p!r:.40}")
        need(0 <= self.watermark < 1, f"--watermark must be at least 0 and under 1, not {self.watermark}")
        for name in ("requests", "tokens"):
            most = getattr(self, f"max_num_queued_{name}")
            need(most is None or most >= 1, f"--max-num-queued-{name} must be at least 1, not {most}")
        need(self.audit >= 0, f"--audit must be 0 (none) or more, not {self.audit}")
        need(0 <= self.seed < 2**63, f"--seed must be between 0 and 2**63 - 1, not {self.seed}")
        h = self.hash_seed
        need(h is None or 0 <= h < 2**64, f"--hash-seed must be between 0 and 2**64 - 1, not {h}")
        need(self.threads is None or self.threads >= 1, f"--threads must be at least 1, not {self.threads}")
