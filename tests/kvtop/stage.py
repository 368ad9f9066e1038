"""Stage: a scripted source of batches for the dashboard's tests, no engine and no weights.

Owns a simple pool of lists that follows the event law (the seven pool events give its whole state), a vocabulary of
words, and a clock that the script moves. It is slow and simple, because the screen is compared with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import xxhash

from engine.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksReleased,
    BlocksStored,
    BlocksTouched,
    EngineStarted,
    EngineStopped,
    Event,
    Knobs,
    ModelLoading,
    PoolSnapshot,
    PrefixLookup,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    StepBatch,
    StepCompleted,
    StepScheduled,
    Timings,
    TokenPieces,
    TokensSampled,
    Usage,
    to_runs,
)

SEED = 7


def chain(tokens: list[int], size: int) -> list[str]:
    """Hashes of the full blocks of a prompt, as the contract defines them."""
    parent = xxhash.xxh3_128(SEED.to_bytes(8, "big")).digest()
    out = []
    for i in range(0, len(tokens) // size * size, size):
        data = b"".join(t.to_bytes(4, "little") for t in tokens[i : i + size])
        parent = xxhash.xxh3_128(parent + data).digest()
        out.append(parent.hex())
    return out


@dataclass(eq=False)
class Act:
    """One request on the stage."""

    rid: int
    seq: int
    tokens: list[int]
    prompt: int
    answer: list[int]
    t: float
    admitted: bool = False
    computed: int = 0
    cached: int = 0
    stored: int = 0
    table: list[int] = field(default_factory=list)
    out: int = 0
    t_admitted: float | None = None
    t_first: float | None = None


class Stage:
    """`batches` is the stream so far; every method appends to it."""

    def __init__(self, num_blocks: int = 546, size: int = 16, budget: int = 512, load: bool = True) -> None:
        self.size, self.budget, self.num_blocks = size, budget, num_blocks
        self.batches: list[StepBatch] = []
        self.t = 0.0
        self.step_no = self.events = self.next_rid = 0
        self.queue = list(range(1, num_blocks))
        self.ref = [0] * num_blocks
        self.hash: dict[int, str] = {}
        self.where: dict[str, int] = {}
        self.words: dict[str, int] = {}
        self.seen: set[int] = set()
        self.acts: list[Act] = []
        if load:
            self._emit([ModelLoading(1, 4, "weights")])
        self._emit(
            [
                EngineStarted(
                    schema=1,
                    source="live",
                    capabilities=["blocks", "text", "timings"],
                    model="SmolLM2-135M-Instruct",
                    device="cpu",
                    dtype="bfloat16",
                    num_blocks=num_blocks,
                    block_size=size,
                    bytes_per_block=368_640,
                    weights_bytes=269_000_000,
                    hash_seed=SEED,
                    epoch=1.7e9,
                    max_model_len=8192,
                    knobs=Knobs(max_num_batched_tokens=budget),
                )
            ]
        )

    # ---------------------------------------------------------------------------- the script

    def encode(self, text: str) -> list[int]:
        """One token a word (with its leading space)."""
        return [self.words.setdefault(w, len(self.words) + 10) for w in re.findall(r"\s*\S+", text)]

    def submit(self, question: str, page: str = "", name: str = "page.txt", answer: str = "ok.") -> int:
        """Queue a request: a system page, then the question. `answer` is its answer."""
        self.next_rid += 1
        rid = self.next_rid
        spans, tokens = [], []
        for text, role, label in ((page, "system", name), (question, "user", "")):
            part = self.encode(text)
            if part:
                spans.append((len(tokens), len(tokens) + len(part), role, label))
                tokens += part
        spans.append((len(tokens), len(tokens) + 2, "template", ""))
        tokens += self.encode("\n<assistant> :")
        act = Act(rid, 100 + rid, tokens, len(tokens), self.encode(answer), self.t)
        self.acts.append(act)
        self._emit(
            [
                RequestQueued(rid, list(tokens), self.t, spans=spans, params={"max_tokens": 64}),
                *self._pieces(tokens),
            ]
        )
        return rid

    def step(self, seconds: float = 0.016) -> None:
        """One engine step that takes `seconds`."""
        self.step_no += 1
        out: list[Event] = []
        rows: list[tuple[Act, int, int]] = []
        left = self.budget
        for act in [a for a in self.acts if a.admitted and a.computed >= a.prompt]:
            rows.append((act, act.computed, 1))
            left -= 1
        for act in self.acts:
            if left <= 0 or (act.admitted and act.computed >= act.prompt):
                continue
            if not act.admitted:
                out += self._admit(act)
            n = min(left, act.prompt - act.computed)
            rows.append((act, act.computed, n))
            left -= n
        for act, start, n in rows:
            out += self._grow(act, start + n)
            if start < act.prompt:
                out += self._publish(act, min(start + n, act.prompt))
        out.append(
            StepScheduled([a.seq for a, _, _ in rows], [s for _, s, _ in rows], [n for _, _, n in rows])
        )
        self.t += seconds
        done: list[Act] = []
        ids, counts, texts, pieces = [], [], [], []
        for act, start, n in rows:
            act.computed = start + n
            last = act.computed >= act.prompt
            counts.append(int(last))
            texts.append("")
            if last:
                token = act.answer[act.out]
                act.out += 1
                act.tokens.append(token)
                ids.append(token)
                pieces += self._pieces([token])
                texts[-1] = self._word(token)
                act.t_first = act.t_first or self.t
                if act.out == len(act.answer):
                    done.append(act)
        out += pieces
        out.append(
            TokensSampled([a.seq for a, _, _ in rows], ids, counts, [a.computed for a, _, _ in rows], texts)
        )
        for act, _, _ in rows:
            if act not in done:
                out += self._publish(act, act.computed)
        for act in done:
            out += self._finish(act)
        decodes = sum(1 for a, s, _ in rows if s >= a.prompt)
        tokens = sum(n for _, _, n in rows)
        hashed = sum(1 for b in self.queue if b in self.hash)
        running = sum(a.admitted for a in self.acts)
        out.append(
            StepCompleted(
                slow=False,
                budget=self.budget,
                decode_tokens=decodes,
                prefill_tokens=tokens - decodes,
                t_schedule=1e-4,
                t_prepare=1e-4,
                t_forward=seconds - 4e-4,
                t_sample=2e-4,
                t_gpu=None,
                queues={"running": running, "waiting": len(self.acts) - running, "preempted": 0},
                free=len(self.queue) - hashed,
                cached=hashed,
                active=self.num_blocks - 1 - len(self.queue),
            )
        )
        self._emit(out)

    def run(self, prefill: float = 0.3, decode: float = 0.016) -> None:
        """Run steps until there is no work."""
        while self.acts:
            busy = any(a.computed < a.prompt for a in self.acts)
            self.step(prefill if busy else decode)

    def stop(self) -> None:
        """The closing snapshot and EngineStopped."""
        self._emit([self.snapshot()])
        self._emit([EngineStopped()])

    def snapshot(self) -> PoolSnapshot:
        """A PoolSnapshot."""
        refs: list[int] = []
        for b in range(1, self.num_blocks):
            if self.ref[b]:
                refs += [b, 1, self.ref[b]]
        ids = sorted(self.hash)
        live = [a for a in self.acts if a.admitted]
        return PoolSnapshot(
            refs,
            to_runs(self.queue),
            ids,
            [self.hash[b] for b in ids],
            [a.seq for a in live],
            [list(a.table) for a in live],
            [a.computed for a in live],
        )

    # ------------------------------------------------------------------------------ the pool

    def _emit(self, events: list[Event]) -> None:
        self.batches.append(StepBatch(len(self.batches), self.t, self.step_no, self.events, list(events)))
        self.events += len(events)

    def _word(self, token: int) -> str:
        return next(w for w, t in self.words.items() if t == token)

    def _pieces(self, tokens: list[int]) -> list[Event]:
        new = [t for t in dict.fromkeys(tokens) if t not in self.seen]
        self.seen.update(new)
        names = {t: w for w, t in self.words.items()}
        return [TokenPieces(new, [names[t].encode() for t in new])] if new else []

    def _admit(self, act: Act) -> list[Event]:
        hashes = chain(act.tokens[: act.prompt - 1], self.size)
        hit: list[int] = []
        for h in hashes:
            if h not in self.where:
                break
            hit.append(self.where[h])
        out: list[Event] = [
            PrefixLookup(
                act.rid, hashes, len(hit), min(len(hit) + 1, len(hashes)), len(hit) * self.size, act.prompt
            )
        ]
        if hit:
            out.append(BlocksTouched(act.seq, list(hit), "hit"))
        for b in hit:
            if not self.ref[b]:
                self.queue.remove(b)
            self.ref[b] += 1
        act.table += hit
        act.stored = len(hit)
        act.computed = act.cached = len(hit) * self.size
        act.admitted, act.t_admitted = True, self.t
        out.append(RequestAdmitted(act.rid, act.seq, act.cached))
        return out

    def _grow(self, act: Act, tokens: int) -> list[Event]:
        need = -(-tokens // self.size) - len(act.table)
        if need <= 0:
            return []
        ids, self.queue = self.queue[:need], self.queue[need:]
        out: list[Event] = []
        gone = [b for b in ids if b in self.hash]
        if gone:
            out.append(BlocksEvicted(gone, [self.hash[b] for b in gone], act.seq, "reallocated"))
            for b in gone:
                self.where.pop(self.hash.pop(b), None)
        for b in ids:
            self.ref[b] = 1
        act.table += ids
        out.append(BlocksAllocated(act.seq, list(ids)))
        return out

    def _publish(self, act: Act, tokens: int) -> list[Event]:
        first, last = act.stored, tokens // self.size
        if last <= first:
            return []
        hashes = chain(act.tokens[: last * self.size], self.size)
        root = xxhash.xxh3_128(SEED.to_bytes(8, "big")).digest().hex()
        ids = act.table[first:last]
        for b, h in zip(ids, hashes[first:], strict=True):
            self.hash[b] = h
            self.where.setdefault(h, b)
        act.stored = last
        return [
            BlocksStored(
                act.seq,
                first,
                list(ids),
                hashes[first:],
                hashes[first - 1] if first else root,
                act.tokens[first * self.size : last * self.size],
            )
        ]

    def _finish(self, act: Act) -> list[Event]:
        ids = act.table[::-1]
        head, tail = [], []
        for b in ids:
            self.ref[b] -= 1
            if not self.ref[b]:
                (tail if b in self.hash else head).append(b)
        self.queue = head + self.queue + tail
        self.acts.remove(act)
        return [
            BlocksReleased(act.seq, ids),
            RequestFinished(
                act.rid,
                "stop",
                Timings(act.t, act.t_admitted, act.t_first, self.t, self.t),
                Usage(act.prompt, act.cached, act.prompt - act.cached, 0, act.out),
            ),
        ]
