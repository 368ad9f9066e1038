"""Linears by format and number of rows: from how many rows on is it faster to expand the weights for a GEMM?"""

from __future__ import annotations

from functools import partial

import torch

from engine.ops.nvidia import scaled
from engine.ops.nvidia.kernels import quantised
from engine.ops.weights import Fp8, quantise
from tests.gpu.machine import Machine, Table

_linear = torch.nn.functional.linear


def run(m: Machine) -> list[Table]:
    """Qwen3-8B's gate and up, 4096 -> 24,576. Written out: expanded to bfloat16, then cuBLAS. Scaled: x in e4m3 too."""
    columns = ("rows", "bf16 us", "INT8 us", "INT4 us", "FP8 us", "FP8 written out us", "FP8 scaled us")
    table = Table("Linears, 4096 to 24,576", columns)
    inputs, outputs = (4096, 24_576) if m.real else (64, 48)
    w = torch.randn(outputs, inputs, device=m.device).mul_(0.02)
    plain, (int8, int4, fp8) = w.bfloat16(), (quantise(w, form) for form in ("int8", "int4", "fp8"))  # type: ignore[arg-type]
    assert isinstance(fp8, Fp8)
    works = m.capability >= (8, 9) and scaled.works(m.device, torch.bfloat16)
    for rows in (1, 8, 16, 32, 64, 256, 2048) if m.real else (2, 70):
        x = torch.randn(rows, inputs, device=m.device).bfloat16()

        def by_kernel(w: quantised.Quantised, x: torch.Tensor = x) -> str:
            if len(x) > quantised.MOST_ROWS:
                return ""
            return f"{m.seconds(partial(quantised.linear, x, w, None, x.dtype)) * 1e6:.1f}"

        def written(x: torch.Tensor = x) -> torch.Tensor:
            return _linear(x, quantised.values(fp8, x.dtype))

        def both(x: torch.Tensor = x) -> torch.Tensor:
            return scaled.linear(*quantised.rows_to_e4m3(x), fp8, None)

        cells = [f"{rows:,}", f"{m.seconds(partial(_linear, x, plain)) * 1e6:.1f}"]
        cells += [by_kernel(int8), by_kernel(int4)]
        if m.capability >= (8, 9):
            cells += [by_kernel(fp8), f"{m.seconds(written) * 1e6:.1f}"]
        else:
            cells += ["refused", "refused"]
        cells.append(f"{m.seconds(both) * 1e6:.1f}" if works else "not in this torch")
        table.rows.append(tuple(cells))
    return [table]
