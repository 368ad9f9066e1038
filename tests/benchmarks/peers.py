"""The same work done by other engines, in the same process and with the same number of threads."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from engine.bench import DECODE, PREFILL, REPEATS
from engine.files.model_files import ModelFiles

Rates = dict[str, float]
"""Tokens per second by work: decode-1, decode-8, prefill."""


def transformers(files: ModelFiles, threads: int) -> Rates:
    """`generate` in bfloat16, weights from our own load_weights. Decode rates are medians over steps."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    from engine.model import load_weights
    from tests.engine.tiny import hf_model

    class Clock(StoppingCriteria):
        """Never stops; records when each step ended."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    torch.set_num_threads(threads)
    loaded = load_weights.load(files, dtype=torch.bfloat16)
    model = hf_model(loaded.config, loaded.weights, torch.bfloat16)
    vocab = loaded.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def prompts(n: int, tokens: int) -> torch.Tensor:
        return torch.randint(vocab // 10, vocab * 9 // 10, (n, tokens), generator=generator)

    rates: Rates = {}
    with torch.inference_mode():
        for n in (1, 8):
            ids, clock = prompts(n, DECODE), Clock()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=DECODE,
                min_new_tokens=DECODE,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
            rates[f"decode-{n}"] = n / statistics.median(steps)
        seconds = []
        for _ in range(REPEATS + 1):
            ids = prompts(1, PREFILL)
            start = time.perf_counter()
            model(ids, logits_to_keep=1, use_cache=True)
            seconds.append(time.perf_counter() - start)
    rates["prefill"] = PREFILL / min(seconds)
    return rates


def llama_cpp(files: ModelFiles, threads: int) -> Rates | None:
    """llama.cpp with the file's own quantisation. None if llama-cpp-python is not installed or the file is no GGUF.
    Its Python binding decodes one sequence at a time."""
    try:
        import llama_cpp as binding
    except ImportError:
        return None
    if files.kind != "gguf":
        return None
    size = {"n_ctx": 2048, "n_batch": 1024, "n_ubatch": 512}
    model = binding.Llama(
        str(files.weights[0]), n_threads=threads, n_threads_batch=threads, verbose=False, **size
    )
    r, vocab = random.Random(0), model.n_vocab()
    prompt = [r.randrange(vocab // 10, vocab * 9 // 10) for _ in range(PREFILL)]
    seconds = []
    for _ in range(REPEATS + 1):
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        seconds.append(time.perf_counter() - start)
    model.reset()
    model.eval(prompt[:DECODE])
    steps = []
    token = prompt[0]
    for _ in range(DECODE):
        start = time.perf_counter()
        model.eval([token])
        token = model.sample(temp=0.0)
        steps.append(time.perf_counter() - start)
    return {"decode-1": 1 / statistics.median(steps), "prefill": PREFILL / min(seconds)}
