"""Compiles every kernel, exactly as its launcher launches it, for a GPU that is not there.

Owns the cases (Qwen3-8B's shape in bfloat16, FP8 KV, other heads) and their budgets. `python -m
tests.engine.ops.nvidia.compiled ARCH` prints one line of JSON a kernel; `... table` compiles for all architectures
and writes the table beside this file. One process an architecture, never with TRITON_INTERPRET: Triton keeps
what it learned of the first target.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.ops.nvidia.kernels import attention, combine, copy, cutoff, draw, norm, qkv, quantised, silu
from engine.ops.nvidia.tiles import tiles_for
from engine.ops.weights import Fp8, Int4, Int8, Quantised, Quantization

BF16, F32, I32, I64, FP8, BITS = (
    torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn, torch.uint8,
)  # fmt: skip
_TYPES = {BF16: "bf16", F32: "fp32", I32: "i32", I64: "i64", FP8: "fp8e4nv", BITS: "u8",
          torch.int8: "i8", torch.int16: "i16", torch.float16: "fp16"}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages")
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass
class Launch:
    """What a launcher asked Triton to run."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass
class Cost:
    """Of one compiled kernel: registers a thread, bytes of stack a thread, bytes of shared memory, and the
    instructions that tell how it computes and loads (and STL: spilled registers)."""

    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]
    over: str = ""
    """What is over its budget, with the name; empty if nothing is."""


