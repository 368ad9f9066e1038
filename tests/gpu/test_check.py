"""gpu-check on a machine without a GPU: it says that there is none, and in a dry run every line of it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def check(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.check", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    run = check()
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "gpu-check: no CUDA GPU here; it needs one and a torch built with CUDA\n"


def test_every_line_of_it_runs_interpreted() -> None:
    pytest.importorskip("triton")
    run = check("--dry-run", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    for title in (
        "Correctness", "Decode attention", "Prefill attention", "Linears", "Sampling", "Decode, Qwen3-8B",
        "Prefill, Qwen3-8B", "Engine, Qwen3-8B", "vLLM", "Targets on an H200",
    ):  # fmt: skip
        assert f"## {title}" in run.stdout
    rows = [line.split(" | ") for line in run.stdout.splitlines()]
    said = {cells[0].removeprefix("| ") for cells in rows}
    assert {"flash-attn, blocks of 256: a ragged step", "flashinfer: decodes by a graph",
            "FP8 linear, 20 rows scaled", "fp8, fp8", "prefill, bf16, 2 by 1, tok/s"} <= said  # fmt: skip
    targets = run.stdout.partition("## Targets on an H200\n\n")[2].splitlines()[2:]
    assert len(targets) == 5 and all(line.endswith(("| met |", "| NOT MET |")) for line in targets)
