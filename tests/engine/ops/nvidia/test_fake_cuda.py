"""The step's path on a CUDA device, tensor by tensor, without one: see fake_cuda.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_on_a_gpu_every_tensor_is_where_it_must_be_and_no_launch_waits() -> None:
    pytest.importorskip("triton")
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.ops.nvidia.fake_cuda"],
        cwd=Path(__file__).resolve().parents[4],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert list(lines) == ["bfloat16", "in turn", "fp8 KV", "int8", "int4", "fp8", "profiled"]
    for way, line in lines.items():
        called = dict(zip(line.split()[::2], map(int, line.split()[1::2]), strict=True))
        assert called.get("replay", 0) > 10 or way == "profiled"
        assert called["copy"] > 5 and called["draw"] > 20
