"""Stopwatch: measures time on the device without waiting for it.

Not verified: whether events on a CUDA stream measure correctly after a kernel that holds the stream. No GPU has run
this yet.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Points in time, as the device sees them."""

    def hold(self) -> None:
        """Called before a forward is timed. The device may be made to wait until the host is ahead of it."""
        ...

    def stamp(self) -> Any:
        """The moment at which the device has finished all work that was launched so far. Does not wait for it."""
        ...

    def passed(self, stamp: Any) -> bool:
        """Whether that moment is over."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two stamps that have passed."""
        ...


class CpuStopwatch:
    """The host's clock. On a CPU a call returns only when its work is done."""

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
        # The host needs longer to launch about four hundred small kernels than the GPU needs to run them. Without a
        # head start the stamps would measure the host.
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
"""In GPU cycles: about 10 ms."""


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for this device."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
