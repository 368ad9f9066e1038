"""What the tests of pool, policy and core use: sequences over bare paging, and a core over a ToyRunner.

Both hold the invariants after every move: `Books` asks the pool, `Rig` also replays every batch through
the Mirror, compares it with the pool's own word and keeps all events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_128_digest

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.events import Event, PoolSnapshot, RequestFinished, StepBatch, StepScheduled, Usage
from engine.kv.blocks import BlockPool
from engine.kv.hashing import salt_digest
from engine.kv.paging import Paging
from engine.params import SamplingParams
from engine.step.beam import BeamSearch
from engine.step.core import EngineCore
from engine.step.flight import Flight, Flights, row_of
from engine.step.runner import Plan, Row
from engine.step.sequence import Request, Status
from engine.step.sequence import Sequence as Branch
from tests.engine.mirror import Mirror
from tests.toy_runner import ToyRunner, expected, next_logprobs

E = TypeVar("E")


def prompt(length: int, family: int = 0, vocab: int = 1000) -> list[int]:
    """Token ids; two families differ from the first token on, two lengths of one share the shorter."""
    return [(family * 31 + i * 7 + 1) % vocab for i in range(length)]


def best_beam(
    tokens: list[int], width: int, most: int, vocab: int, **more: Any
) -> tuple[list[int], list[float]]:
    """The toy language's beam search without any paging: its output, and the scores that it keeps."""
    search = BeamSearch(width, most, **more)
    search.begin(0)
    texts, ids = {0: list(tokens)}, iter(range(1, 10**6))
    beams = [0]
    while not search.over:
        length = len(texts[beams[0]]) - len(tokens)
        for i in beams:
            n = len(texts[i])
            p = next_logprobs(np.array(texts[i]), np.arange(n), vocab)
            top = np.argsort(-p, kind="stable")[: search.candidates]
            search.offer(i, top.tolist(), p[top].tolist())
        moves, _ = search.step(beams, length)
        beams = []
        for move in moves:
            child = next(ids)
            texts[child] = [*texts[move.parent], move.token]
            search.moved(move, child, length)
            beams += [child] * (not move.ends)
    scores = [h.score for h in search.hypotheses]
    return texts[search.hypotheses[0].seq_id][len(tokens) :], scores


def block_hash(parent: bytes, tokens: bytes, salt: bytes = b"") -> bytes:
    """Hash of one block; 16 bytes. tokens: little-endian int32; salt: its digest for block 0 only."""
    return xxh3_128_digest(parent + tokens + salt)


