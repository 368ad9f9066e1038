"""FP8 KV: the format, its bytes, and an engine that says the same with it whatever happens to its blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.events import BlocksCopied, BlocksEvicted, PrefixLookup, RequestPreempted
from engine.files import tokenizer
from engine.files.model_config import ModelConfig
from engine.files.model_files import ModelFiles
from engine.model import load_weights
from engine.model.kv_cache import allocate, plan_size
from engine.model.layers import attention_weights
from engine.model.torch_runner import TorchRunner
from engine.ops.base import Ops
from engine.ops.cpu import native_ops as cpu_native
from engine.ops.fp8 import LARGEST, Fp8Kv, dequantise, quantise
from engine.ops.reference import ReferenceOps
from engine.step.runner import Plan
from tests.engine.model.test_exact import NEW, Run, families
from tests.engine.ops.test_ops import RAGGED, SHAPES, Setting, model, needs_native
from tests.engine.quality import PAGE, logprobs
from tests.engine.rig import fork, row_for
from tests.engine.tiny import CPU64, LLAMA3, QWEN3, Driver, random_weights

CPU = torch.device("cpu")
SMOL = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)
FP8_64 = replace(CPU64, kv_cache_dtype="fp8")

# -------------------------------------------------------------------------------------- the format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_value_comes_back_within_half_a_step_of_e4m3(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 3, 64, generator=g) * torch.logspace(-8, 8, 50)[:, None, None]).to(dtype)
    bits, scale = quantise(x)
    assert (bits.dtype, scale.dtype, scale.shape) == (torch.uint8, torch.float32, (50, 3))
    largest = x.abs().amax(-1).double()
    torch.testing.assert_close(scale.double() * LARGEST, largest, rtol=1e-6, atol=0)
    error = (dequantise(bits, scale, torch.float64) - x.double()).abs()
    # 3 bits of mantissa: 1/16 of the value; below 2^-6 of the scale's units steps of 2^-9 are even.
    bound = torch.maximum(x.double().abs() / 16, scale.double()[..., None] * 2.0**-10)
    assert (error <= bound * 1.0001).all()


def test_zero_saturation_and_what_is_not_finite() -> None:
    assert not dequantise(*quantise(torch.zeros(2, 32)), torch.float32).any()
    tiny = torch.full((1, 32), 1e-44)
    assert dequantise(*quantise(tiny), torch.float32).isfinite().all()
    huge = torch.full((1, 32), 3e38)
    assert torch.equal(dequantise(*quantise(huge), torch.float32).isfinite(), huge.isfinite())
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(1, 32)
        x[0, 3] = bad
        assert not dequantise(*quantise(x), torch.float32).isfinite().all()


def test_a_token_is_quantised_on_its_own() -> None:
    x = torch.randn(20, 2, 16, generator=torch.Generator().manual_seed(1))
    bits, scale = quantise(x)
    for i in range(20):
        alone = quantise(x[i : i + 1])
        assert torch.equal(alone[0][0], bits[i])
        assert torch.equal(alone[1][0], scale[i])


# --------------------------------------------------------------------------------------- its bytes


def test_the_sum_counts_the_scales_to_the_byte() -> None:
    cache = plan_size(SMOL, EngineConfig(kv_cache_dtype="fp8"), torch.bfloat16)
    assert cache.bytes_per_token == 30 * 3 * 2 * (64 + 4)
    assert cache.num_blocks == (192 << 20) // (16 * cache.bytes_per_token) == 1028  # 546 in bf16
    assert str(cache) == (
        "30 layers x 3 kv heads x 2 (K, V) x (64 head dim x 1 byte + 4 of scale) = 12 KiB a token, "
        "x 16 = 191 KiB a block, x 1028 blocks = 192 MiB, 16,432 tokens"
    )
    small = replace(cache, num_blocks=5)
    kv = allocate(small, CPU, torch.bfloat16)
    assert isinstance(kv, Fp8Kv)
    assert kv.nbytes == 5 * small.bytes_per_block


def test_a_wide_head_doubles_the_blocks() -> None:
    wide = replace(SMOL, head_dim=128)
    one, two = (
        plan_size(wide, EngineConfig(kv_cache_dtype=d), torch.bfloat16).num_blocks for d in ("auto", "fp8")
    )
    assert two / one == pytest.approx(2 * 128 / 132, rel=0.01)


def test_another_format_is_refused() -> None:
    with pytest.raises(SetupError, match="--kv-cache-dtype must be auto or fp8"):
        EngineConfig(kv_cache_dtype="float32")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- the ops


def test_copies_copy_scales() -> None:
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (3, 2, 8, 2, 4, 16), generator=g, dtype=torch.uint8)
    kv = Fp8Kv(data, torch.rand(3, 2, 8, 2, 4, generator=g))
    want = Fp8Kv(kv.data.clone(), kv.scale.clone())
    ReferenceOps(CPU, torch.float32).copy_blocks(kv, [(1, 2), (2, 3), (4, 1)])
    for src, dst in ((1, 2), (2, 3), (4, 1)):
        for t in (want.data, want.scale):
            t[:, :, dst] = t[:, :, src]
    assert torch.equal(kv.data, want.data)
    assert torch.equal(kv.scale, want.scale)


def test_a_bad_row_is_seen_and_the_others_go_on() -> None:
    r = TorchRunner.from_weights(LLAMA3, random_weights(LLAMA3), FP8_64)
    driver = Driver(r)
    good, bad = driver.add([1, 2, 3]), driver.add([4, 5, 6])
    driver.step(2)
    assert isinstance(r.cache, Fp8Kv)
    with torch.inference_mode():
        r.cache.scale[1, 1, bad.table[0]] = float("nan")
    output = r.execute(Plan(0, [row_for(bad, 2, 1, True), row_for(good, 2, 1, True)]))
    assert output.bad_rows == [0]


@needs_native
def test_the_c_kernels_write_the_same_bytes() -> None:
    c = model(4, 2, 64)
    s = Setting(c, 16, torch.bfloat16, RAGGED)
    rows = torch.logspace(-30, 30, len(s.qkv))[:, None]
    rows[::7] = 2.0**-130  # subnormal scales
    s.qkv = s.rounded(s.qkv * rows)
    s.qkv[5, 400] = float("nan")
    s.qkv[6, 401] = float("inf")
    written = []
    for ops in (ReferenceOps(CPU, torch.bfloat16), cpu_native.NativeCpuOps(CPU, torch.bfloat16, c)):
        kv = Fp8Kv(torch.zeros(s.kv.shape, dtype=torch.uint8), torch.zeros(s.kv.shape[:-1]))
        w = attention_weights(ops, s.config, dict(s.weights), 0)
        w.k_norm = w.q_norm = None
        with torch.inference_mode():
            ops.qkv_prepare(s.qkv.to(torch.bfloat16), w, kv, ops.plan(s.batch, s.rope))
        written.append(kv)
    want, got = written
    at = (s.batch.slots // 16, slice(None), s.batch.slots % 16)
    for half in (0, 1):
        values = [dequantise(kv.data[half][at], kv.scale[half][at], torch.float32) for kv in written]
        assert torch.equal(values[0].isnan().any(-1), (~values[1].isfinite()).any(-1))
    ok = want.scale[1][at].isfinite()
    assert torch.equal(want.scale[1][at][ok], got.scale[1][at][ok])
    assert torch.equal(want.data[1][at][ok], got.data[1][at][ok])
    # K differs where its rotation rounds another way, and below 2^-126, where the kernels' bf16 is zero.
    ok = want.scale[0][at].isfinite()
    ok[::7] = False
    differ = want.data[0][at][ok] != got.data[0][at][ok]
    assert differ.float().mean() < 0.02


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_c_kernels_attend_as_exactly_as_over_bf16(shape: tuple[int, int, int], block_size: int) -> None:
    s = Setting(model(*shape), block_size, torch.bfloat16, RAGGED)
    kv = Fp8Kv(*quantise(s.kv))  # NaN outside the sequences

    def attention(ops: Ops) -> torch.Tensor:
        w = attention_weights(ops, s.config, dict(s.weights), 0)
        with torch.inference_mode():
            return ops.attention(s.q.to(ops.dtype), kv, w, ops.plan(s.batch, s.rope)).double()

    exact = attention(ReferenceOps(CPU, torch.float64))
    plain = attention(ReferenceOps(CPU, torch.bfloat16))
    ours = attention(cpu_native.NativeCpuOps(CPU, torch.bfloat16, s.config))
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


# -------------------------------------------------------------------------------------- the engine


class Fp8Case:
    """Prompts and what the model says after each with FP8 KV, alone and in one piece."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.weights = config, random_weights(config, seed)
        self.prompts = families(config)
        self.tokens = Driver(self.runner(FP8_64)).generate(self.prompts, NEW, batch=1)

    def runner(self, config: EngineConfig) -> TorchRunner:
        return TorchRunner.from_weights(self.config, dict(self.weights), config)


