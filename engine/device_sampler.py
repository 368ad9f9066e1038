"""Samples of the device, once an interval: use, memory, power and temperature as DeviceSample events.

NVML is asked about a GPU. On a CPU the sample is about this process. The questions are asked in a thread of
their own, so that a slow driver never delays a step. Invariant: what a device does not report is None, never 0.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from engine import machine
from engine.events import DeviceSample

Reader = Callable[[], DeviceSample]


class DeviceSampler:
    """Calls `emit(DeviceSample)` every `interval` seconds from its own thread, between start and stop.

    device: "cpu", "cuda" or "cuda:1" as torch names it; None takes a GPU where NVML finds one.
    A cuda device that NVML does not know (no driver library, another vendor's) gives samples
    whose fields are all None rather than the CPU's figures under a GPU's name.
    """

    def __init__(
        self, emit: Callable[[DeviceSample], None], interval: float = 1.0, device: str | None = None
    ) -> None:
        if interval <= 0:
            raise ValueError(f"interval must be over 0 s, not {interval}")
        self._emit = emit
        self._interval = interval
        self._device = device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin sampling; the first sample comes after one interval. A second start is an error."""
        if self._thread is not None:
            raise RuntimeError("this sampler was started before")
        self._thread = threading.Thread(target=self._run, name="kvtop-device", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End sampling. Nothing is emitted after it returns, unless the driver hangs for longer than `timeout` s."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        read = reader(self._device)
        while not self._stop.wait(self._interval):
            sample = read()
            if not self._stop.is_set():
                self._emit(sample)


def reader(device: str | None = None) -> Reader:
    """A function that samples `device` (as in DeviceSampler). util is that since the last call."""
    if device is not None and not device.startswith("cuda"):
        return CpuReader()
    gpu = _nvml_reader(int(device.partition(":")[2] or 0) if device else 0)
    if gpu is not None:
        return gpu
    return DeviceSample if device else CpuReader()


# -------------------------------------------------------------------------------------------- CPU


class CpuReader:
    """Samples this process. util: its share of the cores that it may use (100: all are busy). memory: its resident set.
    memory_total: what the machine and the container allow."""

    def __init__(self) -> None:
        self._cores = machine.cores()
        self._total = machine.total_memory()
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def __call__(self) -> DeviceSample:
        cpu, wall = time.process_time(), time.monotonic()
        spent, passed = cpu - self._cpu, wall - self._wall
        self._cpu, self._wall = cpu, wall
        util = min(100.0, 100 * spent / passed / self._cores) if passed > 0 else None
        return DeviceSample(util=util, memory=machine.resident_memory(), memory_total=self._total)


# ------------------------------------------------------------------------------------------- NVML


def _nvml_reader(index: int) -> Reader | None:
    """None where NVML or the device is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, NVMLError, or OSError from a broken library
        return None
    try:
        return NvmlReader(pynvml, _handle(pynvml, index, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except pynvml.NVMLError:
        return None


def _handle(nvml: Any, index: int, visible: str | None) -> Any:
    """NVML's handle of torch's device `index`, which counts CUDA_VISIBLE_DEVICES only."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    name = names[index] if index < len(names) else str(index)
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


class NvmlReader:
    """Samples one GPU. util: the share of time in which a kernel ran, whatever it reached. memory: that of all
    processes on the GPU. NVML does not report the bandwidth."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._gpu = nvml, handle

    def __call__(self) -> DeviceSample:
        nvml, gpu = self._nvml, self._gpu
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, gpu)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU)
        return DeviceSample(
            util=None if rates is None else float(rates.gpu),
            memory=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power=None if power is None else power / 1000,
            temperature=None if celsius is None else float(celsius),
        )

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except self._nvml.NVMLError:  # the card does not report it, or not to this user
            return None
