"""vLLM or a plain word about it: these tests never skip."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.exit("tests/vllm needs the venv with vLLM in it: run `make test-vllm`", returncode=2)
