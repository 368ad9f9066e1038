"""What we compare with: the attention libraries that are installed, and vLLM with the same model shape.

vLLM runs in a process of its own, `python -m tests.gpu.peers FOLDER BATCH …`, because it takes the whole card. All its
memory is free again when the process ends. It compiles for a minute and prints one line of JSON for each figure.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.ops import get_ops
from engine.ops.nvidia.triton import TritonOps
from tests.gpu.machine import Machine, Table

VLLM_SECONDS = 240


def backends(m: Machine, c: ModelConfig) -> list[tuple[str, TritonOps, int]]:
    """(name, ops, block size that it needs) of each attention library that is installed here."""
    found = []
    for name in ("flash-attn", "flashinfer"):
        for size in (16, 256):
            try:
                ops = get_ops("triton", m.device, torch.bfloat16, c, attention=name, block_size=size)  # type: ignore[arg-type]
            except SetupError:
                continue
            assert isinstance(ops, TritonOps)
            found.append((name if size == 16 else f"{name}, blocks of {size}", ops, size))
            break
    return found


def run(m: Machine) -> list[Table]:
    """vLLM in one process with random weights of Qwen3-8B's shape, including sampling. No table if it is not
    installed."""
    if m.real and importlib.util.find_spec("vllm") is None:
        return []
    if m.real:
        torch.cuda.empty_cache()
    table = Table("vLLM, Qwen3-8B's shape, 2,048 tokens of context, bf16", ("what", "at once", "tok/s"))
    limit = min(VLLM_SECONDS, m.left())
    if limit < 120 and m.real:
        table.rows.append(("no time left", "", ""))
        return [table]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), "utf-8")
        words = [
            sys.executable,
            "-m",
            "tests.gpu.peers",
            folder,
            *(("1", "8", "64") if m.real else ("dry", "1")),
        ]
        try:
            run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            table.rows.append((f"took over {limit:.0f} s", "", ""))
            return [table]
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            table.rows.append((row["what"], str(row["batch"]), f"{row['tokens'] / row['seconds']:,.0f}"))
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no word"])[-1]
        table.rows.append((f"failed: {last:.80}", "", ""))
    return [table]


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def vllm(folder: str, batches: list[int], prompt: int = 2048, new: int = 128) -> None:
    """Prefill, and decode as the extra time of `new` tokens compared with one. All prompts differ, so nothing hits."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096,
        enable_prefix_caching=False, gpu_memory_utilization=0.85,
    )  # fmt: skip
    seed = 0

    def seconds(batch: int, tokens: int) -> float:
        nonlocal seed
        prompts: list[Any] = []
        for _ in range(batch):
            seed += 1
            prompts.append({"prompt_token_ids": [(seed * 7919 + 31 * i) % 150_000 for i in range(prompt)]})
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for batch in batches:
        seconds(batch, 4)
        first = seconds(batch, 1)
        _say("prefill", batch, batch * prompt, first)
        _say("decode", batch, batch * (new - 1), max(seconds(batch, new) - first, 1e-9))


def _say(what: str, batch: int, tokens: int, seconds: float) -> None:
    print(json.dumps({"what": what, "batch": batch, "tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    if numbers[0] == "dry":
        from tests.gpu.stand_ins import install

        install()
        numbers = numbers[1:]
    vllm(where, [int(n) for n in numbers])
