"""Where the time of a step goes: one eager forward, timed kernel by kernel.

Owns when a step is profiled and how the operations of a back end are timed. Invariant: a profiled forward gives
the same logits as any other, bit for bit, and the host never waits for the device because of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from engine.events import KernelsProfiled
from engine.ops.base import AttentionWeights, DecoderWeights, Ops, Packed, StepInput, StepPlan
from engine.ops.fp8 import Kv
from engine.ops.profiling.roofline import Roofline, Work, roofline, work
from engine.ops.profiling.stopwatch import Stopwatch, stopwatch

if TYPE_CHECKING:
    from engine.model.decoder import Decoder

EVERY = 10.0
"""Seconds between two profiles of the same kind of step."""

T = TypeVar("T")


class Timer:
    """Collects the times of the kernels of one forward."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._spans: list[tuple[str, Any, Any]] = []
        self._known: dict[str, float] = {}
        self.start: Any = None
        self.end: Any = None
        """Stamps before the first kernel and after the last one."""

    def decoder(self, ops: Ops, w: DecoderWeights, cache: Kv, plan: StepPlan) -> Tensor:
        """`ops.decoder`, timed."""
        self.start = self._watch.stamp()
        logits = ops.timed_decoder(w, cache, plan, self)
        self.end = self._watch.stamp()
        return logits

    def around(self, ops: Ops, weights: DecoderWeights) -> Ops:
        """`ops` with each small operation timed, for back ends whose decoder is composed of small operations."""
        return _Timed(ops, weights, self)

    def time(self, kernel: str, f: Callable[..., T], *args: Any) -> T:
        """Calls f(*args) between two stamps."""
        start = self._watch.stamp()
        result = f(*args)
        self._spans.append((kernel, start, self._watch.stamp()))
        return result

    def add(self, kernel: str, seconds: float) -> None:
        """Adds a time that the back end measured itself."""
        self._known[kernel] = self._known.get(kernel, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Seconds of each kernel, all its calls together. Call it only when the device has finished."""
        sums = dict(self._known)
        for kernel, start, end in self._spans:
            sums[kernel] = sums.get(kernel, 0.0) + self._watch.seconds(start, end)
        return sums


class _Timed(Ops):
    """Calls the small operations of another Ops and times each. Blocks and decoder are composed as in Ops."""

    def __init__(self, ops: Ops, weights: DecoderWeights, timer: Timer) -> None:
        super().__init__(ops.device, ops.dtype, ops.quantization)
        self.name = ops.name
        self._ops, self._time = ops, timer.time
        self._linears = {
            id(linear): name
            for a, m in weights.layers
            for name, linear in (("qkv", a.qkv), ("out", a.out), ("gate_up", m.gate_up), ("down", m.down))
        }

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return self._time("embed", self._ops.embed, table, token_ids)

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        return self._time(self._linears[id(w)], self._ops.linear, x, w)

    def logits(self, x: Tensor, head: Packed) -> Tensor:
        return self._time("head", self._ops.logits, x, head)

    def add_rms_norm(
        self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._time("norm", self._ops.add_rms_norm, delta, residual, weight, eps)

    def qkv_prepare(self, qkv: Tensor, w: AttentionWeights, kv: Kv, plan: StepPlan) -> Tensor:
        return self._time("qkv_prepare", self._ops.qkv_prepare, qkv, w, kv, plan)

    def attention(self, q: Tensor, kv: Kv, w: AttentionWeights, plan: StepPlan) -> Tensor:
        return self._time("attention", self._ops.attention, q, kv, w, plan)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._time("silu_mul", self._ops.silu_mul, gate_up)


@dataclass(slots=True)
class _Profile:
    """A profile whose stamps have not passed yet."""

    work: dict[str, Work]
    timer: Timer
    tokens: int
    sequences: int


class Profiler:
    """Every `every` seconds profiles one step of each of two kinds: steps that only decode, and all others.

    Measures the roofline when it is created. Used in the engine thread only, like its ops.
    """

    def __init__(
        self,
        model: Decoder,
        every: float = EVERY,
        *,
        watch: Stopwatch | None = None,
        roof: Roofline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ops = model.ops
        self._model, self._every, self._clock = model, every, clock
        self._watch = watch or stopwatch(ops.device)
        self._roof = roof or roofline(ops.device, ops.dtype, torch.get_num_threads())
        self._due = {False: float("-inf"), True: float("-inf")}
        """When the next profile is due. Key: whether the step only decodes."""
        self._pending: deque[_Profile] = deque()

    def begin(self, batch: StepInput) -> bool:
        """Whether this step is to be profiled with `forward`: the first of its kind, and one every `every` seconds.
        If it is, a GPU is held for 10 ms. So a caller that times the whole step must start after this call."""
        now, decodes = self._clock(), max(batch.q_lens, default=1) == 1
        if now < self._due[decodes]:
            return False
        self._due[decodes] = now + self._every
        self._watch.hold()
        return True

    def forward(self, batch: StepInput, cache: Kv) -> Tensor:
        """The model's forward with the same result bit for bit. `take` returns the profile once the device is done."""
        model = self._model
        timer = model.timer = Timer(self._watch)
        try:
            logits = model.forward(batch, cache)
        finally:
            model.timer = None
        todo = work(model.ops, model.weights, batch, cache, logits.element_size())
        self._pending.append(_Profile(todo, timer, len(batch.token_ids), len(batch.q_lens)))
        return logits

    def take(self) -> list[KernelsProfiled]:
        """The finished profiles, oldest first, each once. Never waits."""
        found = []
        while self._pending and self._watch.passed(self._pending[0].timer.end):
            found.append(self._event(self._pending.popleft()))
        return found

    def _event(self, p: _Profile) -> KernelsProfiled:
        seconds = p.timer.seconds()
        return KernelsProfiled(
            tokens=p.tokens,
            sequences=p.sequences,
            names=list(p.work),
            calls=[w.calls for w in p.work.values()],
            seconds=[seconds.get(name, 0.0) for name in p.work],
            bytes=[w.bytes for w in p.work.values()],
            flops=[w.flops for w in p.work.values()],
            forward=self._watch.seconds(p.timer.start, p.timer.end),
            bandwidth=self._roof.bandwidth,
            peak=self._roof.peak,
        )
