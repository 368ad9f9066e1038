"""What every test shares: a small machine's threads, a user without settings, and the built-in model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported: threads that spin briefly and then yield are best for an engine with a dashboard.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.pop("OMP_WAIT_POLICY", None)
# Animations and a blinking cursor would make screens depend on the moment they are looked at.
os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from engine.files.model_files import ModelFiles

settings.register_profile("kvtop", deadline=None, print_blob=True)
settings.load_profile("kvtop")


@pytest.fixture(autouse=True)
def clean_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests use no config, theme, log or KVTOP_ variable of the user. They do use the user's model cache."""
    home = tmp_path_factory.mktemp("user")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for name in list(os.environ):
        if name.startswith("KVTOP_") and name not in ("KVTOP_REQUIRE_MODEL", "KVTOP_CACHE"):
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "HF_ENDPOINT", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(scope="session")
def builtin_model() -> ModelFiles:
    """The built-in model on this machine, fetched if need be. Only a bare pytest without a network skips."""
    from engine.errors import SetupError
    from engine.files import hub

    try:
        return hub.resolve(None)
    except SetupError as error:
        if os.environ.get("KVTOP_REQUIRE_MODEL") or not str(error).startswith("no network"):
            raise
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu on a machine without one; torch is asked only if such a test was collected."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
