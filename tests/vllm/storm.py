"""Random requests for both engines at once, compared after every step.

The requests are prompts with common beginnings, next turns after earlier answers, equal prompts in one step, and
prompts of random length, also too long ones. There are stop tokens, salts, resets, and aborts between steps and in one.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

from tests.vllm.ours import Ours
from tests.vllm.terms import VOCAB, Ask, Setup, differences
from tests.vllm.theirs import Theirs


class Disagreement(AssertionError):
    """The two engines are no longer in the same state."""


class Pair:
    """Both engines. They get the same requests and are compared after each step."""

    def __init__(self, setup: Setup, models: tuple[type, ...] = ()) -> None:
        self.setup = setup
        self.ours, self.theirs = Ours(setup), Theirs(setup, models)
        self.steps = 0

    def add(self, ask: Ask) -> None:
        self.ours.add(ask)
        self.theirs.add(ask)

    def abort(self, request: int) -> None:
        self.ours.abort(request)
        self.theirs.abort(request)

    def reset(self, running: bool = False) -> bool:
        ours, theirs = self.ours.reset(running), self.theirs.reset(running)
        if ours != theirs:
            raise Disagreement(f"reset: ours {ours}, theirs {theirs}")
        return ours

    def step(self, abort: int | None = None) -> tuple[list[int], list[int]]:
        """One step; the requests in `abort` end while it is in flight. Returns which were admitted and preempted."""
        self.steps += 1
        ours, theirs = self.ours.begin(), self.theirs.begin()
        self.compare(ours, theirs)
        if abort is not None:
            self.abort(abort)
        tokens = self.ours.finish()
        self.theirs.finish(tokens)
        self.compare(ours, theirs)  # an abort inside the step may have preempted others
        self.compare(self.ours.state(), self.theirs.state())
        return [request for request, _, _ in ours.admitted], ours.preempted

    def compare(self, ours: object, theirs: object) -> None:
        found = list(differences(ours, theirs))
        if found:
            raise Disagreement(f"step {self.steps} of {self.setup}:\n" + "\n".join(found))


class Storm:
    """A Pair with a random workload, the same for the same seed. seen: how often each thing happened."""

    def __init__(self, seed: int, models: tuple[type, ...] = (), setup: Setup | None = None) -> None:
        r = self.random = random.Random(seed)
        self.setup = setup or random_setup(r)
        self.pair = Pair(self.setup, models)
        self.seen: Counter[str] = Counter()
        self._next = 0
        self._families = [[r.randrange(VOCAB) for _ in range(self.setup.limit + 4)] for _ in range(3)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.act()
        self.seen["steps"] += steps
        self.pair.compare(self.pair.ours.counts(), self.pair.theirs.counts())

    def act(self) -> None:
        r, pair = self.random, self.pair
        live = pair.ours.live()
        if len(live) < 12 and r.random() < 0.35:
            for _ in range(r.choice((1, 1, 1, 2, 4))):
                self._add()
        elif live and r.random() < 0.03:
            pair.abort(r.choice(live))
            self.seen["aborted"] += 1
        elif r.random() < 0.01:
            self.seen["reset"] += pair.reset(running=r.random() < 0.5)
        inside = r.choice(live) if live and r.random() < 0.04 else None
        admitted, preempted = pair.step(abort=inside)
        self.seen["aborted inside a step"] += inside is not None
        self.seen["admitted"] += len(admitted)
        self.seen["preempted"] += len(preempted)

    def _add(self) -> None:
        r, size, limit = self.random, self.setup.block_size, self.setup.limit
        tokens = self._prompt()
        self.seen["refused"] += not 0 < len(tokens) < limit
        most = limit // 2 if r.random() < 0.1 else 3 * size + 4
        ask = Ask(
            self._next,
            tokens,
            max_tokens=r.randint(1, most),
            salt=r.choice((None, None, None, "a")),
            priority=r.randint(-3, 4) if self.setup.priority else 0,
            stop=tuple(r.sample(range(VOCAB), r.choice((0, 0, 30)))),
        )
        self._next += 1
        self.pair.add(ask)

    def _prompt(self) -> list[int]:
        r, size, limit = self.random, self.setup.block_size, self.setup.limit
        kind = r.random()
        if kind < 0.3 and self._next:  # a next turn, or the same once more
            tokens = self.pair.ours.text_of(r.randrange(max(0, self._next - 6), self._next))
            return tokens + [r.randrange(VOCAB) for _ in range(r.choice((0, 0, 1, size)))]
        if kind < 0.4:  # whole blocks: the last one is computed each time, so several copies of it exist
            return self._families[0][: r.randint(1, min(3, max(1, limit // size - 1))) * size]
        if kind < 0.42:  # about as long as it may be
            return r.choice(self._families)[: limit + r.randrange(-1, 3)]
        length = min(r.randint(1, limit), r.randint(1, limit))
        tokens = r.choice(self._families)[:length]
        at = r.randrange(length) if r.random() < 0.5 else length
        return tokens[:at] + [r.randrange(VOCAB) for _ in range(length - at)]


def random_setup(r: random.Random) -> Setup:
    """A tiny pool with settings that take effect."""
    block_size = r.choice((1, 2, 4, 16))
    num_blocks = r.randint(6, 40)
    room = (num_blocks - 1) * block_size
    seqs = r.randint(1, 6)
    chunked = r.random() < 0.8
    limit = r.choice((None, None, max(2, room * 2 // 3)))
    longest = min(room, limit or room)
    return Setup(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=limit,
        max_num_seqs=seqs,
        chunked=chunked,
        budget=r.randint(seqs + 1, 48) if chunked else longest + seqs,
        caching=r.random() < 0.9,
        adaptive=r.random() < 0.3,
        priority=r.random() < 0.4,
        watermark=r.choice((0.0, 0.0, 0.0, 0.1, 0.2)),
        threshold=min(r.choice((0, 0, 3, 9)), longest),  # vLLM takes no larger one
    )


def stampede(seed: int) -> tuple[Setup, list[list[Ask]]]:
    """A set-up, and the requests of its first steps: long prompts with a common beginning, by priority, in chunks of
    one or three tokens, so that they overtake and read each other, and answers that take the blocks they will need.
    Sometimes a prompt is preempted after its turn, together with those that have read from it in this step."""
    r = random.Random(seed)
    talkers = r.randint(3, 8)
    setup = Setup(
        num_blocks=r.randint(30, 60),
        block_size=1,
        max_num_seqs=talkers + 4,
        budget=60,
        threshold=r.randint(1, 3),
        priority=True,
    )
    numbers = count()
    family = [r.randrange(VOCAB) for _ in range(60)]

    def prompt() -> Ask:
        tokens = family if r.random() < 0.7 else family[::-1]
        return Ask(next(numbers), tokens[: r.randint(8, 20)], max_tokens=2, priority=r.choice((0, 5, 9)))

    talk = setup.limit // talkers + 5
    first = [
        Ask(next(numbers), [r.randrange(VOCAB)], talk, priority=r.choice((-1, 0))) for _ in range(talkers)
    ]
    return setup, [first, *([prompt() for _ in range(r.randint(1, 2))] for _ in range(3))]
