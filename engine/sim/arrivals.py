"""Load: the requests of a workload, as they arrive on the engine's clock.

Owns which request comes next. Each kind of decision has a random generator of its own, so a prompt is the same whenever
it arrives. Open arrivals do not depend on the engine at all. A closed loop depends only on the times of the answers.
Called only from the engine's thread.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, islice, repeat

from xxhash import xxh3_64_intdigest

from engine.chat.conversation import Span
from engine.params import SamplingParams
from engine.sim.synthetic import Language
from engine.sim.workload import (
    Bursts,
    Chat,
    Closed,
    Length,
    Poisson,
    PrefixRepetition,
    SharedPrefix,
    Stream,
    Unique,
    Workload,
)


@dataclass(slots=True, eq=False)
class Arrival:
    """One request. at: its time of arrival, on the engine's clock. stream: the name of its stream."""

    at: float
    token_ids: list[int]
    spans: list[Span]
    params: SamplingParams
    stream: str
    user: _User | None = None


@dataclass(slots=True, eq=False)
class _User:
    """A user in a closed loop, and the conversation so far."""

    number: int
    turn: int = 0
    history: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class Load:
    """`language` makes the text of the prompts. Second 0 of the workload is `start` on the engine's clock."""

    def __init__(self, workload: Workload, language: Language, start: float) -> None:
        self.workload = workload
        self._start = start
        self._order = count()
        self._players = [_Player(s, workload.seed, language) for s in workload.streams]
        self._next: list[tuple[float, int, _Player, _User | None]] = []
        for player in self._players:
            for at, user in player.begin():
                self._push(at, player, user)

    @property
    def next_at(self) -> float | None:
        """When the next request arrives. None if that is not known yet."""
        return self._start + self._next[0][0] if self._next else None

    @property
    def over(self) -> bool:
        """No request will arrive any more."""
        return all(p.left == 0 for p in self._players)

    def take(self, now: float) -> list[Arrival]:
        """The requests that have arrived by `now`, in order."""
        out: list[Arrival] = []
        while self._next and self._start + self._next[0][0] <= now:
            at, _, player, user = heapq.heappop(self._next)
            arrival = player.ask(self._start + at, user)
            if user is None:
                for later in player.later():
                    self._push(later, player, None)
            if arrival is not None:
                out.append(arrival)
        return out

    def finished(self, arrival: Arrival, now: float, output_ids: Sequence[int]) -> None:
        """The answer of a request is complete or will never come. In a closed loop the user thinks, then continues."""
        if arrival.user is None:
            return
        player = next(p for p in self._players if p.stream.name == arrival.stream)
        at = player.answered(arrival.user, now - self._start, arrival, output_ids)
        if at is not None:
            self._push(at, player, arrival.user)

    def _push(self, at: float, player: _Player, user: _User | None) -> None:
        heapq.heappush(self._next, (at, next(self._order), player, user))


