"""Streams of batches from the real core on a toy runner: rich, deterministic, complete.

`Storm` acts at random (admissions, hits, forks, preemptions, aborts, resets, failed steps, NaN) and can
be closed like an engine that stops; `rich_stream` is a fixed one in which every pool and request event occurs;
in `every_event` there are also those that a toy has no source for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, count
from typing import Any

from msgspec.structs import replace

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.params import SamplingParams
from engine.step.core import EngineCore
from tests.engine.rig import fork
from tests.toy_runner import ToyFault, ToyRunner

VOCAB = 60
LIKELY = (VOCAB, VOCAB + 1)
"""Likely tokens that are never drawn."""
LETTERS = [chr(97 + i % 26).encode() for i in range(VOCAB)]


def started(runner: ToyRunner, config: EngineConfig, hash_seed: int) -> ev.EngineStarted:
    """The EngineStarted of an engine over this runner."""
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
        knobs=ev.Knobs(
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            max_num_batched_tokens=config.max_num_batched_tokens,
            audit=config.audit,
        ),
    )


class Storm:
    """A small engine with random requests. With a small vocabulary it often finds drafts.

    ahead: steps are planned before the one in flight is finished, and there are no drafts. sink: is called with every
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
        """One random action, then a step."""
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
        """Finish all requests."""
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


def every_event(acts: int = 75, seed: int = 23, vocab: int = 6) -> list[ev.StepBatch]:
    """A complete stream in which every type of event occurs, several priorities, audited hits, some of them bad, and
    log probabilities."""
    storm = Storm(seed, num_blocks=24, block_size=4, vocab=vocab, audit=2, scheduling_policy="priority")
    storm.log.emit(ev.ModelLoading(2, 2, "weights"))
    pool, runner = storm.core._pool, storm.core.runner
    assert isinstance(runner, ToyRunner)
    for place in range(acts):
        if place % 5 == 4:
            storm.submit([i // 7 for i in range(18)], 5, "salt" if place % 2 else None, logprobs=2)
        if place % 40 == 30:  # a block that is found later does not hold what it should
            for b in range(1, pool.num_blocks):
                if pool.hash_of(b) is not None:
                    runner._kv[b, 0] = -9
        storm.act()
    storm.drain()
    return _with_more(storm.stop())


def _with_more(batches: list[ev.StepBatch]) -> list[ev.StepBatch]:
    """The same stream with TokenLogprobs, where they are asked for, and with events of a device."""
    asking: set[int] = set()
    sequences: dict[int, int] = {}
    out: list[ev.StepBatch] = []
    total = 0
    explained: set[int] = set()
    for batch in batches:
        events: list[Any] = []
        for e in batch.events:
            if isinstance(e, ev.RequestQueued):
                e = replace(e, conversation=e.request_id // 2)
            elif isinstance(e, ev.StepCompleted):
                e = replace(e, t_gpu=e.t_forward)
            events.append(e)
            if isinstance(e, ev.RequestQueued) and e.params["logprobs"] is not None:
                asking.add(e.request_id)
            elif isinstance(e, ev.RequestAdmitted):
                sequences[e.seq_id] = e.request_id
            elif isinstance(e, ev.SequenceForked):
                sequences[e.child] = e.request_id
            elif isinstance(e, ev.TokensSampled):
                drawn = iter(e.token_ids)
                rows = [
                    (i, next(drawn))
                    for i, count in zip(e.seq_ids, e.counts, strict=True)
                    for _ in range(count)
                ]
                rows = [(i, token) for i, token in rows if sequences[i] in asking]
                if rows:
                    reported = _logprobs(rows)
                    new = sorted(set(LIKELY).intersection(chain.from_iterable(reported.top_ids)) - explained)
                    explained.update(new)
                    if new:
                        events.append(ev.TokenPieces(new, [b"x"] * len(new)))
                    events.append(reported)
            elif isinstance(e, ev.StepCompleted) and batch.step % 20 == 1:
                events.append(ev.DeviceSample(50.0, 2**30, 2**34, 300.0, 60.0, 1e12))
                events.append(
                    ev.KernelsProfiled(4, 1, ["a", "b"], [1, 2], [0.1, 0.2], [8, 9], [7, 6], 0.4, 1e9, 1e12)
                )
                events.append(ev.GraphCaptured(8, 1, 0.5))
        out.append(replace(batch, first_event=total, events=events))
        total += len(events)
    return out


def _logprobs(rows: list[tuple[int, int]]) -> ev.TokenLogprobs:
    """In turns the likeliest token was drawn, and one that is not among the likeliest."""
    seq_ids, tokens = [i for i, _ in rows], [token for _, token in rows]
    drawn = [-0.5 if place % 2 == 0 else -4.0 for place in range(len(rows))]
    top = [[token, LIKELY[0]] if p == -0.5 else list(LIKELY) for token, p in zip(tokens, drawn, strict=True)]
    return ev.TokenLogprobs(seq_ids, tokens, drawn, top, [[-0.5, -2.0] for _ in rows])