SHARED = {90: 227 << 10, 100: 227 << 10, 80: 163 << 10}
"""Bytes of shared memory that a program may take, else 99 KB."""
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def check(cost: Cost, registers: int, stack: int) -> Cost:
    """Fills in `over`."""
    limits = {"registers": registers, "stack": stack, "shared": SHARED.get(cost.arch, 99 << 10)}
    cost.over = ", ".join(
        f"sm_{cost.arch} {cost.name}: {k} {getattr(cost, k)} > {v}"
        for k, v in limits.items()
        if getattr(cost, k) > v
    )
    return cost


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are kept instead of run."""
    launches: list[Launch] = []
    run = JITFunction.run

    def keep(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(self, grid, args, keywords))

    JITFunction.run = keep
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_for(arch: int, name: str, launch: Launch) -> Cost:
    """Specialised as the JIT does: integers of 1 become constants, multiples of 16 and tensors are aligned."""
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.args, strict=False)) | {
        k: v for k, v in launch.keywords.items() if k not in _OPTIONS
    }
    signature, constants, attrs = {}, {}, {}
    for i, (param, n) in enumerate(zip(launch.kernel.params, names, strict=True)):
        value = given[n]
        if param.is_constexpr or (type(value) is int and value == 1 and not param.do_not_specialize):
            signature[n], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[n] = "*" + _TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[n] = "fp32"
        else:
            signature[n] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {k: launch.keywords[k] for k in _OPTIONS if k in launch.keywords}
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(done.asm["cubin"])
        f.flush()
        usage = _tool("cuobjdump", "-res-usage", f.name)
        sass = _tool("nvdisasm", "-c", f.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    seen = {op: len(re.findall(rf"\b{op}\b", sass)) for op in ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS", "STL")}
    return Cost(
        name, arch, int(found[1]), int(found[2]), done.metadata.shared, {k: v for k, v in seen.items() if v}
    )


def _tool(name: str, *args: str) -> str:
    run = subprocess.run([_TOOLS / name, *args], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


# ------------------------------------------------------------------------------------------- cases


def _attend(arch: int, which: str, fp8: bool = False, heads: int = 32, kv_heads: int = 8, dim: int = 128,
            dtype: torch.dtype = BF16, window: int | None = None, softcap: float | None = None,
            ) -> None:  # fmt: skip
    tiles = tiles_for((arch // 10, arch % 10), 132, dtype, fp8, dim, heads // kv_heads)
    tile = tiles.few if which == "few" else tiles.many
    q = torch.empty(64, heads, dim, dtype=dtype)
    kind = (FP8 if arch >= 89 else BITS) if fp8 else dtype
    k, v = torch.empty(2, 64, kv_heads, 16, dim, dtype=kind)
    scales = tuple(torch.empty(2, 64, kv_heads, 16)) if fp8 else None
    index = torch.empty(64, dtype=I32)
    parts = attention.parts_for(1, kv_heads, tile, dim, q.device)
    attention.attend(
        q, (k, v), scales, torch.empty(64, 256, dtype=I32), index, index, index,  # type: ignore[arg-type]
        torch.empty(8, 5, dtype=I32), parts, torch.empty_like(q), dim**-0.5, tile, window, softcap,
    )  # fmt: skip


def _combine(arch: int) -> None:
    tile = attention.Tile(16, 64, 4, 2)
    parts = attention.parts_for(32, 8, tile, 128, torch.device("cpu"))
    merges = torch.empty(8, 4, dtype=I32)
    combine.combine(parts, merges, merges, torch.empty(8, 32, 128, dtype=BF16), 16, 64)


def _prepare(arch: int, tokens: int, fp8: bool = False) -> None:
    k, v = torch.empty(2, 64, 8, 16, 128, dtype=BITS if fp8 else BF16)
    scales = tuple(torch.empty(2, 64, 8, 16)) if fp8 else None
    cos, weight = torch.empty(4096, 64), torch.empty(128, dtype=BF16)
    q = torch.empty(tokens, 32, 128, dtype=BF16)
    qkv.prepare(
        torch.empty(tokens, 6144, dtype=BF16), q, (k, v), scales,  # type: ignore[arg-type]
        torch.empty(tokens, dtype=I64), torch.empty(tokens, dtype=I32), cos, cos, (weight, weight), 1e-6,
    )  # fmt: skip


def _norm(arch: int) -> None:
    x = torch.empty(64, 4096, dtype=BF16)
    norm.add_rms_norm(x, x, x[0], 1e-6)


def _logits() -> tuple[Tensor, Tensor]:
    return torch.empty(2, 151_936), torch.empty(draw.ROW_WORDS, 2, dtype=I32)


def _linear(arch: int, form: Quantization, rows: int) -> None:
    if form == "int4":
        w: Quantised = Int4(
            torch.empty(4096, 2048, dtype=BITS), *torch.empty(2, 4096, 128, dtype=torch.float16), 4096
        )
    elif form == "int8":
        w = Int8(torch.empty(4096, 4096, dtype=torch.int8), torch.empty(4096))
    else:  # older GPUs are refused, but their bits would be read so
        w = Fp8(torch.empty(4096, 4096, dtype=FP8 if arch >= 89 else BITS), torch.empty(4096))
    if rows > quantised.MOST_ROWS:
        quantised.values(w, BF16)
    else:
        quantised.linear(torch.empty(rows, 4096, dtype=BF16), w, None, BF16)


CASES: dict[str, tuple[Callable[[int], None], int]] = {
    "attention, decode": (lambda a: _attend(a, "few"), 128),
    "attention, decode, FP8": (lambda a: _attend(a, "few", fp8=True), 255),
    "attention, decode, head 64": (lambda a: _attend(a, "few", False, 9, 3, 64), 128),
    "attention, decode, head 256": (lambda a: _attend(a, "few", False, 16, 8, 256), 200),
    "attention, decode, window, soft-cap": (lambda a: _attend(a, "few", window=1024, softcap=50.0), 140),
    "attention, chunk": (lambda a: _attend(a, "many"), 255),
    "attention, chunk, FP8": (lambda a: _attend(a, "many", fp8=True), 255),
    "attention, chunk, head 64": (lambda a: _attend(a, "many", False, 9, 3, 64), 255),
    "attention, chunk, head 256": (lambda a: _attend(a, "many", False, 16, 8, 256), 255),
    "attention, chunk, window, soft-cap": (lambda a: _attend(a, "many", window=1024, softcap=50.0), 255),
    "attention, decode, float32": (lambda a: _attend(a, "few", dtype=F32), 255),
    "combine": (_combine, 128),
    "QK-norm, RoPE, write": (lambda a: _prepare(a, 8), 48),
    "QK-norm, RoPE, write, prompt": (lambda a: _prepare(a, 64), 64),
    "QK-norm, RoPE, write, FP8": (lambda a: _prepare(a, 8, True), 48),
    "RMSNorm": (_norm, 96),
    "SiLU x up": (lambda a: silu.silu_mul(torch.empty(64, 24_576, dtype=BF16)), 48),
    "copy of blocks": (
        lambda a: copy.copy_blocks(
            torch.empty(2, 2, 64, 8, 16, 128, dtype=BF16), *torch.empty(2, 4, dtype=I64)
        ),
        64,
    ),
    "INT4 linear": (lambda a: _linear(a, "int4", 1), 200),
    "INT4 linear, 64 rows": (lambda a: _linear(a, "int4", 64), 255),
    "INT8 linear": (lambda a: _linear(a, "int8", 1), 128),
    "INT8 linear, 64 rows": (lambda a: _linear(a, "int8", 64), 200),
    "FP8 linear": (lambda a: _linear(a, "fp8", 1), 128),
    "FP8 linear, 64 rows": (lambda a: _linear(a, "fp8", 64), 255),
    "FP8 written out": (lambda a: _linear(a, "fp8", 99), 128),
    "rows to e4m3": (lambda a: quantised.rows_to_e4m3(torch.empty(64, 12_288, dtype=BF16)), 128),
    "INT4 written out": (lambda a: _linear(a, "int4", 99), 128),
    "draw": (lambda a: draw.draw(*_logits(), torch.empty(2)), 96),
    "cut-off": (lambda a: cutoff.cutoffs(*_logits()), 64),
}
"""Name -> (what to launch, most registers a thread)."""
STACK = 8
"""Bytes a thread; more means spilled registers."""


def compile_all(arch: int, only: str = "") -> Iterator[Cost]:
    """Every case whose name holds `only`."""
    for name, (case, most) in CASES.items():
        if only not in name:
            continue
        with recorded() as launches:
            case(arch)
        for i, launch in enumerate(launches):
            title = name if not i else f"{name}, {launch.kernel.fn.__name__}"
            yield check(compile_for(arch, title, launch), most, STACK)


# ------------------------------------------------------------------------------------------- table


def table() -> int:
    """Compiles for every architecture and writes the table. Returns 1 if anything is over its budget."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    costs: dict[str, dict[int, dict[str, Any]]] = {}
    for arch in ARCHITECTURES:
        words = [sys.executable, "-m", "tests.engine.ops.nvidia.compiled", str(arch)]
        out = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in map(json.loads, out.splitlines()):
            costs.setdefault(line["name"], {})[arch] = line
    text = [
        f"Compiled without a GPU by `make compile-all`, Triton {triton.__version__}: registers a thread / bytes of",
        "stack / KB of shared memory, and the tensor-core instruction in use. Nothing here says how fast it runs.",
        "",
        "| kernel | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " |",
        "|---|" + "---|" * len(ARCHITECTURES),
    ]
    for name, by in costs.items():
        text.append(f"| {name} | " + " | ".join(_cell(by[a]) for a in ARCHITECTURES) + " |")
    Path(__file__).with_name("compiled.md").write_text("\n".join(text) + "\n", "utf-8")
    over = [c["over"] for by in costs.values() for c in by.values() if c["over"]]
    print("\n".join([*text, "", *over]))
    return 1 if over else 0


def _cell(cost: dict[str, Any]) -> str:
    unit = next((u for u in ("UTCHMMA", "HGMMA", "HMMA") if cost["instructions"].get(u)), "")
    return f"{cost['registers']} / {cost['stack']} / {cost['shared'] / 1024:.1f} {unit}".strip()


if __name__ == "__main__":
    if sys.argv[1] == "table":
        sys.exit(table())
    for found in compile_all(int(sys.argv[1]), *sys.argv[2:]):
        print(json.dumps(asdict(found)), flush=True)