@pytest.fixture(scope="module", params=[LLAMA3, QWEN3], ids=lambda c: c.architecture)
def case(request: pytest.FixtureRequest) -> Fp8Case:
    return Fp8Case(request.param, 0)


def run(case: Fp8Case, **knobs: object) -> Run:
    return Run(case, kv_cache_dtype="fp8", **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [9, 40, 2048])
@pytest.mark.parametrize("caching", [True, False])
def test_hits_and_chunks_change_no_token(case: Fp8Case, budget: int, caching: bool) -> None:
    r = run(case, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for i in [*range(len(case.prompts))] * 2:
        r.add(i)
    r.finish()
    assert (sum(e.hit_tokens for e in r.events(PrefixLookup)) > 500) is caching  # type: ignore[attr-defined]


def test_eviction_and_preemption_change_no_token(case: Fp8Case) -> None:
    r = run(case, num_blocks=19, max_num_batched_tokens=33)
    for i in [*range(len(case.prompts))] * 2:
        r.add(i)
    r.finish()
    assert len(r.events(RequestPreempted)) > 3
    assert len(r.events(BlocksEvicted)) > 10


def test_forks_change_no_token(case: Fp8Case) -> None:
    r = run(case, num_blocks=200, max_num_batched_tokens=50)
    dice = random.Random(1)
    for i in range(len(case.prompts)):
        r.add(i)

    def now_and_then() -> None:
        running = [b for _, q in r.requests for b in q.branches if q.finish_reason is None]
        ready = [b for b in running if len(b.tokens) > len(b.request.prompt_token_ids)]
        if ready and dice.random() < 0.2:
            fork(r.core, dice.choice(ready))

    r.finish(now_and_then)
    assert r.events(BlocksCopied)


def test_float32_on_the_cpu_is_as_independent_of_chunks(case: Fp8Case) -> None:
    config = replace(FP8_64, dtype="float32", ops="cpu")
    whole = Driver(case.runner(config)).generate(case.prompts, NEW, batch=1)
    assert Driver(case.runner(config), seed=1).generate(case.prompts, NEW, chunk=13, batch=4) == whole


# ----------------------------------------------------------------------------------------- quality


def test_teacher_forcing_loses_little(builtin_model: ModelFiles) -> None:
    """Measured over the page: the mean log probability falls by 0.011, 0.07 a token in either direction."""
    ids = tokenizer.load(builtin_model).encode(PAGE.read_text("utf-8"))[:600]
    loaded = load_weights.load(builtin_model)
    plain, fp8 = (
        logprobs(loaded, ids, EngineConfig(device="cpu", num_blocks=80, kv_cache_dtype=d))
        for d in ("auto", "fp8")
    )
    difference = fp8.of(ids) - plain.of(ids)
    assert abs(difference.mean().item()) <= 0.03
    assert difference.abs().mean().item() <= 0.1
    assert plain.divergence(fp8) <= 0.015
