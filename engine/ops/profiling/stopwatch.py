"""Stopwatch: moments on a device's own time line, taken without waiting for it.

That events on a CUDA stream, behind a kernel that holds it, say the truth is unverified: no GPU has run them yet.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Moments on the device's own time line."""

    def hold(self) -> None:
        """A forward will be timed: the device may wait until the host is ahead of it."""
        ...

    def stamp(self) -> Any:
        """The moment at which the device has done what it was told so far; nobody waits for it."""
        ...

    def passed(self, stamp: Any) -> bool:
        """Whether it has come."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two that have passed."""
        ...


class CpuStopwatch:
    """The host's clock: what was called has been done."""

    def hold(self) -> None: ...

    def stamp(self) -> float:
        return time.perf_counter()

    def passed(self, stamp: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaStopwatch:
    """Events on the current stream."""

    def hold(self) -> None:
        # Launching some four hundred kernels takes the host longer than small ones take the GPU: without a head
        # start the stamps would measure the host.
        torch.cuda._sleep(_HEAD_START)

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000


_HEAD_START = 20_000_000
"""Cycles: about 10 ms."""


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for this device."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
