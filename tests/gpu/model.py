"""A whole model, Qwen3-8B's shape with random weights: prefill, and decode with and without graphs, by format.

Decode is the forward and the draw, including the host, without a scheduler.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.files.model_config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.graphs import DecodeGraphs, cuda_capture
from engine.model.kv_cache import CacheSize, allocate
from engine.model.layers import Weights
from engine.ops.nvidia.triton import TritonOps
from engine.ops.weights import Quantization
from tests.gpu.machine import Machine, Table
from tests.gpu.problems import QWEN3_8B, Problem
from tests.gpu.sampling import rows

TINY = replace(QWEN3_8B, num_layers=1, hidden_size=64, intermediate_size=96, vocab_size=300, num_heads=4,
               num_kv_heads=2, head_dim=32)  # fmt: skip


WAYS: tuple[tuple[str, bool, Quantization | None], ...] = (
    ("bf16, bf16", False, None), ("bf16, fp8", True, None), ("int8, fp8", True, "int8"), ("int4, fp8", True, "int4"),
    ("fp8, fp8", True, "fp8"),
)  # fmt: skip
DECODE = {1: 225, 8: 1550, 64: 6000}
"""Target for bf16: tokens a second by batch size, with 2,048 tokens of context."""
PREFILL = 30_000
FP8_GAIN = 1.3
"""Target for FP8 KV: how many times as fast it must be at the largest batch."""


def run(m: Machine) -> list[Table]:
    """Decode with 2,048 tokens of context and a temperature of 1. Prefill in one step and in chunks."""
    c, dtype = QWEN3_8B if m.real else TINY, torch.bfloat16
    columns = (
        "weights, KV",
        "at once",
        "ms, graph",
        "tok/s",
        "target",
        "of roofline",
        "ms, eager",
        "tok/s, eager",
    )
    decode = Table("Decode, Qwen3-8B's shape, 2,048 tokens of context", columns)
    prefill = Table("Prefill, Qwen3-8B's shape", ("weights, KV", "tokens", "ms", "tok/s", "target"))
    need = 2 * 8_190_735_360 * 1.15
    if m.real and need > m.free():
        decode.rows.append(("bf16", f"needs {need / 2**30:.0f} GiB", *[""] * 6))
        return [decode, prefill]
    speeds: dict[tuple[str, int], float] = {}
    for name, fp8, weights in WAYS if m.real else (*WAYS[:2], WAYS[-1]):
        if weights == "fp8" and m.capability < (8, 9):
            decode.rows.append((name, "refused: no FP8 here", *[""] * 6))
            continue
        ops = TritonOps(m.device, dtype, c, weights, fp8_kv=fp8)
        model = Decoder(c, random(c, m.device, dtype), ops, 8193 if m.real else 30)
        for batch in DECODE if m.real else (1,):
            _decode(m, decode, model, name, fp8, batch, speeds)
        for tokens, chunk in ((2048, 2048), (8192, 8192), (8192, 2048)) if m.real else ((2, 2), (2, 1)):
            _prefill(m, prefill, model, name, fp8, tokens, chunk)
        del model, ops
        if m.real:
            torch.cuda.empty_cache()
    most = max((batch for name, batch in speeds if name == "bf16, fp8"), default=0)
    if plain := speeds.get(("bf16, bf16", most)):
        m.target(f"decode, FP8 KV over bf16 KV, batch {most}", speeds["bf16, fp8", most] / plain, FP8_GAIN)
    return [decode, prefill]


def _size(c: ModelConfig, fp8: bool, blocks: int) -> CacheSize:
    return CacheSize(c.num_layers, c.num_kv_heads, c.head_dim, 1 if fp8 else 2, 16, blocks, 4 if fp8 else 0)


def _decode(
    m: Machine, table: Table, model: Decoder, name: str, fp8: bool, batch: int,
    speeds: dict[tuple[str, int], float],
) -> None:  # fmt: skip
    c, ops = model.config, model.ops
    context = 2048 if m.real else 20
    p = Problem(c, [(1, context)] * batch, 16, m.device, ops.dtype, poison=False)
    size = _size(c, fp8, p.blocks)
    if size.num_blocks * size.bytes_per_block > 0.9 * m.free():
        table.rows.append((name, str(batch), *["no memory"] * 6))
        return
    cache = allocate(size, m.device, ops.dtype)
    drawing = rows(batch, temperature=1.0)
    graphs = DecodeGraphs(model, cache, batch, cuda_capture(m.device) if m.real else lambda body: body)

    def eagerly() -> None:
        ops.draw(model.forward(p.batch, cache), drawing)

    def by_graph() -> None:
        logits = graphs.forward(p.batch)
        assert logits is not None, "no graph could be captured"
        ops.draw(logits, drawing)

    eager = m.wall(eagerly, 10 if m.real else 1)
    graph = m.wall(by_graph, 30 if m.real else 1)
    speeds[name, batch] = batch / graph
    asked = ""
    if name == "bf16, bf16":
        asked = m.target(f"decode, bf16, batch {batch}, tok/s", batch / graph, DECODE[batch])
    # Only a few rows of the embedding are read. The KV of each token is read once.
    read = model.weights_bytes - c.vocab_size * c.hidden_size * 2
    read += batch * context * size.bytes_per_token
    table.rows.append((
        name, str(batch), f"{graph * 1e3:.2f}", f"{batch / graph:,.0f}", asked,
        f"{read / m.copy_bandwidth / graph:.0%}", f"{eager * 1e3:.2f}", f"{batch / eager:,.0f}",
    ))  # fmt: skip


def _prefill(m: Machine, table: Table, model: Decoder, name: str, fp8: bool, tokens: int, chunk: int) -> None:
    """Computes a prompt of `tokens` in steps of `chunk`; each step attends to those before it."""
    c, dtype = model.config, model.ops.dtype
    steps = [Problem(c, [(chunk, end)], 16, m.device, dtype, poison=False)
             for end in range(chunk, tokens + 1, chunk)]  # fmt: skip
    cache = allocate(_size(c, fp8, steps[-1].blocks), m.device, dtype)

    def run() -> None:
        for step in steps:
            model.forward(step.batch, cache)

    t = m.wall(run, 4 if m.real else 1)
    what = f"{tokens:,}" if chunk == tokens else f"{tokens:,} by {chunk:,}"
    asked = ""
    if name == "bf16, bf16":
        asked = m.target(f"prefill, bf16, {what}, tok/s", tokens / t, PREFILL)
    table.rows.append((name, what, f"{t * 1e3:.1f}", f"{tokens / t:,.0f}", asked))


def random(c: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Small random weights with Hugging Face's names."""
    q, kv, h, i = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, h), "model.norm.weight": (h,), "lm_head.weight": (c.vocab_size, h),
    }  # fmt: skip
    for layer in range(c.num_layers):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,),
            p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q),
            p + "self_attn.q_norm.weight": (c.head_dim,), p + "self_attn.k_norm.weight": (c.head_dim,),
            p + "mlp.gate_proj.weight": (i, h), p + "mlp.up_proj.weight": (i, h), p + "mlp.down_proj.weight": (h, i),
        }  # fmt: skip
    return {name: torch.randn(shape, device=device, dtype=dtype).mul_(0.02) for name, shape in shapes.items()}
