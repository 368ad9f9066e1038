"""The C kernels: compiled once per CPU for this machine, loaded by ctypes.

Owns the call of the compiler, the cached library, and the copies of the structures in kernels_c/kernels.h. Without
AVX-512-bf16, a C compiler or a writable cache there is no library. Then `load()` returns None, and the caller uses
torch. No Python headers are needed. The GIL is free while a kernel runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

from engine.cache_folder import cache_dir

SOURCES = ("linear.c", "attention.c", "block.c", "sample.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC", "-w")
_NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}

KEYS = 128
"""Keys of one pass of the softmax. KEYS in kernels.h."""
ROWS = 12
"""Query rows of a prefill tile. ROWS in kernels.h."""
PANEL = 32
"""Columns of a packed panel of weights."""
MAX_DIM = 256


class Linear(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("n", "k", "kp")),
        *((name, c_void_p) for name in ("data", "bias")),
        ("bits", c_int64),
        ("scale", c_void_p),
    )


class Attention(Structure):
    _fields_ = (
        ("qkv", Linear),
        ("out", Linear),
        *((name, c_void_p) for name in ("norm", "q_norm", "k_norm")),
        *((name, c_int64) for name in ("heads", "kv_heads", "dim")),
        ("eps", c_float),
    )


class Mlp(Structure):
    _fields_ = (("gate_up", Linear), ("down", Linear), ("norm", c_void_p), ("eps", c_float))


class Decoder(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "layers")),
        *((name, c_void_p) for name in ("embed", "attention", "mlp", "norm")),
        ("eps", c_float),
        ("head", Linear),
    )


class Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tokens", "threads", "block_size", "table_stride", "num_blocks")),
        *((name, c_void_p) for name in ("positions", "rows", "q_starts", "kv_lens", "tables", "slots")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("num_decode", "num_pack", "num_tiles", "num_merge")),
        *((name, c_void_p) for name in ("decode", "pack", "tiles", "merge", "part_start")),
        *((name, c_void_p) for name in ("x", "qkv", "q", "y", "act", "keys", "values", "partial", "times")),
    )


KERNELS = ("embed", "norm", "qkv", "qkv_prepare", "attention", "out", "gate_up", "down", "head")
"""The kernels whose times `Step.times` holds, in this order. One more place holds a point in time."""


@cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if this CPU has none yet. None if that is not possible."""
    if platform.machine() != "x86_64" or not cpu_flags() >= _NEEDED:
        return None
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return None
    try:
        path = _library(compiler)
        try:
            return _declare(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):  # damaged in the cache: compile it once more
            path.unlink()
            return _declare(ctypes.CDLL(str(_library(compiler))))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


def cpu_flags() -> set[str]:
    """Instruction set extensions as Linux names them; empty where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((set(line.split()[2:]) for line in f if line.startswith("flags")), set())
    except OSError:
        return set()


def _library(compiler: str) -> Path:
    """Path of the compiled library. Raises OSError or SubprocessError where it cannot be made."""
    folder = Path(__file__).parent / "kernels_c"
    key = hashlib.sha256(" ".join((*FLAGS, compiler, *sorted(cpu_flags()))).encode())
    for name in ("kernels.h", *SOURCES):
        key.update((folder / name).read_bytes())
    target = cache_dir() / "kernels" / f"{key.hexdigest()[:32]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # First into a file of our own: another process may compile too, and loading half a library crashes.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        command = [compiler, *FLAGS, *(str(folder / s) for s in SOURCES), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
        os.replace(made, target)
    return target


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Argument types. Raises AttributeError if a function is missing."""
    i, p = c_int64, c_void_p
    step, attention, mlp, linear = POINTER(Step), POINTER(Attention), POINTER(Mlp), POINTER(Linear)
    for name, types in {
        "kvtop_pack": (p, i, i, p),
        "kvtop_pack8": (p, i, i, p),
        "kvtop_pack4": (p, p, p, i, i, p, p),
        "kvtop_linear": (p, linear, p, i, i, i),
        "kvtop_qkv_prepare": (step, attention, p, p),
        "kvtop_attention": (step, attention, p, p),
        "kvtop_attention_block": (step, attention, p, p, p),
        "kvtop_mlp_block": (step, mlp, p),
        "kvtop_decoder": (step, POINTER(Decoder), p, p, p, p, i, p, p, p),
        "kvtop_sample": (p, i, i, p, p, p, p, i),
    }.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = types, None
    return lib