class _Player:
    """One stream."""

    def __init__(self, stream: Stream, seed: int, language: Language) -> None:
        self.stream = stream
        self._name = f"{seed}/{stream.name}"
        self._language = language
        self._prefixes: dict[int, list[int]] = {}
        self.left = stream.requests
        """Requests that have not arrived yet."""
        self._made = 0
        self._times = islice(self._open(), stream.requests)
        self._turns = self._deal()

    # ------------------------------------------------------------------------------------------ when

    def begin(self) -> Iterator[tuple[float, _User | None]]:
        """Puts the first arrivals in line."""
        arrivals = self.stream.arrivals
        if not isinstance(arrivals, Closed):
            yield from ((at, None) for at in self.later())
            return
        for i in range(min(arrivals.users, self.stream.requests)):
            yield self.stream.start + self._think(i, 0, arrivals.think), _User(i)

    def later(self) -> Iterator[float]:
        """The next arrival of an open stream, if there is one."""
        return islice(self._times, 1)

    def answered(self, user: _User, now: float, arrival: Arrival, output_ids: Sequence[int]) -> float | None:
        """When this user asks again. None: never."""
        arrivals, prompts = self.stream.arrivals, self.stream.prompts
        assert isinstance(arrivals, Closed)
        user.turn += 1
        if isinstance(prompts, Chat):
            if user.turn % prompts.turns == 0:
                user.history, user.spans = [], []
            else:
                n = len(arrival.token_ids)
                user.history, user.spans = [*arrival.token_ids, *output_ids], arrival.spans[:]
                if output_ids:
                    user.spans.append((n, n + len(output_ids), "assistant", ""))
        if not self.left:
            return None
        return now + self._think(user.number, user.turn, arrivals.think)

    def _open(self) -> Iterator[float]:
        arrivals, chance = self.stream.arrivals, self._chance("times")
        if isinstance(arrivals, Poisson):
            shape = arrivals.burstiness
            gaps = (chance.gammavariate(shape, 1 / (arrivals.rate * shape)) for _ in repeat(None))
            return accumulate(chain([self.stream.start + next(gaps)], gaps))
        if isinstance(arrivals, Bursts):
            return chain.from_iterable(self._burst(i, arrivals, chance) for i in count())
        return iter(())

    def _burst(self, i: int, arrivals: Bursts, chance: random.Random) -> list[float]:
        at = self.stream.start + i * arrivals.every
        return sorted(at + chance.random() * arrivals.within for _ in range(arrivals.size))

    def _think(self, user: int, turn: int, mean: float) -> float:
        return self._chance(f"think/{user}/{turn}").expovariate(1 / mean) if mean else 0.0

    # ------------------------------------------------------------------------------------------ what

    def ask(self, at: float, user: _User | None) -> Arrival | None:
        """The next request. None if other users have taken all of them."""
        if not self.left:
            return None
        self.left -= 1
        number, self._made = self._made, self._made + 1
        chance = self._chance(f"request/{number}" if user is None else f"request/{user.number}/{user.turn}")
        prompts = self.stream.prompts
        ids, spans = self._prompt(number, user, chance)
        params = SamplingParams(
            max_tokens=prompts.output_len.draw(chance),
            seed=chance.getrandbits(62),
            ignore_eos=True,
        )
        return Arrival(at, ids, spans, params, self.stream.name, user)

    def _prompt(self, number: int, user: _User | None, chance: random.Random) -> tuple[list[int], list[Span]]:
        prompts = self.stream.prompts
        if isinstance(prompts, Chat):
            assert user is not None
            ids, spans = user.history[:], user.spans[:]
            if not ids:
                conversation = user.number + 7919 * (user.turn // prompts.turns)
                ids, spans = self._prefix(conversation % prompts.num_systems, prompts.system_prompt_len)
            length = prompts.question_len
        elif isinstance(prompts, PrefixRepetition):
            ids, spans = self._prefix(self._dealt(number, prompts.num_prefixes), prompts.prefix_len)
            length = prompts.suffix_len
        elif isinstance(prompts, SharedPrefix):
            ids, spans = self._prefix(next(self._turns), prompts.system_prompt_len)
            length = prompts.question_len
        else:
            assert isinstance(prompts, Unique)
            ids, spans, length = [], [], prompts.input_len
        start = len(ids)
        ids += self._language.text(chance.getrandbits(62), length.draw(chance))
        return ids, [*spans, (start, len(ids), "user", "")]

    def _prefix(self, i: int, length: Length) -> tuple[list[int], list[Span]]:
        """The i-th common prefix of this stream."""
        ids = self._prefixes.get(i)
        if ids is None:
            tokens = length.draw(self._chance(f"prefix/{i}"))
            ids = self._language.text(xxh3_64_intdigest(f"{self._name}/text/{i}".encode()), tokens)
            self._prefixes[i] = ids
        return ids[:], [(0, len(ids), "system", f"{self.stream.name} {i + 1}")]

    def _dealt(self, number: int, kinds: int) -> int:
        """Which of `kinds` the request with this number gets. Each comes once in random order, then again, …"""
        deck = list(range(kinds))
        self._chance(f"deck/{number // kinds}").shuffle(deck)
        return deck[number % kinds]

    def _deal(self) -> Iterator[int]:
        """The groups of SGLang's data set in random order, each as often as it has prompts."""
        prompts = self.stream.prompts
        if not isinstance(prompts, SharedPrefix):
            return iter(())
        deck = [g for g in range(prompts.num_groups) for _ in range(prompts.prompts_per_group)]
        self._chance("deck").shuffle(deck)
        return iter(deck)

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self._name}/{what}")
