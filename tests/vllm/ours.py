"""kvtop's side: an EngineCore with a ToyRunner, read only through its event stream and the pool's snapshots.

The ToyRunner makes the tokens for both sides. Its next token depends on the KV that it reads through the block table.
So if a run agrees with vLLM in every block, it also computed with the right KV.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.events import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    PrefixLookup,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StepBatch,
    StepScheduled,
    TokensSampled,
    from_runs,
)
from engine.params import SamplingParams
from engine.step.core import EngineCore
from engine.step.runner import Plan
from tests.engine.rig import prune
from tests.toy_runner import ToyRunner, expected
from tests.vllm.terms import HASH_SEED, VOCAB, Ask, Counts, Setup, State, Step


class Ours:
    """begin() schedules. finish() runs what is left of the step and returns the sampled tokens."""

    def __init__(self, setup: Setup) -> None:
        ticks = count()
        self.runner = ToyRunner(setup.num_blocks, setup.block_size, VOCAB, setup.max_model_len)
        knobs: dict[str, Any] = {
            "max_num_batched_tokens": setup.budget,
            "max_num_seqs": setup.max_num_seqs,
            "enable_chunked_prefill": setup.chunked,
            "enable_prefix_caching": setup.caching,
            "long_prefill_token_threshold": setup.threshold,
            "long_prefill_token_threshold_adaptive": setup.adaptive,
            "scheduling_policy": "priority" if setup.priority else "fcfs",
            "watermark": setup.watermark,
        }
        self.core = EngineCore(
            EngineConfig(**knobs),
            self.runner,
            EventLog(lambda: next(ticks) * 1e-3, self._take),
            hash_seed=HASH_SEED,
        )
        self._pool = self.core.paging.pool
        self._plan: Plan | None = None
        self._request_of: dict[int, int] = {}
        self._asks: dict[int, Ask] = {}
        self._outputs: dict[int, list[int]] = {}
        self._finished: dict[int, str] = {}
        self._step = Step()
        self._sampled: dict[int, list[int]] = {}
        self._counts = Counts()
        self.evicted = 0
        """How often content was evicted for other content."""
        self.unwritten = 0
        """How often hashes were dropped because the forward of their blocks did not run."""

    def _take(self, batch: StepBatch) -> None:
        step = self._step
        for event in batch.events:
            match event:
                case StepScheduled():
                    rows = zip(event.seq_ids, event.start, event.n, strict=True)
                    step.scheduled = [(self._request_of[s], start, n) for s, start, n in rows]
                case RequestAdmitted():
                    step.admitted.append((event.request_id, event.cached_tokens, event.resumed))
                case RequestPreempted():
                    step.preempted.append(event.request_id)
                case TokensSampled():
                    at = 0
                    for seq, n in zip(event.seq_ids, event.counts, strict=True):
                        self._sampled[self._request_of[seq]] = event.token_ids[at : at + n]
                        at += n
                case RequestFinished():
                    self._finished[event.request_id] = event.reason
                case PrefixLookup():
                    self._count(event)
                case BlocksStored():
                    size, parent = self.runner.block_size, event.parent
                    for i, h in enumerate(event.hashes):
                        step.cache.append(
                            ("stored", h, parent, tuple(event.token_ids[i * size : (i + 1) * size]))
                        )
                        parent = h
                case BlocksEvicted():
                    step.cache += [("removed", h, "", ()) for h in event.hashes]
                    self.evicted += event.why == "reallocated"
                    self.unwritten += event.why == "unwritten"
                case CacheCleared():
                    step.cache.append(("cleared", "", "", ()))

    def _count(self, event: PrefixLookup) -> None:
        c = self._counts
        if event.resumed:
            c.preempted_requests += 1
            c.preempted_queries += event.prompt_tokens
            c.preempted_hits += event.hit_tokens
        else:
            c.requests += 1
            c.queries += event.prompt_tokens
            c.hits += event.hit_tokens

    # ---------------------------------------------------------------- what the driver does

    def add(self, ask: Ask) -> None:
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0, stop_token_ids=ask.stop)
        request = self.core.add_request(
            ask.id, ask.tokens, params, salt=ask.salt, priority=ask.priority, t_arrival=float(ask.id)
        )
        self._asks[ask.id] = ask
        for seq in request.branches:
            self._request_of[seq.seq_id] = ask.id
        self.core.flush()

    def abort(self, request: int) -> None:
        self.core.abort(request)
        if self._plan is None:
            self.core.flush()

    def reset(self, running: bool) -> bool:
        done = self.core.reset_prefix_cache(reset_running=running)
        self.core.flush()
        return done

    def begin(self) -> Step:
        self._plan = self.core.begin()
        self.core.flush()
        return self._step

    def finish(self) -> dict[int, list[int]]:
        """Executes the scheduled rows that still count. Returns tokens by request."""
        self._sampled = {}
        plan, self._plan = self._plan, None
        if plan is not None:
            prune(self.core, plan)
            self.core.finish(plan, self.runner.execute(plan))
        self.core.check()
        self._step = Step()
        for request, tokens in self._sampled.items():
            self._outputs.setdefault(request, []).extend(tokens)
        return self._sampled

    # ---------------------------------------------------------------- what it is asked

    def state(self) -> State:
        snap = self.core.pool_snapshot()
        refs = {
            block: ref
            for first, n, ref in zip(snap.refs[::3], snap.refs[1::3], snap.refs[2::3], strict=True)
            for block in range(first, first + n)
        }
        owners = [self._request_of[s] for s in snap.seq_ids]
        live = self.core.requests
        return State(
            waiting=[r.request_id for r in self.core.scheduler.waiting],
            running=[r.request_id for r in self.core.scheduler.running],
            queue=list(from_runs(snap.queue)),
            refs=refs,
            hashes=dict(zip(snap.hashed_ids, snap.hashes, strict=True)),
            num_hashes=self._pool.num_hashes,
            tables=dict(zip(owners, snap.tables, strict=True)),
            computed=dict(zip(owners, snap.computed, strict=True)),
            outputs={r: self._outputs[r] for r in live if self._outputs.get(r)},
            finished=dict(self._finished),
        )

    def counts(self) -> Counts:
        return self._counts

    def live(self) -> list[int]:
        return list(self.core.requests)

    def answered(self) -> list[int]:
        """Requests with at least one token of output."""
        return list(self._outputs)

    def text_of(self, request: int) -> list[int]:
        """Prompt and answer so far."""
        return self._asks[request].tokens + self._outputs.get(request, [])

    def answer_is_right(self, request: int) -> bool:
        """Whether the answer is the one that the toy model gives without any paging."""
        output = self._outputs.get(request, [])
        return output == expected(self._asks[request].tokens, len(output), VOCAB)
