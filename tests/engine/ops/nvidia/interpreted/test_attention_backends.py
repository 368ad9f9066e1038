"""flash-attn and flashinfer as attention: the arguments that they get, compared with the reference through stand-ins
for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.model.torch_runner import TorchRunner
from engine.ops import get_ops
from engine.ops.base import StepInput
from engine.ops.nvidia import attention_library as library_ops
from engine.ops.nvidia import flash_attn, flashinfer
from engine.ops.nvidia.flashinfer import FlashInferOps
from engine.ops.nvidia.triton import TritonOps
from engine.ops.reference import attend
from tests.engine.attention_libraries import LIBRARIES
from tests.engine.ops.test_ops import CPU, Setting, model
from tests.engine.tiny import QWEN3, Driver, random_weights

BF16, F32 = torch.bfloat16, torch.float32
RAGGED = [(1, 1), (1, 16), (1, 17), (2, 2), (3, 33), (11, 64), (4, 130), (300, 300), (5, 261)]
DECODES = [(1, 1), (1, 16), (1, 17), (1, 130), (1, 256), (1, 257)]
WAYS = [
    ("flash-attn", "flash_attn", 256),
    ("flash-attn", "flash_attn_interface", 16),
    ("flashinfer", "flashinfer", 16),
]
"""(back end, the library that is installed, block size)."""
BACKENDS = pytest.mark.parametrize(("name", "library", "block_size"), WAYS, ids=[w[1] for w in WAYS])


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    LIBRARIES[name](module)
    monkeypatch.setitem(sys.modules, name, module)


def make(name: str, s: Setting) -> TritonOps:
    ops = get_ops("triton", CPU, s.dtype, s.config, attention=name, block_size=s.block_size)  # type: ignore[arg-type]
    assert isinstance(ops, TritonOps) and (ops.name, ops.attention_backend) == ("triton", name)
    return ops


@BACKENDS
@pytest.mark.parametrize("lengths", [RAGGED, DECODES], ids=["ragged", "decodes"])
def test_a_step_is_the_references(
    name: str, library: str, block_size: int, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(library, monkeypatch)
    s = Setting(model(6, 2, 64), block_size, BF16, lengths)
    ops = make(name, s)
    q, kv = s.q.to(BF16), s.kv.to(BF16)
    scale = 0.2 if name == "flash-attn" else 64**-0.5
    for window in (None, 20):
        want = attend(q, kv, s.batch, F32, scale, window)
        ours = ops.attend(q, kv, ops.plan(s.batch, s.rope, window), scale, window)
        torch.testing.assert_close(ours, want, rtol=1e-2, atol=1e-2)
    if name == "flash-attn":
        want = attend(q, kv, s.batch, F32, scale, 20, 0.7)
        ours = ops.attend(q, kv, ops.plan(s.batch, s.rope), scale, 20, 0.7)
        torch.testing.assert_close(ours, want, rtol=1e-2, atol=1e-2)


@BACKENDS
def test_a_static_plan_follows_its_rows(
    name: str, library: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph uses it: buffers that stay, rows and lengths that change, padding behind them."""
    install(library, monkeypatch)
    s = Setting(model(4, 2, 64), block_size, BF16, DECODES)
    ops, b = make(name, s), s.batch
    bucket = 4
    static = StepInput(
        *(torch.zeros(bucket, dtype=t.dtype) for t in (b.token_ids, b.positions, b.slots)), b.tables,
        torch.zeros(bucket, dtype=torch.int32), torch.arange(bucket + 1, dtype=torch.int32),
        torch.ones(bucket, dtype=torch.int32), torch.arange(bucket), [1] * bucket, [1] * bucket,
    )  # fmt: skip
    plan = ops.static_plan(static, s.rope)
    kv = s.kv.to(BF16)
    for chosen in ([5, 1, 3], [0], [2, 4, 5, 0]):
        n = len(chosen)
        static.rows[:n], static.kv_lens[:n] = b.rows[chosen], b.kv_lens[chosen]
        lens = [b.kv_lens_host[i] for i in chosen]
        ops.fill(plan, lens)
        q = torch.randn(bucket, 4, 64).to(BF16)
        here = replace(b, rows=b.rows[chosen], q_lens=[1] * n, kv_lens_host=lens)
        want = attend(q[:n], kv, here, F32, 64**-0.5)
        ours = ops.attend(q, kv, plan, 64**-0.5)
        torch.testing.assert_close(ours[:n], want, rtol=1e-2, atol=1e-2)


