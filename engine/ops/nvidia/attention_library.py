"""LibraryOps: TritonOps with the attention of a library, over our paged cache.

Owns what such back ends have in common: what they refuse before they load the library, and the wording of a
refusal. The layout of the cache, the graphs and all other operations are TritonOps'.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.ops.base import Extras
from engine.ops.nvidia.triton import TritonOps, packed_params
from engine.ops.sampler import SampleRows
from engine.ops.weights import Quantization

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
"""The dtypes of queries and cache that the libraries support."""


class LibraryOps(TritonOps):
    """Raises SetupError for what none of the libraries supports."""

    library: str
    """The library's name, as its authors write it."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        model: ModelConfig,
        quantization: Quantization | None = None,
        *,
        fp8_kv: bool = False,
        block_size: int = 16,
    ) -> None:
        super().__init__(device, dtype, model, quantization, fp8_kv=fp8_kv)
        self.block_size = block_size
        if fp8_kv:
            raise self.refusal("has no FP8 KV with a scale per token: leave out --kv-cache-dtype fp8")
        if dtype not in DTYPES:
            raise self.refusal("computes in bfloat16: leave out --dtype, or --attention-backend")
        if not self.has_kernel(model.head_dim):
            raise self.refusal(f"has no kernel for a head_dim of {model.head_dim}: leave it out")
        self.heads = model.num_heads
        self.connect()

    @abstractmethod
    def connect(self) -> None:
        """Imports the library. Raises SetupError if it is not installed, or if it cannot be used with this set-up."""

    @abstractmethod
    def has_kernel(self, head_dim: int) -> bool:
        """Whether the library has a kernel for this head size."""

    def refusal(self, why: str) -> SetupError:
        """An error of one line. why: what the library lacks, and what to do."""
        return SetupError(f"--attention-backend {self.attention_backend}: {self.library} {why}")

    def extras(self, q_lens: list[int], kv_lens: list[int], rows: SampleRows) -> Extras:
        return Extras(packed_params(rows).ravel())  # the library makes its own work list
