"""Back ends against float64: error at most twice that of plain torch in the same dtype, on any shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.model.batch import DeviceRows
from engine.model.decoder import Decoder
from engine.model.kv_cache import CacheSize, allocate
from engine.model.layers import attention_weights, mlp_weights, rope_table
from engine.model.torch_runner import TorchRunner
from engine.ops import get_ops
from engine.ops.base import Ops, StepInput, StepPlan, launches
from engine.ops.cpu import library as native
from engine.ops.cpu import native_ops as cpu_native
from engine.ops.cpu.packed import CpuOps
from engine.ops.fp8 import parts
from engine.ops.reference import ReferenceOps
from engine.ops.weights import Quantization
from engine.params import SamplingParams
from engine.step.runner import Plan
from engine.step.sequence import Request, Sequence
from tests.engine.rig import row_for
from tests.engine.tiny import QWEN2, QWEN3, Driver, random_weights

CPU = torch.device("cpu")
RAGGED = [
    (1, 1),
    (1, 16),
    (1, 17),
    (1, 128),
    (1, 129),
    (1, 300),
    (2, 2),
    (5, 21),
    (13, 128),
    (16, 144),
    (150, 333),
]
"""(tokens computed, tokens attended to): decodes and chunks at the edges of blocks, key blocks and tiles."""
SHAPES = [(4, 4, 32), (9, 3, 64), (4, 1, 128), (16, 2, 32), (12, 1, 64), (2, 2, 96), (2, 1, 256)]
"""Heads, KV heads, head_dim."""

needs_native = pytest.mark.skipif(native.load() is None, reason="no AVX-512-bf16 or no C compiler here")
BACKENDS = [
    pytest.param("torch", torch.bfloat16, id="torch-bf16"),
    pytest.param("torch", torch.float32, id="torch-fp32"),
    pytest.param("native", torch.bfloat16, id="native-bf16", marks=needs_native),
]


def make(backend: str, dtype: torch.dtype, model: ModelConfig) -> Ops:
    if backend == "native":
        assert cpu_native.available(model)
        return cpu_native.NativeCpuOps(CPU, dtype, model)
    return CpuOps(CPU, dtype)


def model(heads: int, kv_heads: int, dim: int, family: ModelConfig = QWEN3) -> ModelConfig:
    c = replace(family, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    return replace(c, num_layers=1, hidden_size=96, intermediate_size=160)


def step(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> StepInput:
    """A step of such sequences over shuffled blocks."""
    r = random.Random(0)
    free = r.sample(range(1, num_blocks), num_blocks - 1)
    rows = []
    for i, (n, total) in enumerate(lengths):
        tokens = [r.randrange(100) for _ in range(total)]
        seq = Sequence(i, Request(i, tokens, SamplingParams(temperature=0.0), 0.0))
        seq.table = [free.pop() for _ in range(-(-total // block_size))]
        rows.append(row_for(seq, total - n, n, True))
    batch, _ = DeviceRows(len(rows), num_blocks, block_size, CPU).apply(Plan(0, rows))
    return batch


@dataclass
class Setting:
    """One attention problem with its operands in float64, already rounded to `dtype`."""

    config: ModelConfig
    block_size: int
    dtype: torch.dtype
    lengths: list[tuple[int, int]]

    def __post_init__(self) -> None:
        blocks = sum(-(-total // self.block_size) for _, total in self.lengths) + 4
        self.batch = step(self.lengths, self.block_size, blocks)
        self.rope = rope_table(self.config, 400, CPU)
        c, g = self.config, torch.Generator().manual_seed(1)
        shape = (2, blocks, c.num_kv_heads, self.block_size, c.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=torch.float64)
        for row, total in enumerate(self.batch.kv_lens_host):
            slots = torch.arange(total)
            block = self.batch.tables[row, slots // self.block_size].long()
            values = torch.randn(2, total, c.num_kv_heads, c.head_dim, generator=g, dtype=torch.float64)
            for half in (0, 1):
                self.kv[half, block, :, slots % self.block_size] = self.rounded(values[half])
        tokens = len(self.batch.token_ids)
        self.q = self.rounded(torch.randn(tokens, c.num_heads, c.head_dim, generator=g))
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = self.rounded(torch.randn(tokens, width, generator=g))
        self.hidden = self.rounded(torch.randn(tokens, c.hidden_size, generator=g))
        self.weights = {k: self.rounded(w) for k, w in random_weights(c, 2).items()}

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def run(self, ops: Ops, f: Callable[[Ops, StepPlan, Tensor], Tensor]) -> Tensor:
        with torch.inference_mode():
            return f(ops, ops.plan(self.batch, self.rope), self.kv.to(ops.dtype)).double()

    def check(self, ops: Ops, f: Callable[[Ops, StepPlan, Tensor], Tensor], worst: bool = True) -> None:
        """f's error with `ops`, root mean square and (of one operation) largest, is at most twice the
        error of the reference ops in the same dtype."""
        exact = self.run(ReferenceOps(CPU, torch.float64), f)
        plain = self.run(ReferenceOps(CPU, self.dtype), f)
        ours = self.run(ops, f)
        assert ours.isfinite().all()
        size = exact.square().mean().sqrt()
        assert (ours - exact).square().mean().sqrt() <= 2 * (
            plain - exact
        ).square().mean().sqrt() + 1e-6 * size
        if worst:
            assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6 * size


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_attention(backend: str, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    s = Setting(model(*shape), block_size, dtype, RAGGED)

    def attention(ops: Ops, plan: StepPlan, kv: Tensor) -> Tensor:
        w = attention_weights(ops, s.config, dict(s.weights), 0)
        return ops.attention(s.q.to(ops.dtype), kv, w, plan)

    s.check(make(backend, dtype, s.config), attention)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["plain", "qk-norm"])
def test_qkv_prepare(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int], family: ModelConfig
) -> None:
    s = Setting(model(*shape, family), 16, dtype, RAGGED)

    def prepare(ops: Ops, plan: StepPlan, kv: Tensor) -> Tensor:
        w = attention_weights(ops, s.config, dict(s.weights), 0)
        q = ops.qkv_prepare(s.qkv.to(ops.dtype), w, kv, plan)
        block, slot = s.batch.slots // 16, s.batch.slots % 16
        return torch.cat([q, kv[0][block, :, slot], kv[1][block, :, slot]], dim=1)

    s.check(make(backend, dtype, s.config), prepare)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("family", [QWEN2, QWEN3], ids=["bias", "qk-norm"])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 40)] * 8, RAGGED], ids=["one", "eight", "ragged"])
def test_whole_blocks(
    backend: str, dtype: torch.dtype, family: ModelConfig, lengths: list[tuple[int, int]]
) -> None:
    s = Setting(replace(model(6, 2, 64, family), mlp_bias=True), 16, dtype, lengths)

    def layer(ops: Ops, plan: StepPlan, kv: Tensor) -> Tensor:
        weights = dict(s.weights)
        attention, mlp = attention_weights(ops, s.config, weights, 0), mlp_weights(ops, s.config, weights, 0)
        hidden = s.hidden.to(ops.dtype)
        residual = hidden.float() if isinstance(ops, cpu_native.NativeCpuOps) else hidden
        state = ops.attention_block((None, residual.clone()), attention, kv, plan)
        delta, residual = ops.mlp_block(state, mlp, plan)
        return residual if delta is None else residual + delta

    s.check(make(backend, dtype, s.config), layer, worst=False)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 11, 12, 13, 30, 131])
def test_linear(backend: str, dtype: torch.dtype, rows: int) -> None:
    ops = make(backend, dtype, model(2, 2, 32))
    g = torch.Generator().manual_seed(rows)
    for n, k in ((1, 64), (33, 64), (96, 130), (200, 576)):
        x, w, b = (torch.randn(s, generator=g).to(dtype) for s in ((rows, k), (n, k), (n,)))
        exact = x.double() @ w.double().T + b.double()
        for y in (ops.linear(x, ops.pack(w, b)), ops.logits(x, ops.pack(w, b))):
            error = (torch.nn.functional.linear(x, w, b).double() - exact).norm()
            assert (y.double() - exact).norm() <= 2 * error + 1e-6 * exact.norm()


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16 KV", "fp8 KV"])
@pytest.mark.parametrize("wanted", [[0, 1, 1, 1, 7, 40, 40], [], [3]], ids=["some", "none", "one"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_whole_decoder_is_its_blocks_one_after_the_other(
    quantization: Quantization | None, fp8: bool, wanted: list[int], threads: int
) -> None:
    """Bit for bit, KV included; rows that sample several times, or not at all."""
    c = replace(model(6, 2, 64), num_layers=3, vocab_size=131)
    ops = cpu_native.NativeCpuOps(CPU, torch.bfloat16, c, quantization)
    decoder = Decoder(c, random_weights(c, 5), ops, 400)
    lengths = [(1, 40), (1, 1), (30, 41), (9, 300)]
    batch = step(lengths, 16, 40)
    batch.logit_rows = torch.tensor(wanted, dtype=torch.int64)
    size = CacheSize(c.num_layers, c.num_kv_heads, c.head_dim, 1 if fp8 else 2, 16, 40, 4 if fp8 else 0)
    caches = [allocate(size, CPU, torch.bfloat16) for _ in range(2)]
    for half in (t for cache in caches for t in parts(cache)):
        half.fill_(1)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            ours = ops.decoder(decoder.weights, caches[0], ops.plan(batch, decoder.rope))
            blocks = Ops.decoder(ops, decoder.weights, caches[1], ops.plan(batch, decoder.rope))
    finally:
        torch.set_num_threads(2)
    assert ours.shape == (len(wanted), 131)
    # The last norm alone is torch's there: it sums in another order.
    torch.testing.assert_close(ours, blocks, rtol=2e-2, atol=2e-2)
    for a, b in zip(parts(caches[0]), parts(caches[1]), strict=True):
        assert torch.equal(a, b)


@needs_native
def test_silu_is_finite_at_the_ends() -> None:
    c = model(2, 2, 32)
    ops = make("native", torch.bfloat16, c)
    w = {k: v * 0 for k, v in random_weights(c).items()}
    w["model.layers.0.post_attention_layernorm.weight"] += 1
    w["model.layers.0.mlp.gate_proj.weight"][:, 0] = torch.linspace(-1e30, 1e30, c.intermediate_size)
    w["model.layers.0.mlp.up_proj.weight"][:, 0] = 1
    w["model.layers.0.mlp.down_proj.weight"][:, 0] = 1
    x = torch.zeros(1, c.hidden_size)
    x[0, 0] = 1
    with torch.inference_mode():
        mlp = mlp_weights(ops, c, w, 0)
        _, y = ops.mlp_block((None, x), mlp, ops.plan(step([(1, 1)], 16, 4), rope_table(c, 4, CPU)))
    assert not y.isnan().any()


@needs_native
def test_a_decoding_row_does_not_depend_on_its_batch() -> None:
    c = replace(model(6, 2, 64), num_layers=2)
    weights = random_weights(c, 3)
    config = EngineConfig(device="cpu", num_blocks=256, threads=2)
    prompts = [[(7 * i + j) % c.vocab_size for j in range(20 + 13 * i)] for i in range(9)]
    runner = TorchRunner.from_weights(c, dict(weights), config)
    assert isinstance(runner.model.ops, cpu_native.NativeCpuOps)
    logits: list[Tensor] = []
    forward = runner.model.forward

    def record(batch: StepInput, cache: Tensor) -> Tensor:
        logits.append(forward(batch, cache))
        return logits[-1]

    runner.model.forward = record  # type: ignore[method-assign]
    driver = Driver(runner)
    seqs = [driver.add(p) for p in prompts]
    driver.step(1 << 20)
    together = [logits[-1]]
    driver.step(1)
    together.append(logits[-1])
    for i, seq in enumerate(seqs):
        driver.drop(seq)
        again = driver.add(prompts[i])
        driver.step(16, [again])
        while again.num_computed < len(prompts[i]):
            driver.step(16, [again])
        assert torch.equal(logits[-1][0], together[0][i])
        driver.step(1, [again])
        assert torch.equal(logits[-1][0], together[1][i])
        driver.drop(again)


# ---------------------------------------------------------------------------- copies and the registry


def test_copies_run_in_order_and_never_race() -> None:
    assert list(launches([(1, 2), (3, 4)])) == [([1, 3], [2, 4])]
    assert list(launches([(1, 2), (2, 3)])) == [([1], [2]), ([2], [3])]
    assert list(launches([(1, 2), (3, 1)])) == [([1], [2]), ([3], [1])]
    assert list(launches([])) == []
    r = random.Random(0)
    ops = ReferenceOps(CPU, torch.float32)
    for _ in range(50):
        pairs = [tuple(r.sample(range(8), 2)) for _ in range(r.randrange(12))]
        cache = torch.arange(8.0).repeat(3, 2, 1)[..., None, None, None].clone()
        want = list(range(8))
        for src, dst in pairs:
            want[dst] = want[src]
        ops.copy_blocks(cache, pairs)  # type: ignore[arg-type]
        assert cache[2, 1, :, 0, 0, 0].tolist() == want


def test_the_registry_says_what_it_has() -> None:
    c = model(2, 2, 32)
    assert isinstance(get_ops("auto", CPU, torch.float64, c), ReferenceOps)
    assert get_ops("auto", CPU, torch.float32, c).name == "cpu"
    assert type(get_ops("cpu", CPU, torch.bfloat16, replace(c, head_dim=48))) is CpuOps
    for name, dtype in (("triton", torch.bfloat16), ("cpu", torch.float64), ("metal", torch.float32)):
        with pytest.raises(SetupError, match="--ops"):
            get_ops(name, CPU, dtype, c)


@pytest.mark.parametrize("backend", ["triton", "flash-attn", "flashinfer"])
def test_an_attention_back_end_needs_a_gpu_and_our_other_kernels(backend: Any) -> None:
    c = model(2, 2, 32)
    with pytest.raises(SetupError, match=f"--attention-backend {backend} needs an NVIDIA GPU"):
        get_ops("auto", CPU, torch.bfloat16, c, attention=backend)
    for ops in ("reference", "cpu"):
        with pytest.raises(SetupError, match=f"--attention-backend {backend} goes with --ops triton, not"):
            get_ops(ops, CPU, torch.bfloat16, c, attention=backend)
    with pytest.raises(SetupError, match="must be auto, triton, flash-attn or flashinfer, not 'xformers'"):
        EngineConfig(attention_backend="xformers")  # type: ignore[arg-type]


def test_without_a_compiler_the_cpu_falls_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("KVTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    try:
        assert native.load() is None
        assert type(get_ops("auto", CPU, torch.bfloat16, model(2, 2, 32))) is CpuOps
        monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setenv("CC", "false")  # a compiler that fails
        native.load.cache_clear()
        assert native.load() is None
    finally:
        monkeypatch.undo()
        native.load.cache_clear()


@needs_native
def test_a_damaged_library_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.load.cache_clear()
    try:
        monkeypatch.setenv("KVTOP_CACHE", str(tmp_path / "sound"))
        assert native.load() is not None
        (sound,) = (tmp_path / "sound/kernels").iterdir()
        damaged = tmp_path / "damaged/kernels" / sound.name
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(b"not a library")
        monkeypatch.setenv("KVTOP_CACHE", str(tmp_path / "damaged"))
        native.load.cache_clear()
        assert native.load() is not None
        assert damaged.stat().st_size == sound.stat().st_size
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
