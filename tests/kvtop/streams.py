"""Streams of batches from the real core on a toy runner: rich, deterministic, complete.

`Storm` acts at random (admissions, hits, forks, preemptions, aborts, resets, failed steps, NaN) and can
be closed like an engine that stops; `rich_stream` is a fixed one in which every kind of event occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.params import SamplingParams
from engine.step.core import EngineCore
from tests.engine.rig import fork
from tests.toy_runner import ToyFault, ToyRunner

VOCAB = 60
LETTERS = [chr(97 + i % 26).encode() for i in range(VOCAB)]


def started(runner: ToyRunner, config: EngineConfig, hash_seed: int) -> ev.EngineStarted:
    """What an engine over this runner says first."""
    return ev.EngineStarted(
        schema=ev.SCHEMA,
        source="live",
        capabilities=["blocks", "text", "timings"],
        model="toy",
        device="cpu",
        dtype="int32",
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        bytes_per_block=runner.bytes_per_block,
        weights_bytes=0,
        hash_seed=hash_seed,
        epoch=1.7e9,
        max_model_len=runner.max_model_len,
        knobs={
            "enable_prefix_caching": config.enable_prefix_caching,
            "scheduling_policy": config.scheduling_policy,
        },
    )


class Storm:
    """One random life of a small engine; over few tokens drafts are often found.

    ahead: steps are planned before the one in flight is finished, and there are no drafts. sink gets every
    batch; `batches` keeps them.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int | None = None,
        block_size: int | None = None,
        vocab: int = VOCAB,
        sink: Callable[[ev.StepBatch], None] = lambda batch: None,
        ahead: int = 0,
        **knobs: Any,
    ) -> None:
        r = self.random = random.Random(seed)
        self.vocab = vocab
        self.batches: list[ev.StepBatch] = []
        self._sink = sink
        self._fail = ""
        self._nan: set[int] = set()
        runner = ToyRunner(
            num_blocks or r.randint(6, 40),
            block_size or r.choice([1, 2, 4, 8]),
            vocab,
            fault=self._fault,
            bad=lambda s: s in self._nan,
            ahead=ahead,
        )
        seqs = r.randint(2, 6)
        config = EngineConfig(
            max_num_batched_tokens=r.randint(3 * seqs + 1, 40),
            speculate=0 if ahead else 2,
            max_num_seqs=seqs,
            enable_prefix_caching=r.random() < 0.95,
            **knobs,
        )
        ticks = count(1)
        self.log = EventLog(lambda: next(ticks) * 1e-3, self._take)
        self.log.emit(ev.ModelLoading(1, 2, "weights"))
        self.log.cut()
        self.log.emit(started(runner, config, seed))
        self.log.cut()
        self.core = EngineCore(
            config, runner, self.log, hash_seed=seed, token_bytes=LETTERS.__getitem__, eos_ids=(3,)
        )
        self._ids = count(1)

    def _fault(self, step: int, when: str) -> None:
        if self._fail == when:
            self._fail = ""
            raise ToyFault(f"{when} the writes of step {step}")

    def _take(self, batch: ev.StepBatch) -> None:
        self.batches.append(batch)
        self._sink(batch)

    def submit(self, prompt: list[int], max_tokens: int = 8, salt: str | None = None, **more: Any) -> int:
        """A greedy request; more: of its SamplingParams."""
        rid = next(self._ids)
        self.core.add_request(
            rid,
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0, **more),
            salt=salt,
            priority=rid % 4,
            spans=[(0, len(prompt), "user", "")],
        )
        return rid

    def act(self) -> None:
        """One random thing, then a step."""
        r, core = self.random, self.core
        op = r.choices("afergnxi", [8, 2, 1, 0.4, 2, 0.5, 20, 1])[0]
        running = [s for q in core.scheduler.running for s in q.live]
        if op == "a" and len(core.requests) < 8:
            size = core.paging.block_size
            length = min(r.randint(1, 6 * size), core.runner.max_model_len + 1)
            family = r.randint(0, 2)
            prompt = [(family + i // 7) % self.vocab for i in range(length)]
            if r.random() < 0.5:
                prompt[-1] = r.randrange(self.vocab)
            n, beams = r.choice([(1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (1, 3)])
            self.submit(
                prompt, r.randint(1, 3 * size + 4), r.choice([None, None, None, "a"]), n=n, beam_width=beams
            )
        elif op == "f" and running:
            fork(core, r.choice(running))
        elif op == "e" and core.requests:
            core.abort(r.choice(list(core.requests)))
        elif op == "r":
            core.reset_prefix_cache(reset_running=r.random() < 0.5)
        elif op == "g":
            self._fail = r.choice(["before", "after"])
        elif op == "n" and running:
            self._nan.add(r.choice(running).seq_id)
        elif op == "i":
            core.settle()
            plan = core.begin()
            if plan:
                self._fail = ""
                output = core.runner.execute(plan)
                core.abort(r.choice(core.flights[-1].seqs).request.request_id)
                core.finish(plan, output)
        core.step()
        if r.random() < 0.05:
            core.snapshot()

    def drain(self) -> None:
        """Finish all that is left."""
        self._fail = ""
        while self.core.has_work:
            self.core.step()
        self.core.flush()

    def stop(self) -> list[ev.StepBatch]:
        """As Engine.stop: a closing snapshot, then EngineStopped. Returns the whole stream."""
        self.core.snapshot()
        self.log.cut(ev.EngineStopped())
        return self.batches


def rich_stream(acts: int = 220, seed: int = 5, ahead: int = 0) -> list[ev.StepBatch]:
    """A complete stream in which every pool event and every request event occurs."""
    storm = Storm(seed, num_blocks=24, block_size=4, ahead=ahead)
    for _ in range(acts):
        storm.act()
    storm.drain()
    return storm.stop()
