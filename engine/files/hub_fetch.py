"""A model's files from the Hugging Face Hub (or what HF_ENDPOINT names) into its ordinary cache.

Decides which files are asked for, and turns the hub's errors into one line. All files come from one revision. The
metadata of every file is read first. It says which files exist, whether they may be fetched and how large they are, so
progress is exact and a refusal comes before any download. Without a network a complete copy in the cache is used. The
library prints nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from engine.errors import SetupError
from engine.files.model_files import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    Progress,
    read_index,
    shorten,
)

_NO_NETWORK = (httpx2.TransportError, OfflineModeIsEnabled)
_ATTEMPTS = 3


def fetch_snapshot(repo: str, revision: str | None, report: Progress) -> Path:
    """Folder with the model's files, fetched where the cache lacks them. Raises SetupError."""
    fetch = _Fetch(repo, revision, report)
    try:
        return fetch.run()
    except (HFValidationError, *_NO_NETWORK, OSError, EntryNotFoundError) as error:
        raise _explain(error, fetch) from error


def fetch_config(repo: str, revision: str | None, report: Progress) -> Path:
    """config.json alone, from the cache where the hub cannot be reached. Raises SetupError."""
    fetch = _Fetch(repo, revision, report)
    try:
        return fetch.config()
    except (HFValidationError, *_NO_NETWORK, OSError, EntryNotFoundError) as error:
        raise _explain(error, fetch) from error


class _Fetch:
    """One fetch of one repository, with its progress."""

    def __init__(self, repo: str, revision: str | None, report: Progress) -> None:
        _silence()
        self.repo, self.revision, self.report = repo, revision, report
        self.endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        self.total = self.done = 0
        self.folder: Path | None = None

    def run(self) -> Path:
        self.report(0, 0, f"asking the hub for {self.repo}")
        try:
            size = self.size_of(CONFIG)
        except _NO_NETWORK:
            return self.from_cache()
        if size is None:
            raise SetupError(
                f"{self.repo} on the hub has no {CONFIG}: not a model that kvtop can run (or only GGUF)"
            )
        small = {CONFIG: size, **self.sizes(GENERATION, INDEX, *TOKENIZER_FILES)}
        weights = {} if INDEX in small else self.sizes(SINGLE)
        self.total = sum(small.values()) + sum(weights.values())
        self.get(small)
        assert self.folder is not None
        if INDEX in small:
            shards = sorted(set(read_index(self.folder / INDEX).values()))
            weights = self.sizes(*shards)
            missing = [shard for shard in shards if shard not in weights]
            if missing:
                raise SetupError(
                    f"{self.repo}: the index names {shorten(missing[0])}, which the hub does not have"
                )
            self.total += sum(weights.values())
        if not weights:
            raise SetupError(
                f"{self.repo} has no safetensors on the hub; kvtop reads safetensors and GGUF only"
            )
        self.check_space(weights)
        self.get(weights)
        return self.folder

    def config(self) -> Path:
        """The file's path. Asks the hub first, so that "no such file" and "no such model" get different messages."""
        self.report(0, 0, f"asking the hub for {self.repo}")
        try:
            size = self.size_of(CONFIG)
        except _NO_NETWORK:
            return Path(hf_hub_download(self.repo, CONFIG, revision=self.revision, local_files_only=True))
        if size is None:
            raise SetupError(f"{self.repo} on the hub has no {CONFIG}, which tells the shape of its cache")
        self.total = size
        return self.download(CONFIG)

    def size_of(self, name: str) -> int | None:
        """Bytes of a file on the hub; None if there is no such file."""
        url = hf_hub_url(self.repo, name, revision=self.revision, endpoint=self.endpoint)
        try:
            return get_hf_file_metadata(url, endpoint=self.endpoint).size or 0
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except HfHubHTTPError as error:  # servers other than the hub send 404 without the hub's error code
            if error.response.status_code == 404:
                return None
            raise

    def sizes(self, *names: str) -> dict[str, int]:
        """Those of the names that exist, with their bytes."""
        found = {name: self.size_of(name) for name in names}
        return {name: size for name, size in found.items() if size is not None}

    def get(self, files: dict[str, int]) -> None:
        for name, size in files.items():
            before = self.done
            path = self.download(name)
            self.done = before + size
            self.report(self.done, self.total, f"fetching {self.repo}")
            if self.folder is None:
                self.folder = path.parent
            elif path.parent != self.folder:
                raise SetupError(
                    f"{self.repo} changed on the hub during the download; run the same command again"
                )

    def download(self, name: str) -> Path:
        """hf_hub_download resumes after a connection was cut but gives up after a reset: then it is called again."""
        start = self.done
        for attempt in range(1, _ATTEMPTS + 1):
            self.done = start
            try:
                return Path(
                    hf_hub_download(
                        self.repo, name, revision=self.revision, endpoint=self.endpoint, tqdm_class=_bar(self)
                    )
                )
            except httpx2.TransportError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    def from_cache(self) -> Path:
        """Folder of a complete copy fetched earlier; LocalEntryNotFoundError if there is none."""

        def cached(name: str) -> Path:
            return Path(hf_hub_download(self.repo, name, revision=self.revision, local_files_only=True))

        folder = cached(CONFIG).parent
        shards = set(read_index(folder / INDEX).values()) if (folder / INDEX).is_file() else {SINGLE}
        for shard in shards:
            cached(shard)
        return folder

    def check_space(self, weights: dict[str, int]) -> None:
        assert self.folder is not None
        need = sum(size for name, size in weights.items() if not (self.folder / name).exists())
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise SetupError(
                f"disk full: {self.repo} needs {_size(need)}, {_size(free)} are free in "
                f"{shorten(constants.HF_HUB_CACHE, 50)}; free some or set HF_HOME"
            )


