"""TorchRunner: the ModelRunner that computes with torch.

Owns the model, the KV cache, the persistent rows and the choice of device, dtype and ops. Runs in the engine thread.
Invariant: a step is copies, forward and sampling, in this order, and is never split.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.events import Event
from engine.files.hf_config import Foreign, from_hf
from engine.files.model_config import ModelConfig
from engine.files.model_files import ModelFiles, Progress
from engine.machine import cores, free_memory
from engine.model.batch import DeviceRows
from engine.model.decoder import Decoder, Model
from engine.model.kv_cache import (
    CacheSize,
    allocate,
    allocate_what_fits,
    check_cpu_memory,
    distance,
    gpu_kv_bytes,
    plan_size,
    size,
    tolerance,
)
from engine.model.layers import Weights, rope_bytes
from engine.model.logit_shaping import Logprobs, Shaper
from engine.model.step_cost import StepCost
from engine.ops import get_ops
from engine.ops.base import StepInput
from engine.ops.profiling.step_profile import Profiler
from engine.params import SamplingParams
from engine.step.runner import NewSequence, Plan, Recomputed, Row, StepOutput

if TYPE_CHECKING:
    from engine.model.graphs import DecodeGraphs

_dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def build(config: EngineConfig, progress: Progress, files: ModelFiles | None = None) -> TorchRunner:
    """Resolves, loads and packs the model, sizes the cache and warms up.

    files: those of `config.model` where the caller has resolved them. Call it in the thread that will
    call `execute`. Raises SetupError: one line that says what to do.
    """
    from engine.files import hub
    from engine.model import load_weights

    device, dtype = choose(config)
    if files is None:
        files = hub.resolve(config.model, revision=config.revision, progress=progress)
    if _is_foreign(files):
        from engine.model import hf_model

        if config.quantization is not None:
            raise SetupError(
                f"--quantization: {files.name:.60} {hf_model.NOTICE}, and has none; leave it out"
            )
        return TorchRunner.over(hf_model.load(files, device, dtype, progress, config), config, progress)
    codes = config.quantization == "int4"
    if device.type == "cpu":
        check_cpu_memory(load_weights.loaded_bytes(files, dtype, keep_codes=codes), None, free_memory())
    loaded = load_weights.load(files, dtype=dtype, progress=progress, keep_codes=codes)
    return TorchRunner.from_weights(loaded.config, loaded.weights, config, progress)


def _is_foreign(files: ModelFiles) -> bool:
    """Whether the model needs transformers. Raises SetupError for a wrong config."""
    if files.kind == "gguf":
        return False
    try:
        from_hf(files.config or {}, files.generation_config, name=files.name)
    except Foreign:
        return True
    return False


def choose(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype for `config`. Raises SetupError for a GPU that torch does not find."""
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise SetupError("--device cuda: torch sees no CUDA GPU; use --device cpu or install torch with CUDA")
    device = torch.device("cuda" if cuda and config.device != "cpu" else "cpu")
    return device, _dtypes["bfloat16" if config.dtype == "auto" else config.dtype]


_LEAST_TOKENS = 2048
"""The least tokens that must fit in the cache of a GPU, if there is no --max-model-len."""


