"""A GPU that has less memory than was measured: the pool shrinks and says so, or a refusal says what would fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.errors import SetupError
from engine.model.kv_cache import CacheSize, allocate_what_fits, tolerance
from engine.ops.fp8 import Kv

CPU = torch.device("cpu")
CACHE = CacheSize(36, 8, 128, 2, 16, 1001)
"""Qwen3-8B's: 2.25 MiB a block, 2.2 GiB in all."""


def card(blocks: int, tried: list[int]) -> Callable[[CacheSize, torch.device, torch.dtype], Kv]:
    """Has memory for this number of blocks."""

    def zeros(cache: CacheSize, device: torch.device, dtype: torch.dtype) -> Kv:
        tried.append(cache.num_blocks)
        if cache.num_blocks > blocks:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {cache.num_blocks} blocks")
        return torch.zeros(cache.num_blocks)

    return zeros


def ask(blocks: int, tried: list[int], least: int = 2048, exact: bool = False) -> tuple[Kv, CacheSize, str]:
    free = blocks * CACHE.bytes_per_block + 5000
    return allocate_what_fits(
        CACHE, CPU, torch.bfloat16, least, exact=exact, zeros=card(blocks, tried), free=lambda: free
    )


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_there_is_taken_without_a_word(exact: bool) -> None:
    tried: list[int] = []
    kv, cache, notice = ask(1001, tried, exact=exact)
    assert (len(kv), cache, notice, tried) == (1001, CACHE, "", [1001])  # type: ignore[arg-type]


def test_a_pool_that_does_not_fit_shrinks_by_tenths_and_says_so() -> None:
    tried: list[int] = []
    kv, cache, notice = ask(750, tried)
    assert tried == [1001, 900, 800, 700]
    assert len(kv) == cache.num_blocks == 700  # type: ignore[arg-type]
    assert notice == (
        "has 1.54 GiB for KV instead of 2.2 GiB, 11,184 tokens: the GPU had no more; "
        "lower --gpu-memory-utilization, or end what else uses it"
    )


def test_the_least_is_tried_last_and_below_it_the_refusal_says_what_fits() -> None:
    tried: list[int] = []
    _, cache, notice = ask(129, tried, least=2048)
    assert tried[-3:] == [300, 200, 129] and cache.usable_tokens == 2048 and notice
    tried.clear()
    with pytest.raises(SetupError) as e:
        ask(40, tried, least=2048)
    assert tried[-1] == 129
    assert str(e.value) == (
        "too little GPU memory: KV for 2,048 tokens needs 290 MiB, 90 MiB could be had; --num-blocks 40 would fit"
    )
    with pytest.raises(SetupError, match="take a smaller model or --quantization int4"):
        ask(1, tried)


def test_a_size_that_was_asked_for_is_had_or_refused() -> None:
    tried: list[int] = []
    with pytest.raises(SetupError, match=r"KV needs 2.2 GiB, .* could be had; --num-blocks 750 would fit"):
        ask(750, tried, exact=True)
    assert tried == [1001]


def test_a_pool_smaller_than_the_least_is_tried_as_it_is() -> None:
    tried: list[int] = []
    assert ask(1001, tried, least=10**6)[1] == CACHE
    assert tried == [1001]


def test_other_errors_are_not_taken_for_it() -> None:
    def broken(*_: object) -> Kv:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        allocate_what_fits(CACHE, CPU, torch.bfloat16, 2048, zeros=broken)


def test_fp8_weights_make_the_audit_tolerant() -> None:
    """Inputs that are rounded to e4m3 turn a last bit into a whole step; other tokens' KV is further away."""
    assert [tolerance("bfloat16", q) for q in (None, "int8", "int4", "fp8")] == [0.1, 0.1, 0.1, 0.8]
    assert tolerance("fp8", None) == 0.25 and tolerance("fp8", "fp8") == 0.8
