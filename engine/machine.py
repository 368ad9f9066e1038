"""The machine that this process runs on: its cores, its memory, and how busy others keep it.

psutil answers on Linux, macOS and Windows. It knows nothing of a container's limits, so those are read from
the cgroup files where there are any. Invariant: what the system does not say is None, never 0, and no
question raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


def cores() -> int:
    """Cores that this process may use: by its affinity where the system has one, and by the container's quota."""
    count = len(_affinity()) or psutil.cpu_count() or 1
    quota = _cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def total_memory() -> int | None:
    """Bytes that this process could ever have: the machine's memory, or the container's limit."""
    return _least(_memory("total"), *(limit for limit, _ in _memory_limits()))


def free_memory() -> int | None:
    """Bytes that can be taken now without swapping: the machine's, or what a container has left."""
    return _least(_memory("available"), *(max(0, limit - used) for limit, used in _memory_limits()))


def resident_memory() -> int | None:
    """Bytes that this process holds in memory."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return None


class ForeignLoad:
    """How many cores other processes keep busy, on average since the call before.

    A process with a low priority (`nice`) does not count: it gives way. What a hypervisor takes away does.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def __call__(self) -> float | None:
        """Cores, from 0. None where the system does not say, or when no measurable time has passed."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        """(wall clock, busy seconds of the cores that this process may use, its own seconds)."""
        try:
            cpus = psutil.cpu_times(percpu=True)
        except (psutil.Error, OSError, RuntimeError, ValueError):
            return None
        mine = _affinity()
        busy = 0.0
        for i, cpu in enumerate(cpus):
            if not mine or i in mine:
                busy += cpu.user + cpu.system
                busy += sum(getattr(cpu, kind, 0.0) for kind in ("irq", "softirq", "steal"))
        return time.perf_counter(), busy, time.process_time()


def _affinity() -> set[int]:
    """Numbers of the cores that this process is bound to; empty where the system has no such thing."""
    try:
        return set(psutil.Process().cpu_affinity() or ())
    except (AttributeError, psutil.Error, OSError):  # macOS has no affinity
        return set()


def _memory(what: str) -> int | None:
    try:
        return int(getattr(psutil.virtual_memory(), what))
    except (psutil.Error, OSError, RuntimeError, AttributeError, ValueError, KeyError):
        return None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


# ------------------------------------------------------------------------------------------ containers


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each group that this process is in. Cached file pages do not count as used."""
    for folder in _groups("memory"):
        for limit_name, used_name, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < _UNLIMITED:
                used = _number(folder / used_name) or 0
                yield limit, max(0, used - (_field(folder / "memory.stat", cached) or 0))


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container gets."""
    found = []
    for folder in _groups("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # not version 2, or "max"
            q, p = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if q is not None and p and q > 0:  # -1 is no limit
                found.append(q / p)
    return min(found, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the groups from this process's own up to the root, for versions 1 and 2."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/"]
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        # Inside a container the path is often the host's: then only the root is there.
        at = root / path.strip("/")
        while True:
            yield at
            if at == root or root not in at.parents:
                break
            at = at.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None
