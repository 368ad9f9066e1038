"""DeviceSampler: real figures of this process, NVML through a stand-in, None for what is not reported."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine import device_sampler as device
from engine.device_sampler import CpuReader, DeviceSampler, NvmlReader
from engine.events import DeviceSample


class NVMLError(Exception):
    pass


class Nvml:
    """The six calls of pynvml that are used."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, tells_power: bool = True) -> None:
        self.tells_power = tells_power

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"uuid {uuid}"

    def nvmlDeviceGetUtilizationRates(self, _gpu: Any) -> Any:
        return SimpleNamespace(gpu=91, memory=40)

    def nvmlDeviceGetMemoryInfo(self, _gpu: Any) -> Any:
        return SimpleNamespace(used=5 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, _gpu: Any) -> int:
        if not self.tells_power:
            raise NVMLError("not supported")
        return 312_500

    def nvmlDeviceGetTemperature(self, _gpu: Any, _sensor: int) -> int:
        return 64


def test_a_gpu_is_told_in_percent_bytes_watts_and_degrees() -> None:
    sample = NvmlReader(Nvml(), "gpu")()
    assert sample == DeviceSample(91.0, 5 << 30, 80 << 30, 312.5, 64.0, None)


def test_what_a_card_does_not_tell_is_none() -> None:
    sample = NvmlReader(Nvml(tells_power=False), "gpu")()
    assert sample.power is None
    assert sample.util == 91.0


@pytest.mark.parametrize(
    ("index", "visible", "handle"),
    [
        (0, None, "index 0"),
        (1, None, "index 1"),
        (1, "3,5", "index 5"),
        (0, "GPU-8d1f, GPU-aa", "uuid GPU-8d1f"),
        (0, "", "index 0"),
    ],
)
def test_torchs_index_counts_visible_devices_only(index: int, visible: str | None, handle: str) -> None:
    assert device._handle(Nvml(), index, visible) == handle


def test_the_cpus_use_is_this_process_share_of_its_cores() -> None:
    read = CpuReader()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    sample = read()
    assert sample.util is not None
    assert 0 < sample.util <= 100
    assert sample.memory is None or sample.memory > 1 << 20
    assert sample.memory_total is None or sample.memory is None or sample.memory < sample.memory_total
    assert (sample.power, sample.temperature, sample.bandwidth) == (None, None, None)


def test_a_gpu_that_nvml_does_not_know_gives_no_cpu_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_nvml_reader", lambda _index: None)
    assert device.reader("cuda:0")() == DeviceSample()
    assert isinstance(device.reader(None), CpuReader)
    assert isinstance(device.reader("cpu"), CpuReader)


def test_samples_come_from_one_thread_until_stop() -> None:
    got: list[tuple[str, DeviceSample]] = []
    enough = threading.Event()

    def emit(sample: DeviceSample) -> None:
        got.append((threading.current_thread().name, sample))
        if len(got) >= 2:
            enough.set()

    sampler = DeviceSampler(emit, interval=0.01, device="cpu")
    sampler.start()
    assert enough.wait(5)
    sampler.stop()
    count = len(got)
    time.sleep(0.05)
    assert len(got) == count
    assert {name for name, _ in got} == {"kvtop-device"}
    with pytest.raises(RuntimeError, match="started before"):
        sampler.start()


def test_a_sampler_that_never_started_can_be_stopped() -> None:
    DeviceSampler(lambda _sample: None).stop()
    with pytest.raises(ValueError, match="over 0"):
        DeviceSampler(lambda _sample: None, interval=0)
