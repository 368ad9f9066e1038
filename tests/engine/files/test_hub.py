"""From what the user typed to files: the hub through a stand-in server, and every way it can fail."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants, file_download

from engine.errors import SetupError
from engine.files import hub, model_files
from engine.model import load_weights
from tests.engine.hub_server import Hub, serve
from tests.engine.saved_models import save

NOBODY = "http://127.0.0.1:9"  # the discard port, where nothing listens


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The stand-in under HF_ENDPOINT, with an empty cache and no waiting between attempts."""
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield running


def fails(model: str, *words: str, revision: str | None = None) -> None:
    with pytest.raises(SetupError) as error:
        hub.resolve(model, revision=revision)
    message = str(error.value)
    assert len(message) <= 200
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("shards", [None, "60KB"])
def test_found_and_then_cached(
    shards: str | None, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "model", "Qwen3", shards=shards)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "training_args.bin").write_text("not asked for")
    server.repos["org/tiny"] = tmp_path / "model"
    reports: list[tuple[int, int, str]] = []
    files = hub.resolve("org/tiny", progress=lambda *report: reports.append(report))
    assert files.name == "org/tiny"
    assert (files.folder / "tokenizer.json").is_file()
    loaded = load_weights.load(files)
    assert torch.equal(loaded.weights["model.norm.weight"], model.state_dict()["model.norm.weight"])
    sizes = sum(path.stat().st_size for path in files.folder.iterdir())
    assert reports[-1][:2] == (sizes, sizes)
    assert {what for *_, what in reports} == {"asking the hub for org/tiny", "fetching org/tiny"}
    assert not any(name.endswith(".bin") for _, name, _ in server.log)
    server.log.clear()
    assert hub.resolve("org/tiny", revision="main") == files
    assert not [name for method, name, _ in server.log if method == "GET"]
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert hub.resolve("org/tiny") == files  # no network: the copy is complete


def test_an_incomplete_copy_without_network(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model", "Llama", shards="60KB")
    server.repos["org/tiny"] = tmp_path / "model"
    files = hub.resolve("org/tiny")
    files.weights[-1].unlink()
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    fails("org/tiny", "no network", "not in the cache")


def test_a_connection_that_is_cut_goes_on_where_it_was(server: Hub, tmp_path: Path) -> None:
    """huggingface_hub keeps what it wrote in pieces of 10 MB."""
    model = save(tmp_path / "model", "Llama", vocab_size=100_000)
    server.repos["org/big"] = tmp_path / "model"
    server.cuts["model.safetensors"] = [12_000_000, 11_000_000]
    reports: list[tuple[int, int, str]] = []
    files = hub.resolve("org/big", progress=lambda *report: reports.append(report))
    ranges = [asked for method, name, asked in server.log if (method, name) == ("GET", "model.safetensors")]
    assert ranges == [None, "bytes=10485760-", "bytes=20971520-"]
    assert files.weights[0].read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert torch.equal(
        load_weights.load(files).weights["lm_head.weight"], model.state_dict()["lm_head.weight"]
    )
    assert max(done for done, *_ in reports) == reports[-1][1]


def test_a_connection_that_is_always_cut(server: Hub, tmp_path: Path) -> None:
    save(tmp_path / "model", "Llama")
    server.repos["org/tiny"] = tmp_path / "model"
    server.cuts["model.safetensors"] = [1000] * 100
    fails("org/tiny", "was cut", "run the same command again")


def test_of_a_connection_that_stays_cut_the_terminal_sees_one_line(server: Hub, tmp_path: Path) -> None:
    save(tmp_path / "model", "Llama")
    server.repos["org/tiny"] = tmp_path / "model"
    server.cuts["model.safetensors"] = [0] * 1000
    code = (
        "import sys, time; time.sleep = lambda seconds: None; "  # huggingface_hub's between attempts
        "from kvtop.cli.program import invoke; sys.exit(invoke(sys.argv[1:]))"
    )
    words = ["--headless", "--once", "--prompt", "x", "--model", "org/tiny"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub")},
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr) <= 201 and done.stderr.count("\n") == 1, done.stderr
    assert "was cut" in done.stderr


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "GatedRepo", ("gated", "HF_TOKEN")),
        (403, "GatedRepo", ("gated", "HF_TOKEN")),
        (403, "", ("gated", "HF_TOKEN")),
        (401, "", ("no model org/x", "(401)", "HF_TOKEN")),
        (401, "RepoNotFound", ("no model org/x", "check the id")),
        (404, "RepoNotFound", ("no model org/x", "check the id")),
        (404, "", ("org/x", "has no config.json")),
        (500, "", ("answered 500", "try again later")),
        (429, "", ("answered 429", "try again later")),
    ],
)
def test_refused(status: int, code: str, words: tuple[str, ...], server: Hub) -> None:
    server.refuse["org/x"] = (status, code)
    fails("org/x", *words)
    assert len(server.log) == 1  # nothing else is asked, and nothing again


def test_missing(server: Hub, tmp_path: Path) -> None:
    fails("org/nothing", "no model org/nothing", "check the id")
    fails("gpt2", "no model gpt2")
    save(tmp_path / "model", "Llama", shards="60KB")
    server.repos["org/tiny"] = tmp_path / "model"
    fails("org/tiny", "no revision v9", revision="v9")
    shard = max((tmp_path / "model").glob("model-*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    fails("org/tiny", f"the index names {shard.name}", "the hub does not have")
    (tmp_path / "model" / model_files.INDEX).unlink()
    fails("org/tiny", "has no safetensors")
    (tmp_path / "model" / "config.json").unlink()
    fails("org/tiny", "has no config.json")


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    fails("org/x", "no network", NOBODY, "connect")


def test_disk_full(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model", "Llama")
    server.repos["org/tiny"] = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        fails("org/tiny", "disk full", " kB, 1.0 kB are free in", "HF_HOME")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    fails("org/tiny", "disk full", "HF_HOME")


def test_giving_up_in_the_middle(server: Hub, tmp_path: Path) -> None:
    """progress may raise: nothing half is left under a file's name."""
    save(tmp_path / "model", "Llama")
    server.repos["org/tiny"] = tmp_path / "model"

    def report(done: int, total: int, what: str) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve("org/tiny", progress=report)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    assert hub.resolve("org/tiny").weights[0].is_file()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("what is this", "no such file or folder"),
        ("", "--model is empty"),
        ("x\0y", "no such file or folder"),
        ("x" * 5000, "x"),
        ("org/-x", "no such file or folder"),
    ],
)
def test_what_is_neither_path_nor_id(model: str, words: str) -> None:
    fails(model, words)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    fails(str(path), "is a file but no .gguf", "folder")
    gguf = tmp_path / "A.GGUF"
    gguf.touch()
    assert hub.resolve(str(gguf)).weights == (gguf,)


def test_shorten_keeps_both_ends() -> None:
    assert re.fullmatch(r"a{33}…b{34}", model_files.shorten("a" * 100 + "b" * 100))
    assert model_files.shorten("short") == "short"
    assert model_files.shorten("a\x1b[2Jb") == "a\\x1b[2Jb"
