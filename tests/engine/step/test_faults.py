"""Faults under a real model: whatever fails, its request ends with a reason, the engine goes on, no block is
lost, and what stays findable is what its tokens give (every hit is computed again)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.model.kv_cache import TOLERANCE, distance
from engine.model.torch_runner import TorchRunner
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.sequence import Request
from tests.engine.mirror import Mirror
from tests.engine.rig import Rig, prompt
from tests.engine.tiny import QWEN3, random_weights

WEIGHTS = random_weights(QWEN3, 1)


class Life:
    """A core over a TorchRunner with a tiny model; every batch is replayed and compared."""

    def __init__(self, **knobs: Any) -> None:
        knobs = {
            "dtype": "float64",
            "ops": "reference",
            "num_blocks": 25,
            "block_size": 4,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 4,
            "audit": 1,
        } | knobs
        config = EngineConfig(device="cpu", threads=1, **knobs)
        self.runner = TorchRunner.from_weights(QWEN3, dict(WEIGHTS), config)
        self.mirror = Mirror(self.runner.num_blocks, self.runner.block_size)
        self.events: list[Any] = []
        ticks = count()
        log = EventLog(lambda: next(ticks) * 1e-3, self._take)
        self.core = EngineCore(config, self.runner, log, hash_seed=3)
        self._ids = count()

    def _take(self, batch: ev.StepBatch) -> None:
        self.mirror.apply(batch)
        self.events += batch.events

    def add(self, tokens: Sequence[int], max_tokens: int = 6) -> Request:
        return self.core.add_request(
            next(self._ids), tokens, SamplingParams(max_tokens=max_tokens, temperature=0)
        )

    def step(self) -> None:
        self.core.step()
        self.core.check()
        self.core.flush()
        self.mirror.compare(self.core.pool_snapshot())

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.core.paging.pool.num_active == 0

    def answer(self, tokens: Sequence[int], max_tokens: int = 6) -> list[int]:
        request = self.add(tokens, max_tokens)
        self.run()
        assert request.finish_reason == "length", request.error
        return list(request.branches[0].output_ids)

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def words(length: int, family: int = 0) -> list[int]:
    return [(family * 37 + 5 * i + i * i) % 199 for i in range(length)]


def fails_with(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """Raises from its `after`-th call on, once."""
    left = [after]

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise error
            return real(*args, **kwargs)

        return call

    return wrapped


ERRORS = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "no memory": MemoryError(),
    "a kernel": RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …"),
    "a shape": IndexError("index 5 is out of bounds"),
}


@pytest.mark.conformance(111)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("depth", [0, 1])
def test_an_exception_in_the_middle_of_a_forward_ends_its_requests_and_nothing_else(
    error: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """depth: layers whose KV was written before it."""
    life = Life()
    cold = life.answer(words(15))
    waiting = [life.add(words(30, f)) for f in (1, 2)]
    late = life.add(words(19, 3))
    ops = life.runner.model.ops
    with monkeypatch.context() as m:
        m.setattr(ops, "attention_block", fails_with(ERRORS[error], depth)(ops.attention_block))
        life.step()
    dead = [r for r in waiting if r.finish_reason == "error"]
    assert dead and all(type(ERRORS[error]).__name__ in (r.error or "") and "\n" not in r.error for r in dead)  # type: ignore[operator]
    life.run()
    assert late.finish_reason == "length" and life.answer(words(15)) == cold
    fresh = Life(audit=0, enable_prefix_caching=False)
    for r in dead:
        assert life.answer(r.prompt_token_ids) == fresh.answer(r.prompt_token_ids)
    assert life.of(ev.HitAudited) and not any(e.bad for e in life.of(ev.HitAudited))


@pytest.mark.conformance(111)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_nan_ends_its_request_and_never_reaches_who_gets_its_blocks(ops: str) -> None:
    dtype = "float64" if ops == "reference" else "bfloat16"
    life = Life(num_blocks=12, ops=ops, dtype=dtype, audit=1)
    cold = life.answer(words(15))
    sick = life.add(words(20, 1), 12)
    life.step()
    with torch.inference_mode():
        life.runner.cache[1, 1, sick.branches[0].table[2], :, 1] = float("nan")
    life.run()
    assert sick.finish_reason == "error" and "NaN" in (sick.error or "")
    for f in range(2, 6):  # all of the pool is used again
        life.answer(words(30, f), 8)
    assert life.answer(words(15)) == cold
    assert not any(e.bad for e in life.of(ev.HitAudited))


@pytest.mark.conformance(111)
def test_a_block_that_went_bad_in_the_cache_ends_one_reader_not_all_of_them() -> None:
    life = Life(audit=0)
    cold = life.answer(words(20))
    block = life.of(ev.BlocksStored)[0].ids[1]
    with torch.inference_mode():
        life.runner.cache[0, 0, block, :, 2] = float("nan")
    reader = life.add(words(20), 3)
    life.run()
    assert reader.finish_reason == "error"
    assert life.answer(words(20)) == cold


@pytest.mark.conformance(84, 107, 111)
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_faults_loses_no_block_and_leaves_no_wrong_hash(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions in any call, NaN anywhere in what is held, aborts: survivors say what they say alone."""
    r = random.Random(seed)
    life, alone = Life(long_prefill_token_threshold=9), Life(audit=0, enable_prefix_caching=False)
    ops, real = life.runner.model.ops, life.runner.model.ops.attention_block
    requests: list[Request] = []
    for _ in range(120):
        if len(life.core.requests) < 5:
            requests.append(life.add(words(r.randint(1, 40), r.randint(0, 2)), r.randint(1, 12)))
        what = r.random()
        if what < 0.1:
            monkeypatch.setattr(ops, "attention_block", fails_with(RuntimeError("x"), r.randint(0, 3))(real))
        elif what < 0.2:
            life.core.abort(r.choice(list(life.core.requests)))
        elif what < 0.25:
            held = [b for q in life.core.scheduler.running for s in q.branches for b in s.table]
            if held:
                with torch.inference_mode():
                    life.runner.cache[r.randint(0, 1), 1, r.choice(held)] = float("nan")
        life.step()
    monkeypatch.setattr(ops, "attention_block", real)
    life.run()
    reasons = {q.finish_reason for q in requests}
    assert reasons == {"length", "error", "abort"}
    for q in requests:
        if q.finish_reason == "length":
            want = alone.answer(q.prompt_token_ids, q.params.max_tokens)
            assert list(q.branches[0].output_ids) == want
    for family in range(3):  # what is still findable is right, or proves wrong and is gone the next time
        life.add(words(40, family))
        life.run()
        assert life.answer(words(40, family)) == alone.answer(words(40, family))