class TorchRunner:
    """See engine.step.runner.ModelRunner. `build` and `from_weights` make one."""

    def __init__(self, model: Model, cache_size: CacheSize, max_model_len: int, config: EngineConfig) -> None:
        ops, short = model.ops, ""
        if ops.device.type == "cuda":
            least = config.max_model_len or min(max_model_len, _LEAST_TOKENS)
            exact = config.num_blocks is not None or config.kv_cache_memory is not None
            self.cache, cache_size, short = allocate_what_fits(
                cache_size, ops.device, ops.dtype, least, exact=exact
            )
            max_model_len = min(max_model_len, cache_size.usable_tokens)
        else:
            self.cache = allocate(cache_size, ops.device, ops.dtype)
        model.reach(max_model_len)
        self.model = model
        self.config = config
        self.cache_size = cache_size
        """str(cache_size) shows the calculation: layers x kv heads x head dim x 2 x bytes."""
        self.num_blocks = cache_size.num_blocks
        self.block_size = cache_size.block_size
        self.bytes_per_block = cache_size.bytes_per_block
        self.weights_bytes = model.weights_bytes
        self.vocab_size = model.config.vocab_size
        self.max_model_len = max_model_len
        self.model_name = model.config.name
        self.device = ops.device.type
        self.dtype = str(ops.dtype).removeprefix("torch.")
        self.ops_name = ops.name
        self.notice = "; ".join(filter(None, (model.notice, short)))
        self.kv_dtype = "fp8" if cache_size.scale_bytes else self.dtype
        blocks = -(-max_model_len // cache_size.block_size) + 1
        self._rows = DeviceRows(
            config.max_num_seqs, blocks, cache_size.block_size, ops.device, ops, self.vocab_size
        )
        self._cost = StepCost(model.config) if self.device == "cpu" else None
        self._shaper = Shaper()
        asked = config.async_scheduling
        self.ahead = int(self.device == "cuda" if asked is None else asked)
        """See engine.step.runner.AsyncRunner. 0 on a CPU by default: the host is the device, so nothing is gained."""
        self._events: list[Event] = []
        """Events for the output of the next step that is collected."""
        self._profiler: Profiler | None = None
        self._graphs: DecodeGraphs | None = None
        if self.device == "cuda" and ops.name == "triton" and isinstance(model, Decoder):
            from engine.model.graphs import DecodeGraphs, cuda_capture

            capture = cuda_capture(ops.device)
            self._graphs = DecodeGraphs(model, self.cache, config.max_num_seqs, capture, self._events.append)

    @classmethod
    @torch.inference_mode()
    def from_weights(
        cls,
        model_config: ModelConfig,
        weights: Weights,
        config: EngineConfig,
        progress: Progress = lambda done, total, what: None,
    ) -> TorchRunner:
        """A runner over `weights` (HF names; the dict is emptied as they are packed)."""
        device, dtype = choose(config)
        if device.type == "cpu":
            torch.set_num_threads(config.threads or cores())
        fp8 = config.kv_cache_dtype == "fp8"
        ops = get_ops(
            config.ops, device, dtype, model_config, fp8_kv=fp8, quantization=config.quantization,
            attention=config.attention_backend, block_size=config.block_size,
        )  # fmt: skip
        longest = model_config.max_position_embeddings
        check_longest(config, longest)
        if device.type == "cpu":
            loaded, free = sum(t.nbytes for t in weights.values()), free_memory()
            cache_size = plan_size(model_config, config, dtype)
            free = None if free is None else free + loaded
            rope = rope_bytes(model_config, min(longest, cache_size.usable_tokens))
            check_cpu_memory(loaded, cache_size, free, rope=rope, by_blocks=config.num_blocks is not None)
        return cls.over(Decoder(model_config, weights, ops, progress=progress), config, progress)

    @classmethod
    @torch.inference_mode()
    def over(cls, model: Model, config: EngineConfig, progress: Progress = lambda *_: None) -> TorchRunner:
        """A runner over a model that is ready to compute. Raises SetupError like from_weights."""
        longest, ops = model.config.max_position_embeddings, model.ops
        check_longest(config, longest)
        if ops.device.type == "cpu":
            torch.set_num_threads(config.threads or cores())
        memory = None if ops.device.type == "cpu" else _profile_gpu(model, config)
        cache_size = plan_size(model.config, config, ops.dtype, memory)
        if ops.device.type == "cpu":
            by_blocks = config.num_blocks is not None
            check_cpu_memory(0, cache_size, free_memory(), by_blocks=by_blocks)
        runner = cls(model, cache_size, clamp_model_len(config.max_model_len, longest, cache_size), config)
        progress(1, 1, f"KV: {runner.cache_size}")
        runner.warm_up()
        return runner

    # ---------------------------------------------------------------------------------- the steps

    def execute(self, plan: Plan) -> StepOutput:
        """Run one step. Raises what torch raises; the step then counts as not executed."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> _Ticket:
        """Do everything for a step that needs no sampled tokens. On a GPU the work is only queued."""
        t0 = time.perf_counter()
        batch, sampled = self._rows.apply(plan)
        errors = self._shaper.take(plan)
        if plan.copies:
            self.model.ops.copy_blocks(self.cache, plan.copies)
        if not plan.rows:
            return _Ticket(plan, time.perf_counter() - t0)
        # before the clocks start, because on a GPU it makes the device wait
        profiler = self._profiler if self._profiler is not None and self._profiler.begin(batch) else None
        t1 = time.perf_counter()
        clock = _GpuClock() if self.device == "cuda" else None
        logits = profiler.forward(batch, self.cache) if profiler else self._forward(batch)
        t2 = time.perf_counter()
        drawing = [i for i, row in enumerate(plan.rows) for _ in row.draws]
        rows = [plan.rows[i] for i in drawing]
        logprobs = Logprobs(logits, map(self._shaper.logprobs, rows))
        errors |= {drawing[at]: why for at, why in self._shaper.apply(logits, rows).items()}
        drawn, likely = None, []
        if drawing:
            ids = self.model.ops.draw(logits, sampled)
            if self.ahead:
                self._rows.drawn(ids[0].long())
            drawn = _ToHost(ids)
            if logprobs:
                likely = [_ToHost(t) for t in logprobs.look_up(ids[0])]
        if clock is not None:
            clock.stop()
        self.model.ops.took(t2 - t1)
        if self._cost:
            self._cost.observe(batch.q_lens, batch.kv_lens_host, t2 - t1)
        queued = time.perf_counter() - t2
        slowed = profiler is not None and clock is not None
        return _Ticket(plan, t1 - t0, t2 - t1, queued, drawn, logprobs, likely, clock, slowed, errors)

    @torch.inference_mode()
    def collect(self, ticket: _Ticket) -> StepOutput:
        """Wait for the tokens of a step."""
        t0 = time.perf_counter()
        rows = ticket.plan.rows
        ids, bad = ticket.drawn.read() if ticket.drawn else ([], [])
        waited = time.perf_counter() - t0
        output = StepOutput(
            [[] for _ in rows],
            errors=ticket.errors,
            t_prepare=ticket.t_prepare,
            t_forward=ticket.t_forward,
            t_sample=ticket.t_sample + waited,
        )
        output.t_gpu = ticket.clock.read() if ticket.clock else None
        sampling = [i for i, row in enumerate(rows) for _ in row.draws]
        for i, token in zip(sampling, ids, strict=True):
            output.token_ids[i].append(token)
        for i in dict.fromkeys(sampling[at] for at, n in enumerate(bad) if n):
            output.token_ids[i] = []
            output.bad_rows.append(i)
        for i in ticket.errors:
            output.token_ids[i] = []
        if ticket.logprobs:
            for i, found in ticket.logprobs.of(*(t.read() for t in ticket.likely)).items():
                if output.token_ids[sampling[i]]:
                    output.logprobs.setdefault(sampling[i], []).append(found)
        if self._profiler is not None:
            self._events += self._profiler.take()
        output.events = self._events[:]
        self._events.clear()
        output.slowed = ticket.slowed
        return output

    @torch.inference_mode()
    def audit(self, token_ids: SequenceOf[int], blocks: list[int]) -> Recomputed:
        """Computes in chunks of 512 tokens, in a separate cache that is just large enough."""
        ops, size = self.model.ops, self.block_size
        scratch = allocate(replace(self.cache_size, num_blocks=len(blocks) + 1), ops.device, ops.dtype)
        rows = DeviceRows(1, len(blocks) + 1, size, ops.device)
        table = list(range(1, len(blocks) + 1))
        for start in range(0, len(token_ids), 512):
            row = _own_row(token_ids[start : start + 512], table, start)
            batch, _ = rows.apply(Plan(0, [row]))
            self.model.forward(batch, scratch)
        return Recomputed(
            distance(self.cache, blocks, scratch, table),
            tolerance(self.kv_dtype, self.config.quantization),
        )

    def _forward(self, batch: StepInput) -> torch.Tensor:
        """Logits of a step. A step that only decodes runs as a graph, if one fits."""
        logits = self._graphs.forward(batch) if self._graphs else None
        if logits is not None:
            return logits
        try:
            return self.model.forward(batch, self.cache)
        except torch.OutOfMemoryError:
            # Free memory may be in pieces that torch keeps. A second forward writes the same KV again.
            if self.device != "cuda":
                raise
            torch.cuda.empty_cache()
            return self.model.forward(batch, self.cache)

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """Tokens for a step with this longest context. On a CPU at most as many as take half a second."""
        if self._cost is None:
            return max_num_batched_tokens
        return min(max_num_batched_tokens, self._cost.tokens_within(context))

    def warm_up(self) -> None:
        """Two forwards over unused blocks: compiles kernels, loads pages and measures the cost of a step."""
        n = min(64, self.max_model_len, self.cache_size.usable_tokens)
        row = _own_row([0] * n, range(1, -(-n // self.block_size) + 1), draws=(0,))
        for _ in range(2):
            self.execute(Plan(0, [row]))
        self.execute(Plan(0, retired=[-1]))
        if isinstance(self.model, Decoder):
            self._profiler = Profiler(self.model)


def check_longest(config: EngineConfig, longest: int) -> None:
    """Raises SetupError for a --max-model-len over the model's own."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise SetupError(
            f"--max-model-len {config.max_model_len} is over the model's limit of {longest} tokens"
        )


