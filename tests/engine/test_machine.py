"""The machine: containers' limits count, and nothing fails where /proc, cgroups or affinity are absent."""

from __future__ import annotations

import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine import machine
from engine.device_sampler import CpuReader

GIB = 1 << 30
Times = namedtuple("Times", "user system nice idle steal")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the cgroup files; the machine has 8 GiB, of which 6 are free."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    memory = SimpleNamespace(total=8 * GIB, available=6 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_cgroups_the_machine_counts(cgroups: Path) -> None:
    assert (machine.total_memory(), machine.free_memory()) == (8 * GIB, 6 * GIB)


def test_a_limit_of_version_2_counts_and_cached_files_are_free(cgroups: Path) -> None:
    """The group above has the tighter limit, and most of what it uses is cache."""
    write(cgroups, own="0::/pod/me\n")
    stat = "anon 1\ninactive_file 1073741824\n"
    write(
        cgroups / "cgroup/pod", memory__max=str(2 * GIB), memory__current=str(GIB * 3 // 2), memory__stat=stat
    )
    write(cgroups / "cgroup/pod/me", memory__max="max\n", memory__current=str(GIB))
    assert machine.total_memory() == 2 * GIB
    assert machine.free_memory() == 2 * GIB - GIB // 2


def test_inside_a_container_the_root_of_the_files_counts(cgroups: Path) -> None:
    """/proc/self/cgroup often names the host's path, which is not there."""
    write(cgroups, own="0::/docker/0123\n")
    write(cgroups / "cgroup", memory__max=str(GIB), memory__current=str(GIB * 2))
    assert (machine.total_memory(), machine.free_memory()) == (GIB, 0)


def test_a_limit_of_version_1_counts(cgroups: Path) -> None:
    write(cgroups, own="5:cpuset:/\n4:cpu,memory:/box\n")
    root = cgroups / "cgroup/memory"
    write(root, memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    write(root / "box", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB // 4))
    assert (machine.total_memory(), machine.free_memory()) == (GIB, GIB - GIB // 4)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu__max": "max 100000\n"}, 8),
        ({"cpu__max": "200000 100000\n"}, 2),
        ({"cpu__max": "50000 100000\n"}, 1),
        ({"cpu__max": "350000 100000\n"}, 3),
        ({"cpu__max": "1600000 100000\n"}, 8),
        ({"cpu__max": "nonsense"}, 8),
    ],
)
def test_a_containers_share_of_the_cores_counts(
    files: dict[str, str], cores: int, cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_affinity", lambda: set(range(8)))
    write(cgroups / "cgroup", **files)
    assert machine.cores() == cores


def test_a_quota_of_version_1_counts(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_affinity", lambda: set(range(8)))
    write(cgroups, own="3:cpu,cpuacct:/box\n")
    write(cgroups / "cgroup/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(cgroups / "cgroup/cpu/box", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert machine.cores() == 1


class MacProcess:
    """psutil.Process on macOS: it has neither affinity nor /proc behind it."""

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=123 << 20, vms=1 << 40)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


@pytest.fixture
def mac(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python and psutil say on macOS. Any look into /proc or at cgroups fails the test."""
    real = Path.read_text

    def read(self: Path, *args: object, **kwargs: object) -> str:
        assert not str(self).startswith(("/proc", "/sys")), self
        return real(self)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "Process", MacProcess)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 10)


@pytest.mark.usefixtures("mac")
def test_on_macos_psutil_answers() -> None:
    assert machine.cores() == 10
    assert (machine.total_memory(), machine.free_memory()) == (8 * GIB, 6 * GIB)
    assert machine.resident_memory() == 123 << 20
    sample = CpuReader()()
    assert (sample.memory, sample.memory_total) == (123 << 20, 8 * GIB)
    machine.ForeignLoad()()


@pytest.mark.usefixtures("cgroups")
def test_a_system_that_answers_nothing_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no such thing here")

    for name in ("virtual_memory", "cpu_times", "Process"):
        monkeypatch.setattr(psutil, name, fails)
    monkeypatch.setattr(psutil, "cpu_count", lambda: None)
    assert (machine.total_memory(), machine.free_memory(), machine.resident_memory()) == (None, None, None)
    assert machine.cores() == 1
    assert machine.ForeignLoad()() is None


def test_foreign_load_is_what_others_do_on_this_process_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores 0 and 1 are ours: 1.5 cores are busy there, half a core of it with us. Low priorities don't count."""
    later = [Times(1.5, 0.2, 0.3, 0, 0.3), Times(1, 0, 1, 0, 0), Times(2, 0, 0, 0, 0)]
    moments = iter([(0.0, [Times(0, 0, 0, 0, 0)] * 3), (2.0, later)])
    wall = 0.0

    def times(percpu: bool) -> list[Times]:
        nonlocal wall
        assert percpu
        wall, found = next(moments)
        return found

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(machine, "_affinity", lambda: {0, 1})
    monkeypatch.setattr(time, "perf_counter", lambda: wall)
    monkeypatch.setattr(time, "process_time", lambda: wall / 2)
    load = machine.ForeignLoad()
    assert load() == pytest.approx(1.0)


def test_this_machine_answers() -> None:
    total, free, own = machine.total_memory(), machine.free_memory(), machine.resident_memory()
    assert total is not None and free is not None and own is not None
    assert 1 << 20 < own < total
    assert 0 < free < total
    assert machine.cores() >= 1
