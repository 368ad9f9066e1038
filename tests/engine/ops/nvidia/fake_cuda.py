"""A GPU that computes nothing: torch's fake tensors on a CUDA device that is not there.

Run as a program, in a process of its own, since it replaces much of torch. Shapes, dtypes and devices are those of
a card, so a tensor that is on the wrong side, an operation that does not fit or a call that would wait for the
GPU in the step's path raises. Kernels are replaced by stand-ins that look at where their arguments are; what
they compute is proven elsewhere, by interpreter. Prints one line of what was called for each way to run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.events import EngineError, StepBatch, StepCompleted
from engine.model import batch, graphs, torch_runner
from engine.ops.nvidia import scaled, triton
from engine.ops.nvidia.kernels import attention, copy, draw, norm, qkv, quantised, silu
from engine.params import SamplingParams
from engine.step.core import EngineCore
from tests.engine.tiny import QWEN3, random_weights

GPU = torch.device("cuda", 0)
MODE = FakeTensorMode(allow_non_fake_inputs=True)
calls: Counter[str] = Counter()
launching = False
"""In a launch nothing may wait; at the start and at the end of a step it may."""

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "in turn": {"async_scheduling": False},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "profiled": {},
}
ASKS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.9, "n": 2, "seed": 4}, {"beam_width": 2},
    {"logprobs": 1, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2},
    {"min_tokens": 3, "stop_token_ids": (5,)}, {"logit_bias": ((3, 1.0),), "bad_word_ids": ((7,), (0,))},
)  # fmt: skip


def blank(shape: Any, dtype: torch.dtype) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype, device=GPU)


def sent(host: np.ndarray) -> Tensor:
    t = torch.from_numpy(np.ascontiguousarray(host))
    return blank(t.shape, t.dtype)


def kernel(name: str, gives: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """A stand-in: every tensor that it gets must be on the device."""

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            assert value.is_cuda, f"{name} gets a tensor of the host, {list(value.shape)}"
        elif isinstance(value, tuple | list):
            for v in value:
                look(v)

    def called(*arguments: Any) -> Any:
        calls[name] += 1
        look(arguments)
        return gives(*arguments)

    return called


def replace_kernels() -> None:
    def like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)

    def e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
        return like(x, *x.shape, dtype=torch.float8_e4m3fn), like(x, len(x), dtype=torch.float32)

    for module, name, stand_in in (
        (attention, "attend", kernel("attend")),
        (triton, "combine", kernel("combine")),
        (copy, "copy_blocks", kernel("copy")),
        (norm, "add_rms_norm", kernel("norm", lambda delta, x, *_: torch.empty_like(x))),
        (qkv, "prepare", kernel("qkv")),
        (silu, "silu_mul", kernel("silu", lambda x: like(x, len(x), x.shape[1] // 2))),
        (quantised, "linear", kernel("linear", lambda x, w, b, d: like(x, len(x), w.shape[0], dtype=d))),
        (quantised, "rows_to_e4m3", kernel("to_e4m3", e4m3)),
        (scaled, "works", lambda device, dtype: True),  # it reads a sum, at the start
        (draw, "draw", kernel("draw", lambda x, *_: like(x, 2, len(x), dtype=torch.int32))),
        (triton, "cutoffs", kernel("cutoffs", lambda x, params: like(x, len(x), dtype=torch.float32))),
    ):
        setattr(module, name, stand_in)


def replace_cuda() -> None:
    """What torch asks the driver, and what a build without CUDA cannot do to a CUDA tensor, fake or not."""

    class Event:
        def __init__(self, **_: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None:
            assert not launching, "a launch waits for an event"

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    gib = 1 << 30
    for name, answer in {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            major=9, minor=0, multi_processor_count=132
        ),
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: gib,
        "memory_reserved": lambda device=None: gib,
        "mem_get_info": lambda device=None: (60 * gib, 80 * gib),
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "Event": Event,
    }.items():
        setattr(torch.cuda, name, answer)

    to, get, copy_ = Tensor.to, Tensor.__getitem__, Tensor.copy_

    def to_device(self: Tensor, *a: Any, **k: Any) -> Tensor:
        asked = k.get("device") or next((x for x in a if isinstance(x, torch.device | str)), None)
        if asked is None or torch.device(asked).type != "cuda" or self.is_cuda:
            return to(self, *a, **k)
        assert not launching or k.get("non_blocking"), "a launch waits for a copy to the device"
        return blank(
            self.shape, k.get("dtype") or next((x for x in a if isinstance(x, torch.dtype)), self.dtype)
        )

    def index_of(key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(map(index_of, key))
        if not isinstance(key, Tensor):
            assert not isinstance(key, list), "a list of indices is copied to the device, and waited for"
            return key
        assert key.is_cuda and key.dtype != torch.bool, (
            "an index from the host, or one whose length is unknown"
        )
        return torch.empty(key.shape, dtype=key.dtype, device="meta")

    def getitem(self: Tensor, key: Any) -> Tensor:
        if not self.is_cuda:
            return get(self, key)
        with _disable_current_modes():
            shape = get(torch.empty(self.shape, dtype=self.dtype, device="meta"), index_of(key)).shape
        return blank(shape, self.dtype)

    def copied(self: Tensor, source: Tensor, *a: Any, **k: Any) -> Tensor:
        if not self.is_cuda:
            return copy_(self, source, *a, **k)
        assert source.is_cuda and source.numel() == self.numel()
        return self

    Tensor.to, Tensor.__getitem__, Tensor.copy_ = to_device, getitem, copied  # type: ignore[method-assign, assignment]
    Tensor.__setitem__ = lambda self, key, value: index_of(key)  # type: ignore[method-assign, assignment]
    Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    for name in ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        setattr(Tensor, name, waiting(name, getattr(Tensor, name)))


def waiting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Tensor, *a: Any) -> Any:
        assert not self.is_cuda, f"{name} waits for the GPU"
        return real(self, *a)

    return called


class Came:
    """In the place of _ToHost: zeros, when they are asked for."""

    def __init__(self, there: Tensor) -> None:
        assert there.is_cuda
        self._shape = tuple(there.shape)

    def read(self) -> Any:
        assert not launching, "a launch waits for tokens"
        return np.zeros(self._shape, np.int64).tolist()


def replace_transfers() -> None:
    batch.DeviceRows._upload = lambda self, arrays: [sent(a) for a in arrays]  # type: ignore[method-assign]
    triton.TritonOps._upload = lambda self, host: sent(host)  # type: ignore[method-assign]
    torch_runner._ToHost = Came  # type: ignore[misc, assignment]

    def capture(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = body()

        def replay() -> Tensor:
            calls["replay"] += 1
            return out

        return replay

    graphs.cuda_capture = lambda device: capture
    launch = torch_runner.TorchRunner.launch

    def launched(self: Any, plan: Any) -> Any:
        global launching
        launching = True
        try:
            return launch(self, plan)
        finally:
            launching = False

    torch_runner.TorchRunner.launch = launched  # type: ignore[method-assign]


def live(**knobs: Any) -> str:
    """A whole life: start, prompts in chunks, decodes eager and by graphs, samples, beams, a second look-up."""
    calls.clear()
    reported: list[StepBatch] = []
    config = EngineConfig(
        device="cuda", dtype="bfloat16", ops="triton", num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64,
        **knobs,
    )  # fmt: skip
    with MODE:
        model = replace(QWEN3, hidden_size=64)
        runner = torch_runner.TorchRunner.from_weights(model, random_weights(model, 1), config)
        core = EngineCore(config, runner, EventLog(count().__next__, reported.append), hash_seed=1)
        for i, ask in enumerate((*ASKS, {})):
            params = SamplingParams(**({"max_tokens": 14, "temperature": 0.0} | ask))
            core.add_request(i, [(3 * (i % 7) + 7 * j) % 199 for j in range(5 + 9 * i)], params)
        for _ in range(500):
            if core.has_work:
                core.step()
    events = [e for b in reported for e in b.events]
    errors = [e.message for e in events if isinstance(e, EngineError)]
    assert not errors, errors[0]
    assert not core.has_work and runner.ahead == (knobs.get("async_scheduling") is not False)
    assert all(e.t_gpu == 1e-3 for e in events if isinstance(e, StepCompleted))
    return " ".join(f"{name} {n}" for name, n in sorted(calls.items()))


if __name__ == "__main__":
    replace_kernels()
    replace_cuda()
    replace_transfers()
    profiler = torch_runner.Profiler
    for way in sys.argv[1:] or WAYS:
        # Every step, which then is none of a graph's, or one now and then.
        torch_runner.Profiler = partial(profiler, every=0.0) if way == "profiled" else profiler  # type: ignore[misc, assignment]
        print(f"{way}: {live(**WAYS[way])}")