# ------------------------------------------------------------------------------------------- --audit


@pytest.mark.parametrize(
    ("dtype", "ops", "kv"),
    [("float64", "reference", "auto"), ("float32", "reference", "auto"), ("bfloat16", "cpu", "auto")]
    + [("float32", "reference", "fp8")],
)
def test_every_hit_is_proved_in_every_dtype(dtype: str, ops: str, kv: str) -> None:
    life = Life(dtype=dtype, ops=ops, kv_cache_dtype=kv, num_blocks=80, max_num_batched_tokens=13)
    for f in (0, 1, 0, 1, 0):
        request = life.add(words(40 + f, f), 4)
        life.add(words(23, f), 4)
        life.run()
    audited = life.of(ev.HitAudited)
    assert len(audited) >= 6 and sum(len(e.blocks) for e in audited) > 30 and not any(e.bad for e in audited)
    assert all(0 <= e.error <= e.tolerance / 3 for e in audited), max(e.error for e in audited)
    assert request.finish_reason == "length" and not life.of(ev.EngineError)


@pytest.mark.parametrize("where", [(0, 0), (1, 1)])
@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "auto"), ("float32", "fp8"), ("float32", "auto")])
def test_one_wrong_token_in_one_head_is_found_dropped_and_ends_its_readers(
    where: tuple[int, int], dtype: str, kv: str
) -> None:
    life = Life(dtype=dtype, kv_cache_dtype=kv, num_blocks=80)
    life.answer(words(40))
    cold = next(e for e in life.of(ev.BlocksStored) if e.start_index == 0)
    block = cold.ids[2]
    reader = life.add(words(40), 30)
    life.step()
    with torch.inference_mode():
        cache = life.runner.cache
        values = cache.data if kv == "fp8" else cache
        values[(*where, block, 1, 3)] = values[(*where, block, 0, 1)]
    life.run() if reader.finish_reason else life.step()
    other = life.add(words(40), 3)
    life.step()
    (bad,) = [e for e in life.of(ev.HitAudited) if e.bad]
    assert bad.bad == [block] and bad.error > bad.tolerance and bad.request_id == other.request_id
    assert [q.finish_reason for q in (reader, other)] == ["error", "error"]
    assert "cached blocks do not hold what their tokens give" in (other.error or "")
    assert life.of(ev.BlocksEvicted)[0].why == "invalid"
    life.run()
    life.answer(words(40))
    assert sum(bool(e.bad) for e in life.of(ev.HitAudited)) == 1


def test_one_of_n_hits_is_computed_again() -> None:
    rig = Rig(audit=3)
    for _ in range(8):
        rig.add(prompt(40), 1)
        rig.run()
    assert [e.request_id for e in rig.events(ev.HitAudited)] == [3, 6]
    assert not Rig(audit=0).core._auditor._every


def test_blocks_of_the_same_step_are_compared_once_they_are_written() -> None:
    rig = Rig(audit=1)
    first, second = rig.add(prompt(50), 2), rig.add(prompt(50), 2)
    rig.step()
    (proved,) = rig.events(ev.HitAudited)
    assert (proved.request_id, proved.bad, len(proved.blocks)) == (second.request_id, [], 3)
    third = rig.add(prompt(50), 2)
    plan = rig.core.begin()
    assert plan is not None
    rig.core.finish(plan, None)  # the step did not run: what it hit is older and sound
    assert rig.events(ev.HitAudited)[-1].request_id == third.request_id
    assert first.finish_reason == second.finish_reason == "error"


def test_an_audit_that_cannot_run_says_so_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(audit=1)
    rig.add(prompt(40), 1)
    rig.run()
    monkeypatch.setattr(rig.runner, "audit", fails_with(MemoryError("no room"))(rig.runner.audit))
    request = rig.add(prompt(40), 2)
    rig.run()
    (error,) = rig.events(ev.EngineError)
    assert error.message == "an audit could not run: MemoryError: no room"
    assert rig.answer(request) == rig.truth(request, 2)


def test_distance_sees_a_value_that_is_not_finite() -> None:
    a, b = torch.randn(2, 2, 4, 2, 3, 8), torch.randn(2, 2, 4, 2, 3, 8)
    b[:, :, 1:3] = a[:, :, 2:]
    assert distance(a, [2, 3], b, [1, 2]) == [0.0, 0.0]
    a[1, 0, 3, 1, 2, 7] = float("nan")
    good, bad = distance(a, [2, 3], b, [1, 2])
    assert good == 0 and not bad <= max(TOLERANCE.values())
