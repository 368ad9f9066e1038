"""Compares every kernel on the card with the reference ops in float64, and the whole engine with itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model.graphs import cuda_capture
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepPlan
from engine.ops.fp8 import Fp8Kv
from engine.ops.fp8 import quantise as to_fp8
from engine.ops.nvidia import scaled
from engine.ops.nvidia.triton import TritonOps
from engine.ops.reference import ReferenceOps, attend
from engine.ops.sampler import PARAMS, SampleRows
from engine.ops.sampler import sample as torch_sample
from engine.ops.weights import Fp8, quantise
from tests.engine.tiny import QWEN3, Driver, random_weights
from tests.gpu import peers
from tests.gpu.machine import Machine, Table
from tests.gpu.problems import QWEN3_8B, Problem

REAL = [(1, 1), (1, 16), (1, 17), (1, 4097), (2, 2), (33, 900), (300, 300), (129, 2000)]
DRY = [(1, 1), (1, 17), (3, 40)]


def run(m: Machine) -> list[Table]:
    """One row for each kernel and shape: its relative error, that of torch in the same dtype, and the verdict."""
    table = Table("Correctness", ("what", "error", "torch's", "verdict"))
    shapes = [(32, 8, 128), (9, 3, 64), (8, 1, 96), (16, 8, 256)] if m.real else [(4, 2, 32)]
    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv_heads, dim in shapes:
            c = replace(QWEN3_8B, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
            _attention(m, table, Problem(c, REAL if m.real else DRY, 16, m.device, dtype), dtype)
        _small(m, table, dtype)
    _linears(m, table)
    _backends(m, table)
    _sampling(m, table)
    _engine(m, table)
    return [table]


def _say(table: Table, what: str, ours: Tensor, plain: Tensor, exact: Tensor, slack: float = 1e-6) -> None:
    size = exact.norm()
    error, theirs = ((x.double() - exact).norm() / size for x in (ours, plain))
    right = bool(error <= 2 * theirs + slack)
    table.rows.append((what, f"{error:.1e}", f"{theirs:.1e}", "right" if right else "WRONG"))


def _same(table: Table, what: str, same: bool) -> None:
    table.rows.append((what, "none" if same else "differs", "", "right" if same else "WRONG"))


def _attention(m: Machine, table: Table, p: Problem, dtype: torch.dtype) -> None:
    c = p.model
    name = f"{c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}, {str(dtype).removeprefix('torch.')}"
    kv, q, scale = p.cache(), p.q(), c.head_dim**-0.5
    for fp8 in (False, True):
        cache: Any = p.fp8(kv) if fp8 else kv
        wide: Any = cache if fp8 else kv.double()
        ops = TritonOps(m.device, dtype, c, fp8_kv=fp8)
        for window, softcap in ((None, None), (100, 30.0)):
            exact = attend(q.double(), wide, p.batch, torch.float64, scale, window, softcap)
            plain = attend(q, cache, p.batch, torch.float32, scale, window, softcap)
            ours = ops.attend(q, cache, ops.plan(p.batch, p.rope(), window), scale, window, softcap)
            what = "attention" + ", FP8 KV" * fp8 + (", window, soft-cap" if window else "")
            # In bf16 the softmax weights are rounded, as in every kernel for tensor cores.
            _say(table, f"{what}: {name}", ours, plain, exact, 1e-6 if dtype == torch.float32 else 4e-3)
    qkv = torch.randn(p.tokens, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, device=m.device).to(dtype)
    w, rope = p.weights(), p.rope()
    exact_kv, plain_kv, our_kv = (
        torch.zeros(kv.shape, device=m.device, dtype=d) for d in (torch.float64, dtype, dtype)
    )
    results = []
    for ops, x, cache in (
        (ReferenceOps(m.device, torch.float64), qkv.double(), exact_kv),
        (ReferenceOps(m.device, dtype), qkv, plain_kv),
        (TritonOps(m.device, dtype, c), qkv, our_kv),
    ):
        own = w if x.dtype == dtype else replace(w, q_norm=w.norm.double(), k_norm=w.norm.double())
        results.append(
            torch.cat((ops.qkv_prepare(x, own, cache, StepPlan(p.batch, rope)).flatten(), cache.flatten()))
        )
    _say(table, f"QK-norm, RoPE, write: {name}", results[2], results[1], results[0].double())
    ours, plain = (Fp8Kv(torch.zeros(kv.shape, dtype=torch.uint8, device=m.device),
                         torch.zeros(kv.shape[:-1], device=m.device)) for _ in range(2))  # fmt: skip
    for ops, cache in ((TritonOps(m.device, dtype, c), ours), (ReferenceOps(m.device, dtype), plain)):
        ops.qkv_prepare(qkv, w, cache, StepPlan(p.batch, rope))
    _same(table, f"bits of V in FP8: {name}", torch.equal(ours.data[1], plain.data[1]))


def _small(m: Machine, table: Table, dtype: torch.dtype) -> None:
    ops, plain = TritonOps(m.device, dtype, QWEN3_8B), ReferenceOps(m.device, dtype)
    exact = ReferenceOps(m.device, torch.float64)
    a, r, w = (torch.randn(50, 4096 if m.real else 96, device=m.device).to(dtype) for _ in range(3))
    name = str(dtype).removeprefix("torch.")
    summed = plain.add_rms_norm(a, r, w[0], 1e-6)[1]
    want = exact.add_rms_norm(None, summed.double(), w[0].double(), 1e-6)[0]
    _say(table, f"RMSNorm: {name}", ops.add_rms_norm(a, r.clone(), w[0], 1e-6)[0],
         plain.add_rms_norm(a, r, w[0], 1e-6)[0], want)  # fmt: skip
    _say(table, f"SiLU x up: {name}", ops.silu_mul(a), plain.silu_mul(a), exact.silu_mul(a.double()))
    cache = torch.randn(3, 2, 16, 2, 16, 32, device=m.device).to(dtype)
    copies = [cache.clone(), cache.clone()]
    for o, c in zip((ops, plain), copies, strict=True):
        o.copy_blocks(c, [(1, 2), (2, 3), (7, 1), (5, 9)])
    _same(table, f"copy of blocks: {name}", torch.equal(*copies))


def _linears(m: Machine, table: Table) -> None:
    """Compares with the product of the decoded values; for FP8 with many rows the input is decoded from FP8 too."""
    inputs, outputs = (4096, 6144) if m.real else (64, 48)
    for form in ("int8", "int4", "fp8"):
        if form == "fp8" and m.capability < (8, 9):
            continue
        ops = TritonOps(m.device, torch.bfloat16, QWEN3_8B, form)  # type: ignore[arg-type]
        w = quantise(torch.randn(outputs, inputs, device=m.device).mul_(0.02), form)  # type: ignore[arg-type]
        packed, values = ops.pack(w), w.values(torch.float64)
        for rows in (1, 16, 17, 64, 65, 300) if m.real else (2, 20, 70):
            x = torch.randn(rows, inputs, device=m.device).bfloat16()
            seen, how = x, "as they are"
            if form == "fp8" and rows >= scaled.FROM_ROWS and ops._scaled:
                bits, scale = to_fp8(x)
                seen = Fp8(bits.view(torch.float8_e4m3fn), scale).values(torch.float32)
                how = "scaled"
            exact = seen.double() @ values.T
            plain = torch.nn.functional.linear(seen.float(), values.float()).bfloat16()
            _say(
                table, f"{form.upper()} linear, {rows} rows {how}", ops.linear(x, packed), plain, exact, 1e-3
            )


def _backends(m: Machine, table: Table) -> None:
    """flash-attn and flashinfer, if installed: a step of mixed lengths, and decodes in a captured graph."""
    c, dtype = QWEN3_8B, torch.bfloat16
    scale = c.head_dim**-0.5
    for name, ops, block_size in peers.backends(m, c):
        p = Problem(c, REAL if m.real else DRY, block_size, m.device, dtype)
        kv, q = p.cache(), p.q()
        exact = attend(q.double(), kv.double(), p.batch, torch.float64, scale)
        plain = attend(q, kv, p.batch, torch.float32, scale)
        _say(
            table,
            f"{name}: a ragged step",
            ops.attend(q, kv, ops.plan(p.batch, p.rope()), scale),
            plain,
            exact,
            4e-3,
        )
        p = Problem(c, [(1, n) for n in ((1, 300, 4097) if m.real else (1, 20))], block_size, m.device, dtype)
        kv, q = p.cache(), p.q()
        exact = attend(q.double(), kv.double(), p.batch, torch.float64, scale)
        plain = attend(q, kv, p.batch, torch.float32, scale)
        plan = ops.static_plan(p.batch, p.rope())

        def body(ops: TritonOps = ops, q: Tensor = q, kv: Tensor = kv, plan: StepPlan = plan) -> Tensor:
            return ops.attend(q, kv, plan, scale)

        replay = cuda_capture(m.device)(body) if m.real else body
        ops.fill(plan, p.batch.kv_lens_host)
        _say(table, f"{name}: decodes by a graph", replay(), plain, exact, 4e-3)


def _sampling(m: Machine, table: Table) -> None:
    """Counts different tokens. Sums that are rounded differently may give another token in one draw of a million."""
    n, vocab = (256, 151_936) if m.real else (4, 999)
    params = np.zeros(n, PARAMS)
    params["temperature"] = np.resize([0, 0.7, 1.3, 1], n)
    params["top_p"], params["top_k"], params["min_p"] = (
        np.resize(v, n) for v in ([1, 0.9], [0, 0, 50], [0, 0, 0, 0, 0.02])
    )
    params["seed"] = np.arange(n) * 2**33 + 7
    rows = SampleRows(params, np.arange(n, dtype=np.int64))
    logits = torch.randn(n, vocab, device=m.device) * 3
    ops = TritonOps(m.device, torch.float32, QWEN3_8B)
    ours, theirs = ops.sample(logits, rows)[0], torch_sample(logits, rows)[0]
    apart = sum(a != b for a, b in zip(ours, theirs, strict=True))
    table.rows.append(
        (f"{n} draws of {vocab:,} tokens", f"{apart} apart", "", "right" if apart <= n // 100 else "WRONG")
    )


def _engine(m: Machine, table: Table) -> None:
    """Tokens of a tiny model in float32: with the reference ops, with the kernels, and (on a card) with graphs."""
    weights = random_weights(QWEN3)
    prompts = [
        [(31 * i + 7 * j) % 199 for j in range(n)] for i, n in enumerate((1, 17, 60) if m.real else (1, 5))
    ]
    said = []
    for ops in ("reference", "triton"):
        config = EngineConfig(
            device=m.device.type, dtype="float32", ops=ops, num_blocks=129, max_model_len=100
        )  # type: ignore[arg-type]
        runner = TorchRunner.from_weights(QWEN3, dict(weights), config)
        said.append(Driver(runner).generate(prompts, 24 if m.real else 2, 20))
    _same(table, "tokens of a whole model, decoded by graphs", said[0] == said[1])