@BACKENDS
def test_a_whole_engine_says_the_same(
    name: str, library: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(library, monkeypatch)
    monkeypatch.setattr(
        library_ops, "DTYPES", (F32,)
    )  # the libraries' own limit, which the stand-ins do not have
    config = replace(QWEN3, num_layers=1, head_dim=64, num_heads=2, num_kv_heads=1)
    weights = random_weights(config)
    knobs = EngineConfig(
        device="cpu", dtype="float32", num_blocks=9 if block_size == 256 else 33, block_size=block_size,
        max_model_len=24, threads=1,
    )  # fmt: skip
    prompts = [[(31 * i + 7 * j) % 199 for j in range(n)] for i, n in enumerate((1, 16, 20))]
    said = []
    for more in ({"ops": "reference"}, {"ops": "triton", "attention_backend": name}):
        runner = TorchRunner.from_weights(config, dict(weights), replace(knobs, **more))  # type: ignore[arg-type]
        said.append(Driver(runner).generate(prompts, 3, 9))
    assert said[0] == said[1]


# ---------------------------------------------------------------------------------------- refusals


def refusal(name: str, **more: object) -> str:
    how = {"dtype": BF16, "dim": 64, "block_size": 16, "fp8_kv": False} | more
    dim, dtype = how.pop("dim"), how.pop("dtype")
    with pytest.raises(SetupError) as e:
        get_ops("triton", CPU, dtype, model(2, 1, dim), attention=name, **how)  # type: ignore[arg-type]
    assert len(str(e.value)) <= 200
    return str(e.value)


def test_what_is_not_installed_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not installed: pip install flash-attn (or FlashAttention 3)" in refusal("flash-attn")
    assert "is not installed: pip install flashinfer-python" in refusal("flashinfer")
    old = TritonOps.__init__

    def ampere(self: TritonOps, *args: object, **more: object) -> None:
        old(self, *args, **more)  # type: ignore[arg-type]
        self.capability = (8, 6)

    monkeypatch.setattr(TritonOps, "__init__", ampere)
    install("flash_attn_interface", monkeypatch)  # which is Hopper's
    assert "is not installed: pip install flash-attn, or leave it out" in refusal("flash-attn")


@BACKENDS
def test_what_a_library_does_not_compute_is_refused(
    name: str, library: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(library, monkeypatch)
    assert "leave out --kv-cache-dtype fp8" in refusal(name, fp8_kv=True, block_size=block_size)
    assert "computes in bfloat16" in refusal(name, dtype=F32, block_size=block_size)
    dim = 20 if name == "flash-attn" else 96
    assert f"no kernel for a head_dim of {dim}" in refusal(name, dim=dim, block_size=block_size)
    if library == "flash_attn":
        assert "say --block-size 256" in refusal(name, block_size=128)


def test_a_library_for_another_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c105ErrorC2E")

    for module in (flash_attn, flashinfer):
        monkeypatch.setattr(module.importlib, "import_module", broken)
    for name in ("flash-attn", "flashinfer"):
        assert "load (undefined symbol" in refusal(name)


def test_flashinfer_has_no_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    install("flashinfer", monkeypatch)
    s = Setting(model(2, 1, 64), 16, BF16, DECODES)
    ops = make("flashinfer", s)
    assert isinstance(ops, FlashInferOps)
    with pytest.raises(AssertionError):
        ops.attend(s.q.to(BF16), s.kv.to(BF16), ops.plan(s.batch, s.rope), 0.125, None, 3.0)
