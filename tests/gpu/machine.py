"""The machine that is measured: its name, its clock, its copy bandwidth and its targets. Also the tables that are
printed."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton


@dataclass
class Table:
    """A Markdown table. If the last cell of a row is WRONG, the run fails."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return f"## {self.title}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


LIMIT = 580.0
"""Most seconds for the whole run. The slow parts come last and ask how many seconds are left."""


class Machine:
    """device: the card, or a CPU in a dry run with tiny shapes."""

    def __init__(self, device: torch.device) -> None:
        self._start = time.monotonic()
        self.targets = Table("Targets on an H200", ("what", "measured", "at least", "verdict"))
        self.device = device
        self.real = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.real else "dry run: no GPU, times mean nothing"
        self._asked = "H200" in self.name or not self.real
        self.capability = torch.cuda.get_device_capability(device) if self.real else (9, 0)
        self.memory = torch.cuda.mem_get_info(device)[1] if self.real else 1 << 30
        self._flush = torch.empty((256 if self.real else 1) << 20, dtype=torch.uint8, device=device)
        self.copy_bandwidth = self._copy()
        """Bytes a second of the fastest plain copy, read and written bytes together."""

    @property
    def slug(self) -> str:
        """The machine's name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def heading(self) -> str:
        """Heading: card, versions, memory and copy bandwidth."""
        return (
            f"# {self.name}\n\ntorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}, "
            f"{self.memory / 2**30:.0f} GiB; measured copy {self.copy_bandwidth / 1e9:,.0f} GB/s"
        )

    def left(self) -> float:
        """Seconds left of LIMIT."""
        return LIMIT - (time.monotonic() - self._start)

    def target(self, what: str, measured: float, least: float) -> str:
        """A cell that says whether the target is met. Empty on a card without targets."""
        if not self._asked:
            return ""
        verdict = "met" if measured >= least else "NOT MET"
        self.targets.rows.append((what, _figure(measured), _figure(least), verdict))
        return f"{verdict} ({_figure(least)})"

    def free(self) -> int:
        """Free bytes of memory."""
        return torch.cuda.mem_get_info(self.device)[0] if self.real else 1 << 28

    def seconds(self, f: Callable[[], object], *, cold: bool = True, times: int = 15) -> float:
        """Median GPU time of f in seconds. cold: the L2 is filled with other data before each run."""
        if not self.real:
            return self.wall(f, 1)
        for _ in range(3):
            f()
        spans = []
        for _ in range(times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                self._flush.zero_()
            start.record()
            f()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in spans) / 1000

    def wall(self, f: Callable[[], object], times: int) -> float:
        """Seconds per call of f, including the host, over `times` calls in a row."""
        if self.real:
            f()
        self.wait()
        t = time.perf_counter()
        for _ in range(times):
            f()
        self.wait()
        return (time.perf_counter() - t) / times

    def wait(self) -> None:
        """Waits until the GPU is idle."""
        if self.real:
            torch.cuda.synchronize(self.device)

    def _copy(self) -> float:
        size = (1 << 30) if self.real else 1 << 20
        a, b = torch.empty((2, size), dtype=torch.uint8, device=self.device)
        return 2 * size / self.seconds(lambda: b.copy_(a), cold=False)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"