def _silence() -> None:
    """Turn off the log and the warnings of huggingface_hub, which would surround our one line."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="huggingface_hub")


def _size(n: int) -> str:
    """Bytes in the hub's units: 1.2 GB, 980 bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:,.1f} {unit}"
    return f"{n} bytes"


def _bar(fetch: _Fetch) -> Any:
    """The progress bar class that huggingface_hub drives; it reports instead of drawing."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            fetch.done += int(n or 0)
            fetch.report(min(fetch.done, fetch.total), fetch.total, f"fetching {fetch.repo}")

    return Bar


def _explain(error: BaseException, fetch: _Fetch) -> SetupError:
    """The hub's exception as one line that says what to do."""
    repo, host = shorten(fetch.repo), shorten(fetch.endpoint, 50)
    if isinstance(error, HFValidationError):
        return SetupError(f"--model {repo} is no hub id; ids look like Qwen/Qwen3-0.6B")
    response = error.response if isinstance(error, HfHubHTTPError) else None
    status = response.status_code if response is not None else 0
    if isinstance(error, GatedRepoError) or status == 403:
        return SetupError(
            f"{repo} is gated: accept its licence at {host}/{repo}, then set HF_TOKEN ({status})"
        )
    if isinstance(error, RevisionNotFoundError):
        return SetupError(f"{repo} has no revision {shorten(str(fetch.revision), 40)}; check --revision")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return SetupError(
            f"no model {repo} at {host} ({status}): check the id; a private or gated one needs HF_TOKEN"
        )
    if status:
        return SetupError(f"the hub at {host} answered {status} for {repo}; try again later")
    if isinstance(error, LocalEntryNotFoundError):
        return SetupError(
            f"no network: cannot reach {host}, and {repo} is not in the cache; connect and run it again"
        )
    if isinstance(error, httpx2.TransportError):
        at = f" at {_size(fetch.done)} of {_size(fetch.total)}" if fetch.total else ""
        return SetupError(f"the connection to {host} was cut{at}; run the same command again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SetupError(f"disk full in {shorten(constants.HF_HUB_CACHE, 60)}; free some or set HF_HOME")
    if isinstance(error, OSError) and error.errno is not None:
        return SetupError(
            f"cannot write the hub's cache {shorten(constants.HF_HUB_CACHE, 60)}: {error.strerror}"
        )
    return SetupError(f"fetching {repo} failed: {error}; run the same command again")
