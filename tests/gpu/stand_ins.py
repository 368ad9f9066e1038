"""For a dry run: replacements for modules that only a GPU machine has, so that the lines that call them run."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tests.engine.attention_libraries import LIBRARIES


class LLM:
    """A replacement for vLLM's LLM. It checks only the arguments."""

    def __init__(self, model: str, **how: Any) -> None:
        assert how["load_format"] == "dummy" and how["skip_tokenizer_init"]

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool) -> None:
        assert all(len(p["prompt_token_ids"]) == 2048 for p in prompts) and not use_tqdm


class SamplingParams:
    def __init__(self, **how: Any) -> None:
        assert how["ignore_eos"] and not how["detokenize"]


def install() -> None:
    """Installs replacements of flash_attn 2 (whose pages differ from ours), flashinfer and vllm."""
    for name in ("flash_attn", "flashinfer"):
        sys.modules[name] = ModuleType(name)
        LIBRARIES[name](sys.modules[name])
    sys.modules["flash_attn_interface"] = None  # type: ignore[assignment]
    module = sys.modules["vllm"] = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
