"""Storms on the ToyRunner: the event law, the pool's invariants and the KV data after every step."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from itertools import count

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.events import RequestFinished, StepBatch
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.sequence import Request
from tests.engine.mirror import Mirror
from tests.engine.rig import best_beam, fork, prune
from tests.toy_runner import ToyFault, ToyRunner, next_token

EVENTS = (
    ("bf03b81f2ea3cd2c", "52fbcb764b8b3aa3", "8cb2276712b0aac9", "9900a9f329cf3a63"),
    ("18e5c459dc797acf", "5656d47519a9fb37", "f9767032778999a1", "1bc7cd314b90d463"),
)
"""By steps ahead, then by seed: the digest of the events of 300 acts."""


def history_is_right(tokens: list[int], prompt: int, branches: list[tuple[int, int]], vocab: int) -> bool:
    """Every sampled token is the toy language's; branches: (from position, branch number)."""
    for at in range(prompt, len(tokens)):
        branch = [b for start, b in branches if at >= start][-1]
        if next_token(np.array(tokens[:at]), np.arange(at), branch, vocab) != tokens[at]:
            return False
    return True


class Storm:
    """Random requests, forks, aborts, resets, faults over one tiny engine; checks everything each step.

    ahead: steps are planned before the tokens of the one in flight are known, and computed as late as may be
    or at once. make: a ToyRunner, or something that behaves like one."""

    def __init__(
        self,
        seed: int,
        num_blocks: int | None = None,
        block_size: int | None = None,
        *,
        ahead: int = 0,
        make: Callable[..., ToyRunner] = ToyRunner,
    ) -> None:
        r = self.random = random.Random(seed)
        knobs = self.knobs = random.Random(-seed - 1)
        self.block_size = block_size or r.choice([1, 2, 4, 16])
        self.num_blocks = num_blocks or r.randint(6, 40)
        self.fail: str | None = None
        self.nan: set[int] = set()
        self.vocab = r.choice([2, 50])
        runner = make(
            self.num_blocks,
            self.block_size,
            self.vocab,
            fault=self._fault,
            bad=lambda s: s in self.nan,
            ahead=ahead,
            late=seed % 2 == 0,
        )
        seqs = r.randint(1, 6)
        chunked = r.random() < 0.8
        drafts = r.choice([0, 0, 3]) if not ahead or seed % 4 == 3 else 0
        budget = (
            r.randint(seqs * (1 + drafts) + 1, 40) if chunked else runner.max_model_len + seqs * (1 + drafts)
        )
        config = EngineConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            speculate=drafts,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=r.random() < 0.9,
            long_prefill_token_threshold=r.choice([0, 0, 5]),
            long_prefill_token_threshold_adaptive=knobs.random() < 0.3,
            scheduling_policy=knobs.choice(["fcfs", "priority"]),
            watermark=knobs.choice([0.0, 0.0, 0.25]),
        )
        self.mirror = Mirror(self.num_blocks, self.block_size)
        self.batches: list[StepBatch] = []
        ticks = count()
        self.core = EngineCore(
            config, runner, EventLog(lambda: next(ticks) * 1e-3, self._take), hash_seed=seed
        )
        self.ids = count()
        self.finished: dict[int, RequestFinished] = {}
        self.branch_points: dict[int, list[tuple[int, int]]] = {}
        self.requests: dict[int, Request] = {}
        self.kinds: set[str] = set()
        self.none_finished = 0
        """Steps after which one was in flight and none was finished."""

    def _fault(self, step: int, when: str) -> None:
        if self.fail == when:
            self.fail = None
            raise ToyFault(f"{when} the writes of step {step}")

    def _take(self, batch: StepBatch) -> None:
        self.batches.append(batch)
        self.mirror.apply(batch)
        for e in batch.events:
            self.kinds.add(type(e).__name__ + (f":{e.why}" if hasattr(e, "why") else ""))
            if isinstance(e, RequestFinished):
                assert e.request_id not in self.finished
                self.finished[e.request_id] = e

    def add(self) -> None:
        r = self.random
        length = r.randint(1, self.core.runner.max_model_len + 1)
        family = r.randint(0, 2)  # shared prefixes: the same tokens from the start
        prompt = [(family + i // 7) % self.vocab for i in range(length)]
        if r.random() < 0.5:
            prompt[-1] = r.randrange(self.vocab)
        n, beams = r.choice([(1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4)])
        params = SamplingParams(
            max_tokens=r.randint(1, 3 * self.block_size + 4),
            temperature=0,
            n=n,
            beam_width=beams,
            stop_token_ids=(1,) if beams == 4 else (),
        )
        salt = r.choice([None, None, None, "a"])
        request = self.core.add_request(
            next(self.ids), prompt, params, salt=salt, priority=self.knobs.randint(-3, 4)
        )
        self.requests[request.request_id] = request
        for s in request.branches:
            self.branch_points[s.seq_id] = [(0, 0)]

    def fork(self) -> None:
        if self.random.random() < 0.7:
            self.core.settle()
            self.check()
        running = [s for q in self.core.scheduler.running for s in q.live]
        if running:
            parent = self.random.choice(running)
            child = fork(self.core, parent)
            if child:
                points = self.branch_points[parent.seq_id]
                self.branch_points[child.seq_id] = [*points, (len(parent), child.branch)]

    def act(self) -> None:
        r, core = self.random, self.core
        op = r.choices("aferbgNxis", [8, 2, 1, 0.3, 1, 1, 0.5, 20, 1, 0.5])[0]
        if op == "a" and len(core.requests) < 8:
            self.add()
        elif op == "f":
            self.fork()
        elif op == "e" and core.requests:
            core.abort(r.choice(list(core.requests)))
        elif op == "r":
            core.reset_prefix_cache(reset_running=r.random() < 0.5)
        elif op in "bg":
            self.fail = "before" if op == "b" else "after"
        elif op == "N" and core.scheduler.running:
            self.nan.add(r.choice([s.seq_id for q in core.scheduler.running for s in q.live]))
        elif op == "i":  # abort or preempt between begin and finish, before the forward or after it
            core.settle()
            self.check()
            plan = core.begin()
            if plan:
                self.fail = None
                victim = r.choice(core.flights[-1].seqs).request
                early = r.random() < 0.5
                output = None if early else core.runner.execute(plan)
                if r.random() < 0.5:
                    core.abort(victim.request_id)
                else:
                    core.scheduler.preempt(victim, core.flights)
                if early:
                    prune(core, plan)
                core.finish(plan, output or core.runner.execute(plan))
        elif op == "s":
            core.one_at_a_time = r.random() < 0.3
        if core.step() is None and core.has_work:
            self.none_finished += 1
        self.check()

    def check(self) -> None:
        for q in self.core.scheduler.running:  # samples part by themselves, at the prompt's first token
            for s in q.branches:
                self.branch_points.setdefault(s.seq_id, [(0, 0), (q.prompt_tokens, s.branch)])
        self.core.check()
        self.core.flush()
        self.mirror.compare(self.core.pool_snapshot())

    def drain(self) -> None:
        self.fail = None
        for _ in range(20_000):
            if not self.core.has_work:
                break
            assert self.core.step() or self.core.flights, "work left but nothing could run"
        self.check()
        assert not self.core.has_work, "the engine never came to an end"
        assert self.core._pool.num_active == 0

    def judge_beams(self, request: Request, done: RequestFinished) -> None:
        if done.reason not in ("length", "stop"):
            return
        p, prompt = request.params, list(request.prompt_token_ids)
        most = min(p.max_tokens, self.core.runner.max_model_len - len(prompt))
        tokens, _ = best_beam(prompt, p.beam_width, most, self.vocab, ends=frozenset(p.stop_token_ids))
        assert list(request.branches[0].output_ids) == tokens and len(request.branches) == 1

    def judge(self) -> None:
        assert set(self.finished) == set(self.requests)
        for rid, request in self.requests.items():
            done, prompt = self.finished[rid], request.prompt_tokens
            if done.reason == "refused":
                assert (
                    prompt >= self.core.runner.max_model_len
                    or max(request.params.n, request.params.beam_width) > 1
                )
                continue
            if request.search is not None:
                self.judge_beams(request, done)
                continue
            if done.reason in ("length", "stop"):
                assert len(request.branches) >= request.params.n
            for s in request.branches:
                if s.seq_id not in self.branch_points:  # parted and ended in one step
                    self.branch_points[s.seq_id] = [(0, 0), (prompt, s.branch)]
                tokens = s.tokens.tolist()
                assert history_is_right(tokens, prompt, self.branch_points[s.seq_id], self.vocab), (
                    rid,
                    s.seq_id,
                )
            if done.reason == "length":
                want = min(prompt + request.params.max_tokens, self.core.runner.max_model_len)
                assert all(len(s) == want for s in request.branches)


@pytest.mark.conformance(78, 99, 101, 107, 110, 111)
@pytest.mark.parametrize("seed", range(40))
def test_event_law_invariants_and_kv_data_hold_in_a_storm(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(1500):
        storm.act()
    storm.drain()
    storm.judge()


@pytest.mark.conformance(84, 86, 87)
@pytest.mark.parametrize("seed", range(40))
def test_all_of_it_holds_where_steps_are_planned_ahead(seed: int) -> None:
    storm = Storm(seed, ahead=1)
    for _ in range(1500):
        storm.act()
    storm.drain()
    storm.judge()
    assert storm.none_finished > 20


def digest(storm: Storm) -> str:
    """Of all events and the steps and batches that they are in; without the fields that came later."""
    sha = hashlib.sha256()
    for batch in storm.batches:
        for event in batch.events:
            fields = msgspec.to_builtins(event)
            fields.pop("position", None)
            sha.update(json.dumps([batch.seq, batch.step, fields]).encode())
    return sha.hexdigest()[:16]


@pytest.mark.parametrize(("seed", "ahead"), [(s, a) for s in range(4) for a in (0, 1)])
def test_the_same_storm_gives_the_same_events_for_ever(seed: int, ahead: int) -> None:
    """What a scheduler decides is part of the product: a change of these numbers is one for the changelog."""
    storm = Storm(seed, ahead=ahead)
    for _ in range(300):
        storm.act()
    storm.drain()
    assert digest(storm) == EVENTS[ahead][seed]


@pytest.mark.conformance(78, 106)
def test_20000_steps_in_a_tiny_pool_deadlock_nobody_and_starve_nobody() -> None:
    storm = Storm(78, num_blocks=6, block_size=2)
    for _ in range(20_000):
        storm.act()
    storm.drain()
    storm.judge()
    reasons = [f.reason for f in storm.finished.values()]
    assert reasons.count("length") > 500 and "RequestPreempted" in storm.kinds


def test_the_storms_reach_every_kind_of_pool_event() -> None:
    kinds: set[str] = set()
    for seed in range(100, 112):
        storm = Storm(seed)
        for _ in range(1500):
            storm.act()
        storm.drain()
        storm.judge()
        kinds |= storm.kinds
    assert {
        "BlocksAllocated", "BlocksTouched:hit", "BlocksTouched:fork", "BlocksCopied", "BlocksReleased",
        "BlocksStored", "BlocksEvicted:reallocated", "BlocksEvicted:unwritten", "BlocksEvicted:invalid",
        "CacheCleared", "RequestPreempted", "AdmissionBlocked", "SequenceForked", "BeamPruned", "DraftVerified",
    } <= kinds  # fmt: skip
