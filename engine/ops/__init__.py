"""The registry of back ends. Each is imported only when it is used."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from engine.errors import SetupError

if TYPE_CHECKING:
    import torch

    from engine.config import AttentionBackend
    from engine.files.model_config import ModelConfig
    from engine.ops.base import Ops
    from engine.ops.nvidia.triton import TritonOps
    from engine.ops.weights import Quantization


def get_ops(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    *,
    fp8_kv: bool = False,
    quantization: Quantization | None = None,
    attention: AttentionBackend = "auto",
    block_size: int = 16,
) -> Ops:
    """The back end `name` (auto, reference, cpu, triton) for this model on this device in this dtype.

    auto is cpu on a CPU (reference for float64, which has no faster path). On a GPU it is triton if that is
    installed and has the kernels, else reference.
    cpu uses the C kernels if CPU, compiler, dtype and the model's shape allow it, else torch.
    attention: whose attention kernels are used on a GPU. auto is triton: no other was measured to be faster here.
    Raises SetupError for a combination that does not exist.
    """
    import torch

    if quantization == "fp8" and device.type == "cuda":
        _refuse_fp8(torch.cuda.get_device_capability(device))
    if attention != "auto" and name not in ("auto", "triton"):
        raise SetupError(f"--attention-backend {attention} goes with --ops triton, not with --ops {name}")
    if attention != "auto" or name == "triton":
        return _triton(device, dtype, model, quantization, fp8_kv, attention, block_size)
    if name == "auto" and device.type == "cuda":
        try:
            return _triton(device, dtype, model, quantization, fp8_kv, attention, block_size)
        except SetupError:
            name = "reference"
    if name == "auto":
        name = "cpu" if device.type == "cpu" and dtype != torch.float64 else "reference"
    if name == "reference":
        from engine.ops.reference import ReferenceOps

        return ReferenceOps(device, dtype, quantization)
    if name == "cpu":
        if device.type != "cpu" or dtype == torch.float64:
            what = "float64" if dtype == torch.float64 else device.type
            raise SetupError(f"--ops cpu does not run on {what}: use --ops reference")
        from engine.ops.cpu import native_ops as cpu_native
        from engine.ops.cpu import packed as cpu

        # The C kernels have no FP8. On a CPU it only serves to measure what FP8 costs in quality.
        if dtype == torch.bfloat16 and quantization != "fp8" and cpu_native.available(model):
            return cpu_native.NativeCpuOps(device, dtype, model, quantization)
        return cpu.CpuOps(device, dtype, quantization)
    raise SetupError(f"--ops must be auto, reference, cpu or triton, not {name!r}")


def _refuse_fp8(capability: tuple[int, int]) -> None:
    """Raises SetupError for a GPU without FP8. INT8 is as small there and closer to the weights."""
    if capability < (8, 9):
        has = ".".join(map(str, capability))
        raise SetupError(
            f"--quantization fp8 needs a GPU of compute capability 8.9 or newer, this one has {has}: use int8"
        )


def _triton(
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    quantization: Quantization | None,
    fp8_kv: bool,
    attention: AttentionBackend,
    block_size: int,
) -> TritonOps:
    """Checks before it imports: once the kernels are imported, the process can no longer interpret them."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        if attention != "auto":
            raise SetupError(f"--attention-backend {attention} needs an NVIDIA GPU: leave it out")
        raise SetupError("--ops triton needs an NVIDIA GPU: use --ops auto or --ops reference")
    if importlib.util.find_spec("triton") is None:
        raise SetupError("--ops triton needs triton: pip install triton, or use --ops reference")
    if attention == "flash-attn":
        from engine.ops.nvidia.flash_attn import FlashAttnOps

        return FlashAttnOps(device, dtype, model, quantization, fp8_kv=fp8_kv, block_size=block_size)
    if attention == "flashinfer":
        from engine.ops.nvidia.flashinfer import FlashInferOps

        return FlashInferOps(device, dtype, model, quantization, fp8_kv=fp8_kv, block_size=block_size)
    from engine.ops.nvidia.triton import TritonOps

    return TritonOps(device, dtype, model, quantization, fp8_kv=fp8_kv)
