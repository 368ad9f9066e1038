"""These tests never skip: without vLLM they fail with a clear message."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/vllm needs a venv with vLLM in it: `make test-vllm` makes one")
