"""SimulatedRunner: an engine for any model on any GPU, without weights and without the GPU.

Owns what replaces the model: tokens that are a pure function of (seed, branch, position), steps whose time on a virtual
clock comes from engine.sim.cost, and samples of a device that is busy for that time. Scheduler, pool, paging and events
are those of the live engine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine import sizing
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import SetupError
from engine.events import DeviceSample
from engine.files.model_files import Progress
from engine.loaded import Built
from engine.sim import hardware
from engine.sim.cost import Cost, Work
from engine.sim.synthetic import Language, SyntheticTokenizer
from engine.sizing.kv_shape import KvShape
from engine.step.runner import Logprob, NewSequence, Plan, Recomputed, Row, StepOutput

VOCABULARY = 1 << 17
SHORTEST, SPREAD = 24, 200
"""Tokens of an answer that may end by itself: the least, and how many more at most. It ends at the end of a
sentence."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What to simulate. `Engine(config, build=simulation.build)` runs it.

    model: a name from `kvtop size list`, a config.json or its folder, or a hub id (only its config.json is downloaded).
    machine: the name of a GPU, or `4xh100`. weights: a name in sizing.BITS; None: as published. speed: virtual seconds
    per second; None: as fast as possible.
    """

    model: str
    machine: str
    weights: str | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "float32"] = "auto"
    speed: float | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in sizing.BITS:
            raise SetupError(f"--weights {self.weights:.20}: one of {', '.join(sizing.BITS)}")
        if self.speed is not None and not 0 < self.speed <= 1e6:
            raise SetupError(f"--speed must be over 0 and at most a million, not {self.speed}")

    def build(self, config: EngineConfig, progress: Progress) -> Built:
        """The parts of an engine. Raises SetupError if the model is not known or does not fit."""
        machine = hardware.find(self.machine)
        name, raw = sizing.load(self.model, revision=config.revision, progress=progress)
        weights = self.weights or sizing.published_format(raw)
        if weights is None:
            raise SetupError(
                f"{name:.60} is published in a format of its own: say --weights int4, int8, fp8 or bf16"
            )
        value_bytes = sizing.KV_DTYPES[self.kv_cache_dtype]
        work = Work.of(raw)
        counted = sizing.count_parameters(raw)
        assert counted is not None, "Work has counted them too"
        weights_bytes = -(-counted.total * sizing.BITS[weights] // 8)
        kv = sizing.Sizing(work.shape, value_bytes, config.block_size)
        num_blocks = _num_blocks(
            config, machine, work.shape, weights_bytes, kv.bytes_per_block, name, weights
        )
        clock = VirtualClock(self.speed)
        tokenizer = SyntheticTokenizer(VOCABULARY)
        runner = SimulatedRunner(
            Cost(work, machine, weights, value_bytes),
            clock,
            Language.of(tokenizer, VOCABULARY),
            num_blocks=num_blocks,
            block_size=config.block_size,
            bytes_per_block=kv.bytes_per_block,
            weights_bytes=weights_bytes,
            max_model_len=_max_model_len(config, work.shape.max_position, num_blocks),
            model_name=name,
        )
        usable = (num_blocks - 1) * config.block_size
        return Built(
            runner,
            tokenizer,
            eos_ids=tuple(tokenizer.eos_ids),
            knobs={
                "machine": machine.label,
                "weights": weights,
                "kv_cache_dtype": {1: "fp8", 2: "bfloat16", 4: "float32"}[value_bytes],
                "speed": self.speed,
                "kv_cache": f"{kv.bytes_per_token:,} bytes a token, x {config.block_size} = "
                f"{kv.bytes_per_block / 1024:,.0f} KiB a block, x {num_blocks:,} blocks = "
                f"{_memory(num_blocks * kv.bytes_per_block)}, {usable:,} tokens",
            },
            source="simulated",
            clock=clock,
            sample=runner.sample,
        )


def _memory(n: int) -> str:
    return f"{n / (1 << 30):.1f} GiB" if n >= 1 << 30 else f"{n / (1 << 20):.3g} MiB"


def _num_blocks(
    config: EngineConfig,
    machine: hardware.Machine,
    shape: KvShape,
    weights_bytes: int,
    bytes_per_block: int,
    name: str,
    weights: str,
) -> int:
    """Blocks that fit with the weights into gpu_memory_utilization of the memory. The rest is for activations, CUDA
    graphs and libraries, as in vLLM."""
    # with more GPUs than KV heads some GPUs hold the same blocks
    copies = machine.count / min(machine.count, shape.kv_heads)
    room = int(machine.memory * config.gpu_memory_utilization) - weights_bytes
    asked = config.num_blocks or (config.kv_cache_memory and int(config.kv_cache_memory // bytes_per_block))
    fits = int(room / copies) // bytes_per_block
    if fits >= 2 and (asked is None or 2 <= asked <= fits):
        return asked or fits
    gb = f"{weights_bytes / 1e9:,.0f} GB of {weights} weights"
    if room < 2 * bytes_per_block:
        raise SetupError(
            f"{name:.40} does not fit on {machine.label}: {gb}, {machine.memory / 1e9:,.0f} GB x "
            f"{config.gpu_memory_utilization:g}; try --weights int4 or --on {2 * machine.count}x{machine.gpu.name}"
        )
    raise SetupError(
        f"{asked:,} blocks are not possible on {machine.label}: 2 to {fits:,} fit with {gb}; change --num-blocks "
        "or --kv-cache-memory"
    )


def _max_model_len(config: EngineConfig, longest: int | None, num_blocks: int) -> int:
    room = (num_blocks - 1) * config.block_size
    asked = config.max_model_len
    limit = min(longest or room, room)
    if asked is not None and asked > limit:
        why = "the model's limit" if limit == longest else f"what {num_blocks - 1:,} blocks hold"
        raise SetupError(f"--max-model-len {asked:,} is over {why}: {limit:,} tokens")
    return asked or limit


class SimulatedRunner:
    """A ModelRunner that computes nothing, but takes as much time as the model would."""

    def __init__(
        self,
        cost: Cost,
        clock: VirtualClock,
        language: Language,
        *,
        num_blocks: int,
        block_size: int,
        bytes_per_block: int,
        weights_bytes: int,
        max_model_len: int,
        model_name: str,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block
        self.weights_bytes = weights_bytes
        self.vocab_size = VOCABULARY
        self.max_model_len = max_model_len
        self.model_name = model_name
        self.device = cost.machine.label
        self.dtype = cost.weights
        self._cost, self._clock, self._language = cost, clock, language
        self._busy = self._moved = 0.0
        self._sampled_at = clock.now()
        self._known: dict[int, NewSequence] = {}
        """NewSequence of each sequence that is not retired."""

    def audit(self, token_ids: Sequence[int], blocks: list[int]) -> Recomputed:
        """There is no KV to compare."""
        return Recomputed([], 0.0)

    def step_budget(self, max_num_batched_tokens: int, context: int) -> int:
        """The whole budget, as on a GPU."""
        return max_num_batched_tokens

    def execute(self, plan: Plan) -> StepOutput:
        """Let the time of the step pass."""
        rows = plan.rows
        for seq_id in plan.retired:
            self._known.pop(seq_id, None)
        self._known |= {row.seq_id: row.new for row in rows if row.new is not None}
        time = self._cost.step([(r.start, r.n) for r in rows], sum(len(r.draws) for r in rows))
        token_ids = [
            [self._next(row, b, max(0, row.drafts - k)) for k, b in enumerate(row.draws)] for row in rows
        ]
        logprobs = {i: [self._beam(row)] for i, row in enumerate(rows) if row.top}
        self._busy += time.gpu
        self._moved += time.moved
        self._clock.advance(time.total)
        return StepOutput(
            token_ids,
            t_prepare=time.host,
            t_forward=time.forward,
            t_sample=time.sample,
            t_gpu=time.gpu,
            logprobs=logprobs,
        )

    def sample(self) -> DeviceSample:
        """The device since the last call. util: share of time in which a kernel ran. bandwidth: that of one GPU."""
        now = self._clock.now()
        passed, self._sampled_at = now - self._sampled_at, now
        busy, moved, self._busy, self._moved = self._busy, self._moved, 0.0, 0.0
        known: dict[str, Any] = {}
        if passed > 0:
            known = {"util": min(100.0, 100 * busy / passed), "bandwidth": moved / passed}
        machine, shape = self._cost.machine, self._cost.work.shape
        copies = machine.count / min(machine.count, shape.kv_heads)
        kv = int(self.num_blocks * self.bytes_per_block * copies)
        return DeviceSample(memory=self.weights_bytes + kv, memory_total=machine.memory, **known)

    def _beam(self, row: Row) -> Logprob:
        """Continuations whose log probabilities fall in equal steps: one beam leads, the others stay close to it."""
        own = self._known[row.seq_id].branch
        tokens = dict.fromkeys(self._next(row, own + i) for i in range(4 * row.top))
        ids = list(tokens)[: row.top]
        return Logprob(0.0, ids, [-0.5 - 0.1 * i for i in range(len(ids))])

    def _next(self, row: Row, branch: int, behind: int = 0) -> int:
        known = self._known[row.seq_id]
        at = row.start + row.n - behind - known.prompt_tokens
        seed = (known.params.seed or 0) + (branch << 40)
        if known.eos_token_ids and at >= SHORTEST + seed % SPREAD and at % self._language.sentence == 0:
            return 0
        return self._language.token(seed, at)
