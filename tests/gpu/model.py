"""A whole model: Qwen3-8B's shape with random weights: decode by graphs and eagerly, prefill, by format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.config import ModelConfig
from engine.graphs import DecodeGraphs, cuda_capture
from engine.kv_cache import CacheSize, allocate
from engine.layers import Weights
from engine.model import Decoder
from engine.ops.triton import TritonOps
from engine.ops.weights import Quantization
from tests.gpu.machine import Machine, Table
from tests.gpu.problems import QWEN3_8B, Problem

TINY = replace(QWEN3_8B, num_layers=1, hidden_size=64, intermediate_size=96, vocab_size=300, num_heads=4,
               num_kv_heads=2, head_dim=32)  # fmt: skip


WAYS: tuple[tuple[str, bool, Quantization | None], ...] = (
    ("bf16, bf16", False, None), ("bf16, fp8", True, None), ("int8, fp8", True, "int8"), ("int4, fp8", True, "int4"),
)  # fmt: skip


def run(m: Machine) -> list[Table]:
    """Decode with 2,048 tokens of context, sampling left out (it is measured with the kernels)."""
    c, dtype = QWEN3_8B if m.real else TINY, torch.bfloat16
    context = 2048 if m.real else 20
    columns = ("weights, KV", "at once", "ms, graph", "tok/s", "of roofline", "ms, eager", "tok/s, eager")
    decode = Table("Decode, Qwen3-8B's shape, 2,048 tokens of context", columns)
    prefill = Table("Prefill, Qwen3-8B's shape", ("weights, KV", "tokens", "ms", "tok/s"))
    need = 2 * 8_190_735_360 * 1.15
    if m.real and need > m.free():
        decode.rows.append(("bf16", f"needs {need / 2**30:.0f} GiB", "", "", "", "", ""))
        return [decode, prefill]
    for name, fp8, weights in WAYS:
        ops = TritonOps(m.device, dtype, c, weights, fp8_kv=fp8)
        model = Decoder(c, random(c, m.device, dtype), ops, context + 1)
        for batch in (1, 8, 64) if m.real else (1, 2):
            p = Problem(c, [(1, context)] * batch, 16, m.device, dtype, poison=False)
            size = CacheSize(
                c.num_layers, c.num_kv_heads, c.head_dim, 1 if fp8 else 2, 16, p.blocks, 4 if fp8 else 0
            )
            if size.num_blocks * size.bytes_per_block > 0.9 * m.free():
                decode.rows.append((name, str(batch), *["no memory"] * 5))
                continue
            cache = allocate(size, m.device, dtype)
            eager = m.wall(partial(model.forward, p.batch, cache), 10 if m.real else 1)
            capture = cuda_capture(m.device) if m.real else lambda body: body
            graphs = DecodeGraphs(model, cache, batch, capture)
            graph = m.wall(partial(graphs.forward, p.batch), 30 if m.real else 1)
            # The embedding is looked up, not read; each token's KV is read once.
            read = model.weights_bytes - c.vocab_size * c.hidden_size * 2
            read += batch * context * size.bytes_per_token
            decode.rows.append((
                name, str(batch), f"{graph * 1e3:.2f}", f"{batch / graph:,.0f}",
                f"{read / m.copy_bandwidth / graph:.0%}", f"{eager * 1e3:.2f}", f"{batch / eager:,.0f}",
            ))  # fmt: skip
            del cache, graphs
        for tokens, times in ((2048, 4),) if m.real else ((16, 1),):
            p = Problem(c, [(tokens, tokens)], 16, m.device, dtype, poison=False)
            size = CacheSize(
                c.num_layers, c.num_kv_heads, c.head_dim, 1 if fp8 else 2, 16, p.blocks, 4 if fp8 else 0
            )
            cache = allocate(size, m.device, dtype)
            t = m.wall(partial(model.forward, p.batch, cache), times)
            prefill.rows.append((name, f"{tokens:,}", f"{t * 1e3:.1f}", f"{tokens / t:,.0f}"))
        del model
        if m.real:
            torch.cuda.empty_cache()
    return [decode, prefill]


def random(c: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Small random weights under the HF names."""
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
