"""The start of an engine: from an EngineConfig to files, tokenizer and runner.

Owns the order of a start, what `build` returns, and the EngineStarted event. Runs in the engine thread. Tests use a
ToyRunner instead.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from engine.config import EngineConfig
from engine.events import SCHEMA, EngineStarted, Knobs
from engine.files.model_files import Progress
from engine.loaded import Built
from engine.step.runner import ModelRunner


def build(config: EngineConfig, progress: Progress) -> Built:
    """Find, load and pack the model, size the cache, warm up. Raises SetupError."""
    from engine.files import hub

    files = hub.resolve(config.model, revision=config.revision, progress=progress)
    from engine.files import tokenizer
    from engine.model import (
        torch_runner,
    )  # loads torch, which takes long: a wrong model name is reported before

    text = tokenizer.load(files)
    runner = torch_runner.build(config, progress, files)
    model = runner.model.config
    return Built(
        runner,
        text,
        tuple(dict.fromkeys((*model.eos_token_ids, *text.eos_ids))),
        dict(model.generation),
        {
            "ops": runner.ops_name,
            "attention_backend": getattr(runner.model.ops, "attention_backend", runner.ops_name),
            "kv_cache_dtype": runner.kv_dtype,
            "kv_cache": str(runner.cache_size),
            "special_tokens": text.special_names,
        }
        | ({"notice": runner.notice} if runner.notice else {}),
    )


def with_budget(config: EngineConfig, runner: ModelRunner) -> EngineConfig:
    """`config` with a token budget for a step. The default depends on the device."""
    if config.max_num_batched_tokens is not None:
        return config
    budget = 512 if runner.device == "cpu" else 2048
    least = 2 * config.max_num_seqs * (1 + config.speculate)
    return replace(config, max_num_batched_tokens=max(budget, least))


def started(config: EngineConfig, model: Built, seed: int, epoch: float, *, samples: bool) -> EngineStarted:
    """The EngineStarted of a run. epoch: Unix time at t = 0. samples: DeviceSamples will come."""
    runner = model.runner
    able = ["blocks", "timings"]
    able += ["text"] if model.tokenizer else []
    able += ["device"] if samples else []
    own = {"model", "dtype", "device", "block_size", "num_blocks", "max_model_len", "hash_seed"}
    knobs = {name: value for name, value in asdict(config).items() if name not in own} | model.knobs
    return EngineStarted(
        schema=SCHEMA,
        source=model.source,
        capabilities=able,
        model=runner.model_name,
        device=runner.device,
        dtype=runner.dtype,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        bytes_per_block=runner.bytes_per_block,
        weights_bytes=runner.weights_bytes,
        hash_seed=seed,
        epoch=epoch,
        max_model_len=runner.max_model_len,
        knobs=Knobs(**{name: knobs[name] for name in Knobs.__struct_fields__ if name in knobs}),
    )