class Pool(BlockPool):
    """A pool that keeps its events, and shows the order in which it hands out blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.events: list[Event] = []
        super().__init__(num_blocks, block_size, self.events.append)

    def eviction_order(self) -> list[int]:
        """The whole queue; the first block is taken next."""
        return list(self._queue)


def fork(core: EngineCore, parent: Branch) -> Branch | None:
    """A child branch that shares the computed blocks of its parent. Call between steps.

    None if the parent does not run or has a row in flight, if max_num_seqs is reached, or if the request alone could
    then need more blocks than the pool has.
    """
    request = parent.request
    if request.status is not Status.RUNNING or parent.finish_reason or not parent.table:
        return None
    if request.fans_out or request.search or core.flights.newest(parent):
        return None
    most = min(core.runner.max_model_len, request.prompt_tokens + request.params.max_tokens)
    blocks = -(-most // core.paging.block_size) * (len(request.branches) + 1)
    if blocks > core.paging.pool.num_usable or not core.scheduler.places:
        return None
    return core.generation.fork(parent)


def prune(core: EngineCore, plan: Plan) -> None:
    """Remove from the newest step the rows that were aborted or preempted since begin(), before the step is
    executed."""
    flight = core.flights[-1]
    assert flight.plan is plan
    flight.seal(plan.retired)


def new_flight() -> Flight:
    """A step without rows, in which paging notes its changes."""
    return Flight(Plan(0), 0, 0)


def row_for(seq: Branch, start: int, n: int, sample: bool = False, draws: tuple[int, ...] = ()) -> Row:
    """A row for a plan that a test makes."""
    return row_of(seq, start, n, draws or ((seq.branch,) if sample else ()))


class Books:
    """Paging over a pool without a scheduler: sequences take and release blocks."""

    def __init__(self, num_blocks: int = 11, block_size: int = 16, caching: bool = True) -> None:
        self.pool = Pool(num_blocks, block_size)
        self.paging = Paging(self.pool, 7, caching)
        self.flights = Flights()
        self.live: list[Branch] = []
        self._ids = count()
        self.begin_step()

    @property
    def flight(self) -> Flight:
        """The step that is being planned."""
        return self.flights[-1]

    def begin_step(self) -> Flight:
        """All steps before are finished."""
        self.flights.clear()
        self.flights.append(new_flight())
        return self.flight

    def admit(self, seq: Branch) -> None:
        self.paging.admit(seq, self.paging.lookup(seq), self.flight)

    def grow(self, seq: Branch, end: int) -> bool:
        return self.paging.grow(seq, seq.num_computed, end, self.flight)

    def publish(self, seq: Branch, end: int) -> None:
        self.paging.publish(seq, end, self.flight)

    def retract(self, seq: Branch) -> list[Branch]:
        return self.paging.retract(seq, self.flights)

    def sequence(self, tokens: Sequence[int], salt: str | None = None) -> Branch:
        """A sequence without blocks."""
        number = next(self._ids)
        request = Request(number, tokens, SamplingParams(), 0.0, salt=salt and salt_digest(salt))  # type: ignore[arg-type]
        branch = Branch(number, request)
        request.branches.append(branch)
        self.live.append(branch)
        return branch

    def start(self, tokens: Sequence[int], salt: str | None = None) -> Branch:
        """Admitted, scheduled whole, executed. Fails the test if it does not fit."""
        seq = self.sequence(tokens, salt)
        self.begin_step()
        self.admit(seq)
        assert self.grow(seq, len(seq))
        self.publish(seq, len(seq))
        seq.num_computed = len(seq)
        self.check()
        return seq

    def decode(self, seq: Branch, tokens: Iterable[int]) -> None:
        """One step for each token: it is appended, gets its slot and is computed."""
        for token in tokens:
            seq.tokens.append(token)
            assert self.grow(seq, len(seq))
            seq.num_computed = len(seq)
            self.paging.publish(seq, seq.num_computed)
            self.check()

    def end(self, seq: Branch) -> None:
        self.paging.release(seq)
        self.live.remove(seq)
        self.check()

    def check(self) -> None:
        self.pool.check([s.table for s in self.live])

    def refs(self, blocks: Iterable[int]) -> list[int]:
        return [self.pool.ref(b) for b in blocks]


class Rig:
    """An EngineCore over a ToyRunner, with a clock that advances a millisecond each time it is read."""

    def __init__(
        self,
        num_blocks: int = 65,
        block_size: int = 16,
        vocab: int = 1000,
        *,
        max_model_len: int | None = None,
        fault: Callable[[int, str], None] | None = None,
        bad: Callable[[int], bool] | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        eos_ids: Sequence[int] = (),
        defaults: dict[str, Any] | None = None,
        ahead: int = 0,
        late: bool = True,
        **knobs: Any,
    ) -> None:
        knobs = {"max_num_batched_tokens": 2048, "max_num_seqs": 16} | knobs
        self.vocab = vocab
        self.batches: list[StepBatch] = []
        self.ended: list[int] = []
        self.mirror = Mirror(num_blocks, block_size)
        ticks = count()
        self.runner = ToyRunner(num_blocks, block_size, vocab, max_model_len, fault, bad, ahead, late)
        self.core = EngineCore(
            EngineConfig(**knobs),
            self.runner,
            EventLog(lambda: next(ticks) * 1e-3, self._take),
            hash_seed=7,
            token_bytes=token_bytes,
            eos_ids=eos_ids,
            defaults=defaults,
            on_finished=lambda r: self.ended.append(r.request_id),
        )
        self.pool = self.core.paging.pool
        self._ids = count()

    def _take(self, batch: StepBatch) -> None:
        self.batches.append(batch)
        self.mirror.apply(batch)

    def add(self, tokens: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        own = {k: options.pop(k) for k in ("salt", "priority", "conversation", "refuse") if k in options}
        params = SamplingParams(**({"max_tokens": max_tokens, "temperature": 0} | options))
        return self.core.add_request(next(self._ids), tokens, params, **own)

    def step(self) -> dict[int, int]:
        """One step, checked. Returns the tokens scheduled by request id."""
        seen = len(self.batches)
        owner = {s.seq_id: r.request_id for r in self.core.requests.values() for s in r.branches}
        self.core.step()
        self.check()
        tokens: dict[int, int] = {}
        for event in (e for b in self.batches[seen:] for e in b.events if isinstance(e, StepScheduled)):
            for seq_id, n in zip(event.seq_ids, event.n, strict=True):
                tokens[owner[seq_id]] = tokens.get(owner[seq_id], 0) + n
        return tokens

    def run(self, steps: int = 10_000) -> None:
        """Run steps until there is no work."""
        for _ in range(steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {steps} steps")

    def check(self) -> None:
        self.core.check()
        self.core.flush()
        self.mirror.compare(self.core.pool_snapshot())

    def snapshot(self) -> PoolSnapshot:
        return self.core.pool_snapshot()

    def events(self, kind: type[E], request_id: int | None = None) -> list[E]:
        """All events of one type so far, or those of one request."""
        found = [e for b in self.batches for e in b.events if isinstance(e, kind)]
        return [e for e in found if request_id is None or e.request_id == request_id]  # type: ignore[attr-defined]

    def names(self, since: int = 0) -> list[str]:
        """Types of all events from batch `since` on."""
        return [type(e).__name__ for b in self.batches[since:] for e in b.events]

    def finished(self, request: Request) -> RequestFinished:
        (event,) = self.events(RequestFinished, request.request_id)
        return event

    def usage(self, request: Request) -> Usage:
        return self.finished(request).usage

    def answer(self, request: Request) -> list[int]:
        return list(request.branches[0].output_ids)

    def truth(self, request: Request, count: int) -> list[int]:
        """The tokens of the toy language after this prompt, computed without paging."""
        return expected(list(request.prompt_token_ids), count, self.vocab)