def clamp_model_len(asked: int | None, longest: int, cache: CacheSize) -> int:
    """The length of the longest sequence. Raises SetupError if it was given and does not fit in the pool."""
    fits = cache.usable_tokens
    if asked is None:
        return min(longest, fits)
    if asked > fits:
        raise SetupError(
            f"--max-model-len {asked} needs {-(-asked // cache.block_size)} blocks, the pool has "
            f"{cache.num_blocks - 1} ({fits} tokens): lower it or raise --num-blocks or --kv-cache-memory"
        )
    return asked


def _profile_gpu(model: Model, config: EngineConfig) -> int:
    """Bytes for KV besides the weights and the activations of the largest step."""
    device = model.ops.device
    tokens = config.max_num_batched_tokens or 2048
    tokens = min(tokens, model.config.max_position_embeddings)
    blocks = -(-tokens // config.block_size) + 1
    small = plan_size(model.config, replace(config, num_blocks=blocks), model.ops.dtype)
    cache = allocate(small, device, model.ops.dtype)
    model.reach(tokens)
    row = _own_row([0] * tokens, range(1, blocks), draws=(0,))
    batch, _ = DeviceRows(1, blocks, config.block_size, device).apply(Plan(0, [row]))
    torch.cuda.reset_peak_memory_stats(device)
    model.forward(batch, cache)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - cache.nbytes
    del cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = gpu_kv_bytes(total, free, torch.cuda.memory_reserved(device), peak, config.gpu_memory_utilization)
    if left <= 0:
        raise SetupError(
            f"too little GPU memory: weights and activations take {size(peak)}, more than "
            f"{config.gpu_memory_utilization:.0%} of {size(total)}; raise --gpu-memory-utilization"
        )
    return left


def _own_row(
    token_ids: SequenceOf[int], table: SequenceOf[int], start: int = 0, draws: tuple[int, ...] = ()
) -> Row:
    """A row that belongs to no request: sequence -1, greedy."""
    new = NewSequence(SamplingParams(temperature=0.0), 0, len(token_ids), frozenset(), array("i"))
    tokens = array("i", token_ids)
    return Row(-1, start, len(tokens), tokens, draws, table=list(table), new=new)


@dataclass(slots=True)
class _Ticket:
    """A launched step. Times in seconds; t_sample: until sampling was queued.

    drawn: None if no row samples. likely: the results of `logprobs`, if a row asks. errors: row -> why it has no token.
    """

    plan: Plan
    t_prepare: float
    t_forward: float = 0.0
    t_sample: float = 0.0
    drawn: _ToHost | None = None
    logprobs: Logprobs | None = None
    likely: list[_ToHost] = field(default_factory=list)
    clock: _GpuClock | None = None
    slowed: bool = False
    errors: dict[int, str] = field(default_factory=dict)


class _ToHost:
    """A matrix that is copied to the host. The copy is queued after the work that makes the matrix. `read` waits for
    the copy, and not for later work."""

    def __init__(self, there: torch.Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = there
        if there.is_cuda:
            self._host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._host.copy_(there, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> list[list[Any]]:
        if self._done is not None:
            self._done.synchronize()
        rows: list[list[Any]] = self._host.tolist()
        return rows


class _GpuClock:
    """Seconds on the current stream from the constructor to `stop`. `read` waits, unless later work in the stream is
    already done."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def read(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000
