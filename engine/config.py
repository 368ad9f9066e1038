"""EngineConfig: every setting of an engine, checked once and frozen.

Owns the knobs of the engine: their defaults, ranges and help, and the rules between two of them. The command line,
the config file and docs/options.md are made from these fields, so a new flag is one line here. Imports no torch, so
that help and errors come at once. A wrong value raises SetupError: one line that says what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from engine.knobs import Knob, KnobError, check_fields, flag

AttentionBackend = Literal["auto", "triton", "flash-attn", "flashinfer"]

_EVERY_ENGINE = ("run", "demo", "bench")
_MEASURED = ("run", "bench")


def _power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every knob of an engine. Raises SetupError on a value out of range."""

    # fmt: off
    # ---- model
    model: Annotated[str | None, Knob("Hub id, local folder or .gguf file; default: the built-in model.", "model", _EVERY_ENGINE, example="Qwen/Qwen3-8B")] = None
    revision: Annotated[str | None, Knob("Branch, tag or commit on the hub.", "model", (*_EVERY_ENGINE, "size"), example="main")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Knob("Where to compute.", "model", _EVERY_ENGINE)] = "auto"
    dtype: Annotated[Literal["auto", "bfloat16", "float32", "float64"], Knob("Data type of weights, activations and KV. auto: bfloat16.", "model", _EVERY_ENGINE)] = "auto"
    quantization: Annotated[Literal["int8", "int4", "fp8"] | None, Knob("Compute with quantised weights; the 4-bit codes of a GGUF are taken as they are.", "model", _MEASURED)] = None
    ops: Annotated[Literal["auto", "reference", "cpu", "triton"], Knob("Which kernels.", "model", _EVERY_ENGINE)] = "auto"
    attention_backend: Annotated[AttentionBackend, Knob("Whose attention kernels on a GPU; auto is triton, our own.", "model", _MEASURED)] = "auto"
    threads: Annotated[int | None, Knob("CPU threads at most; default: all cores.", "model", _EVERY_ENGINE, example=4, ge=1, le=4096)] = None
    allow_special_tokens: Annotated[bool, Knob("The name of a special token in a prompt becomes that token; otherwise it stays text.", "model")] = False
    # ---- memory and cache
    block_size: Annotated[int, Knob("Tokens in a block.", "memory and cache", ("run", "size"), ge=1, le=256, test=_power_of_two, says="a power of two from 1 to 256")] = 16
    num_blocks: Annotated[int | None, Knob("KV blocks, including the null block. Overrides --kv-cache-memory.", "memory and cache", _MEASURED, example=512, ge=2, le=2**31 - 1, says="at least 2 (block 0 is the null block)")] = None
    kv_cache_memory: Annotated[int | None, Knob("Memory for KV. Default: 192 MiB on a CPU, and what --gpu-memory-utilization leaves on a GPU.", "memory and cache", _MEASURED, gt=0, le=2**60, says="over 0 and at most 2^60 bytes", unit="bytes", metavar="SIZE", example="192MiB")] = None
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], Knob("Format of keys and values. auto: as --dtype. fp8: e4m3 with a scale for each token and head.", "memory and cache", ("bench",))] = "auto"
    gpu_memory_utilization: Annotated[float, Knob("Part of a GPU's memory that weights, activations and KV may take.", "memory and cache", gt=0, le=1)] = 0.9
    max_model_len: Annotated[int | None, Knob("Longest sequence in tokens. Default: the model's own, at most what the pool holds.", "memory and cache", example=8192, ge=2, le=2**31 - 1, says="at least 2")] = None
    enable_prefix_caching: Annotated[bool, Knob("Reuse the blocks of prefixes that were computed before.", "memory and cache")] = True
    hash_seed: Annotated[int | None, Knob("Root of the block hashes. Default: random at each start.", "memory and cache", ("run", "demo"), ge=0, le=2**64 - 1)] = None
    audit: Annotated[int, Knob("Compute one of N cache hits again and compare; 0 is none.", "memory and cache", ge=0, le=2**31 - 1, metavar="N", says="0 (none) or more")] = 0
    # ---- scheduling
    max_num_batched_tokens: Annotated[int | None, Knob("Token budget of a step. Default: 512 on a CPU, 2,048 on a GPU.", "scheduling", ("run", "size"), example=512, ge=1, le=2**22)] = None
    max_num_seqs: Annotated[int, Knob("Most sequences that run at once.", "scheduling", ge=1, le=2**16)] = 64
    speculate: Annotated[int, Knob("Tokens that are looked up in the text so far and verified in one step; 0 is none.", "scheduling", ge=0, le=64)] = 0
    async_scheduling: Annotated[bool | None, Knob("Plan and launch a step before the one in flight is done. Default: on a GPU.", "scheduling")] = None
    enable_chunked_prefill: Annotated[bool, Knob("Split long prompts over steps; off, a prompt waits until it fits the budget.", "scheduling")] = True
    long_prefill_token_threshold: Annotated[int, Knob("Most tokens of one prompt in a step while others wait or run; 0 is no limit.", "scheduling", ge=0, le=2**31 - 1, says="0 (no limit) or more")] = 0
    long_prefill_token_threshold_adaptive: Annotated[bool, Knob("That threshold is at least an equal share of the step's budget.", "scheduling")] = False
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Knob("Who is admitted first and preempted last: by arrival, or by priority (lower first) and then arrival.", "scheduling")] = "fcfs"
    watermark: Annotated[float, Knob("Part of the usable blocks that an admission leaves free for what runs; none if nothing runs.", "scheduling", ge=0, lt=1)] = 0.0
    max_num_queued_requests: Annotated[int | None, Knob("Requests that may wait; one more is refused. Default: no limit.", "scheduling", ge=1, le=2**31 - 1, says="at least 1")] = None
    max_num_queued_tokens: Annotated[int | None, Knob("Tokens that may wait; a request that would exceed them is refused. Default: no limit.", "scheduling", ge=1, le=2**53, says="at least 1")] = None
    # ---- sampling
    seed: Annotated[int, Knob("Base of the sampling seeds of requests that have none.", "sampling", ge=0, le=2**63 - 1)] = 0
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, spell=flag)
        budget, seqs, drafts = self.max_num_batched_tokens, self.max_num_seqs, self.speculate
        if budget is not None and budget <= seqs:
            raise KnobError(
                f"{{}} ({budget}) must exceed {{}} ({seqs}), or decodes alone would fill a step",
                *("max_num_batched_tokens", "max_num_seqs"),
                spell=flag,
            )
        if budget is not None and budget <= seqs * (1 + drafts):
            raise KnobError(
                f"{{}} ({budget}) must exceed {{}} x (1 + {{}}) = {seqs * (1 + drafts)}",
                *("max_num_batched_tokens", "max_num_seqs", "speculate"),
                spell=flag,
            )
