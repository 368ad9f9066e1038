"""Decode steps as CUDA graphs: the host launches one graph instead of about three hundred kernels.

Owns a graph per batch bucket, the buffers that it reads, and the padding in them. A padded row has slot -1, so nothing
is written for it, and no work item, so it does not attend. A graph is captured in the engine's thread when its bucket
is first needed. The function that captures is a parameter; tests use a fake.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.events import GraphCaptured
from engine.model.decoder import Decoder
from engine.ops.base import StepInput
from engine.ops.fp8 import Kv
from engine.ops.nvidia.triton import StaticPlan, TritonOps

_log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Body = Callable[[], Tensor]
Capture = Callable[[Body], Callable[[], Tensor]]
"""Records the kernels of a function over static buffers. Returns a function that runs them again, into the same
result."""


@dataclass(slots=True)
class _Graph:
    batch: StepInput
    plan: StaticPlan
    replay: Callable[[], Tensor]
    used: int
    """Rows of the last step. If the next step has fewer, the rest must become padding again."""


class DecodeGraphs:
    """Runs the steps of `model` in which every sequence decodes one token."""

    def __init__(
        self,
        model: Decoder,
        cache: Kv,
        most: int,
        capture: Capture,
        events: Callable[[GraphCaptured], None] = lambda event: None,
    ) -> None:
        assert isinstance(model.ops, TritonOps)
        self._model, self._ops, self._cache = model, model.ops, cache
        self._buckets = [b for b in BUCKETS if b < most] + [most]
        self._ops.padded = self._bucket
        self._capture, self._events = capture, events
        self._graphs: dict[int, _Graph] = {}
        self._tables: Tensor | None = None
        self._failed = False

    def forward(self, batch: StepInput) -> Tensor | None:
        """Logits [L, vocab] like Decoder.forward. None if no graph fits the step or can be captured."""
        n = len(batch.q_lens)
        if self._failed or n == 0 or n > self._buckets[-1] or max(batch.q_lens) > 1:
            return None
        if (
            self._tables is not batch.tables
        ):  # there are more rows now, in new memory: the graphs would read freed memory
            self._graphs.clear()
            self._tables = batch.tables
        bucket = self._bucket(n)
        graph = self._graphs.get(bucket)
        if graph is None:
            start = time.perf_counter()
            try:
                graph = self._graphs[bucket] = self._captured(bucket, batch)
            except RuntimeError as e:  # out of memory, or the driver cannot capture
                self._failed = True
                self._graphs.clear()
                _log.warning("decoding without CUDA graphs, which is slower: %.120s", e)
            self._events(GraphCaptured(bucket, len(self._graphs), time.perf_counter() - start))
            if graph is None:
                return None
        self._fill(graph, batch, n)
        # A copy, because the next step overwrites the result, and a row may draw several times or not at all.
        return graph.replay()[batch.logit_rows]

    def _bucket(self, rows: int) -> int:
        """The smallest bucket for this number of rows; the largest bucket if there are more rows."""
        return self._buckets[min(bisect_left(self._buckets, rows), len(self._buckets) - 1)]

    def _captured(self, bucket: int, like: StepInput) -> _Graph:
        device = self._ops.device

        def blank(source: Tensor, size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=source.dtype, device=device)

        batch = StepInput(
            token_ids=blank(like.token_ids, bucket, 0),
            positions=blank(like.positions, bucket, 0),
            slots=blank(like.slots, bucket, -1),
            tables=like.tables,
            rows=blank(like.rows, bucket, 0),
            q_starts=torch.arange(bucket + 1, dtype=torch.int32, device=device),
            kv_lens=blank(like.kv_lens, bucket, 1),
            logit_rows=torch.arange(bucket, device=device),
            q_lens=[1] * bucket,
            kv_lens_host=[1] * bucket,
        )
        plan = self._ops.static_plan(batch, self._model.rope)
        replay = self._capture(lambda: self._model.compute(plan, self._cache))
        return _Graph(batch, plan, replay, 0)

    def _fill(self, graph: _Graph, batch: StepInput, n: int) -> None:
        static = graph.batch
        if n < graph.used:
            static.slots[n : graph.used] = -1
        graph.used = n
        torch._foreach_copy_(
            [t[:n] for t in (static.token_ids, static.positions, static.slots, static.rows, static.kv_lens)],
            [batch.token_ids, batch.positions, batch.slots, batch.rows, batch.kv_lens],
        )
        self._ops.fill(graph.plan, batch.kv_lens_host, batch.work[0] if batch.work else None)


def cuda_capture(device: torch.device) -> Capture:
    """Captures graphs that share one pool of memory, since only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(body: Body) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(
                2
            ):  # kernels are compiled and cuBLAS chooses algorithms, which must not be captured
                body()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NVML, the dashboard) may call CUDA during the capture: only this thread is checked.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = body()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture
