"""The naive twin against a memory of single slots and against the core's own word; slots filled against tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import events as ev
from engine.config import EngineConfig
from engine.event_log import EventLog
from engine.params import SamplingParams
from engine.sizing.kv_size import waste
from engine.step.core import EngineCore
from engine.step.sequence import Status
from kvtop.state.dashboard import DashboardState
from kvtop.state.twin import NaiveTwin
from tests.kvtop.streams import Storm
from tests.toy_runner import ToyRunner


def follow(twin: NaiveTwin, batch: ev.StepBatch) -> None:
    """The batch, to a twin that belongs to no state."""
    twin.begin(batch)
    for e in batch.events:
        if type(e) in twin.handlers:
            getattr(twin, twin.handlers[type(e)])(e, DashboardState())
    twin.end()


class Slots:
    """A memory of single slots: each sequence takes the first gap that is long enough, or waits."""

    def __init__(self, slots: int, length: int) -> None:
        self.owner: list[int | None] = [None] * slots
        self.length = length
        self.start: dict[int, int] = {}
        self.queue: list[int] = []

    def come(self, who: int) -> None:
        self.queue.append(who)

    def go(self, who: int) -> None:
        if who in self.queue:
            self.queue.remove(who)
        elif who in self.start:
            at = self.start.pop(who)
            self.owner[at : at + self.length] = [None] * self.length

    def serve(self) -> None:
        while self.queue:
            gap = next((i for i in range(len(self.owner)) if self.is_free(i)), None)
            if gap is None:
                return
            who = self.queue.pop(0)
            self.start[who] = gap
            self.owner[gap : gap + self.length] = [who] * self.length

    def is_free(self, at: int) -> bool:
        piece = self.owner[at : at + self.length]
        return len(piece) == self.length and not any(o is not None for o in piece)


ACTS = st.sampled_from(["come", "write", "go"])


def drive(plan: list[tuple[str, int, int]], slots: int, length: int) -> None:
    twin, memory = NaiveTwin(slots, length), Slots(slots, length)
    tokens: dict[int, int] = {}
    for n, (what, who, count) in enumerate(plan):
        events: list[ev.Event] = []
        if what == "come" and who not in tokens:
            events = [ev.RequestAdmitted(who, who, 0)]
            tokens[who] = 0
            memory.come(who)
        elif what == "write" and who in tokens:
            tokens[who] = min(length, tokens[who] + count)
            events = [ev.TokensSampled([who], [], [0], [tokens[who]], [""])]
        elif what == "go" and who in tokens:
            events = [finished(who)]
            del tokens[who]
            memory.go(who)
        memory.serve()
        follow(twin, ev.StepBatch(n, 0.0, 0, 0, events))
        assert {w: p * length for w, p in twin.place.items()} == memory.start
        assert list(twin.waiting) == memory.queue
        assert twin.running == len(tokens)
        assert twin.filled == sum(tokens[w] for w in memory.start)
        assert twin.inside == sum(length - tokens[w] for w in memory.start)
        free = memory.owner.count(None)
        assert twin.idle + twin.between == free
        assert twin.filled + twin.inside == slots - free
        assert twin.idle // length == sum(memory.is_free(i) for i in range(0, slots, length))


def finished(request: int) -> ev.RequestFinished:
    return ev.RequestFinished(request, "stop", ev.Timings(0.0), ev.Usage(1, 0, 1, 0, 1))


@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["come", "write", "go"]), st.integers(0, 7), st.integers(1, 9)), max_size=60
    ),
    slots=st.integers(1, 60),
    length=st.integers(1, 20),
)
def test_first_fit_in_single_slots(plan: list[tuple[str, int, int]], slots: int, length: int) -> None:
    drive(plan, slots, length)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_storms(seed: int) -> None:
    """Forks, preemptions, aborts, failed steps: the twin runs what the core runs, and no token is ever lost."""
    state = DashboardState(strict=True)
    storm = Storm(seed, sink=state.apply)
    core = storm.core
    highest: dict[int, int] = {}
    for _ in range(120):
        storm.act()
        core.flush()
        live = {
            s.seq_id: s.num_computed
            for q in core.requests.values()
            if q.status in (Status.RUNNING, Status.PREEMPTED)
            for s in q.live
        }
        twin = state.twin
        assert twin.running == len(live)
        assert set(twin.place) | set(twin.waiting) == set(live)
        for seq_id, computed in live.items():
            highest[seq_id] = max(highest.get(seq_id, 0), computed)
            assert computed <= twin.tokens(seq_id) <= max(highest[seq_id], twin.length)
        assert twin.filled == sum(twin.tokens(i) for i in twin.place)
        assert len(set(twin.place.values())) == len(twin.place) <= twin.places
        assert not twin.waiting or len(twin.place) == twin.places
        check_slots(state)
    storm.drain()
    assert state.twin.running == state.twin.filled == state.pool.filled == 0


def check_slots(state: DashboardState) -> None:
    """Counted anew from tables and computed tokens: each referenced block once, its fullest writer counts."""
    held: dict[int, int] = {}
    mirror, size = state.pool.mirror, state.block_size
    for seq_id, table in mirror.tables.items():
        computed = state.requests.sequences[seq_id].num_computed
        for i, block in enumerate(table):
            slots = min(size, max(0, computed - i * size))
            held[block] = max(held.get(block, 0), slots)
    assert state.pool.held == len(held) * size
    assert {b: int(state.pool.fill[b]) for b in held} == held
    assert state.pool.filled == sum(held.values()) <= state.pool.held


# ------------------------------------------------------------------------------- the article's walk


def test_the_walk_of_the_article() -> None:
    """A prompt of 1,024 tokens, ten generated tokens computed: 0.6 % of the blocks' slots are empty, 49.5 % of a
    buffer of 2,048."""
    state = DashboardState(strict=True)
    runner = ToyRunner(257, 16, 1000, max_model_len=2048)
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=4)
    log = EventLog(lambda: 0.0, state.apply)
    log.emit(ev.EngineStarted(1, "live", ["blocks"], "toy", "cpu", "int32", 257, 16, 1, 0, 1, 0.0, 2048, {}))
    core = EngineCore(config, runner, log, hash_seed=1, token_bytes=lambda i: b"a")
    core.add_request(1, list(range(900)) + list(range(124)), SamplingParams(max_tokens=64, temperature=0))
    for _ in range(11):
        core.step()
    assert state.pool.active == 65
    assert (state.pool.filled, state.pool.held) == (1034, 1040)
    assert f"{waste(state.pool.filled, state.pool.held):.1%}" == "0.6%"
    assert (state.twin.filled, state.twin.reserved, state.twin.inside) == (1034, 2048, 1014)
    assert f"{waste(state.twin.filled, state.twin.reserved):.1%}" == "49.5%"
    assert (state.twin.places, state.twin.between) == (2, 16)
    assert state.twin.idle == 2048


# ---------------------------------------------------------------------------------- alone, by hand


def batches(*steps: list[ev.Event], first: int = 0) -> list[ev.StepBatch]:
    return [ev.StepBatch(first + i, 0.0, 0, 0, events) for i, events in enumerate(steps)]


def test_a_memory_shorter_than_a_reservation_refuses_all() -> None:
    twin = NaiveTwin(100, 128)
    for batch in batches([ev.RequestAdmitted(1, 1, 0)], [ev.TokensSampled([1], [], [0], [9], [""])]):
        follow(twin, batch)
    assert (twin.places, twin.filled, len(twin.waiting), twin.waited) == (0, 0, 1, 1)
    assert twin.between == 100


def test_a_preempted_sequence_keeps_its_place_and_its_tokens() -> None:
    twin = NaiveTwin(64, 32)
    reported = [
        [ev.RequestAdmitted(1, 1, 0), ev.BlocksAllocated(1, [1, 2])],
        [ev.TokensSampled([1], [], [0], [20], [""])],
        [ev.BlocksReleased(1, [2, 1]), ev.RequestPreempted(1, [1], 20)],
        [ev.RequestAdmitted(1, 1, 8, True), ev.BlocksAllocated(1, [3])],
        [ev.TokensSampled([1], [], [0], [12], [""])],
    ]
    for batch in batches(*reported):
        follow(twin, batch)
    assert (twin.place, twin.filled) == ({1: 0}, 20)
    for batch in batches(
        [ev.TokensSampled([1], [], [0], [21], [""])], [ev.TokensSampled([1], [], [0], [19], [""])], first=5
    ):
        follow(twin, batch)
    assert twin.filled == 19  # refused drafts are another matter


def test_a_branch_that_ends_alone_leaves() -> None:
    twin = NaiveTwin(64, 32)
    reported = [
        [ev.RequestAdmitted(1, 1, 0), ev.BlocksAllocated(1, [1]), ev.TokensSampled([1], [], [0], [16], [""])],
        [ev.SequenceForked(1, 1, 2), ev.BlocksTouched(2, [1], "fork"), ev.SequenceForked(1, 1, 3)],
    ]
    for batch in batches(*reported):
        follow(twin, batch)
    assert (twin.place, list(twin.waiting), twin.filled) == ({1: 0, 2: 1}, [3], 32)
    follow(twin, batches([ev.BlocksReleased(2, [1])], first=2)[0])
    assert (twin.place, list(twin.waiting), twin.filled) == ({1: 0, 3: 1}, [], 32)
    follow(twin, batches([ev.BeamPruned(1, 3)], first=3)[0])
    assert twin.place == {1: 0}
    follow(twin, batches([finished(1)], first=4)[0])
    assert (twin.running, twin.filled, twin.idle) == (0, 0, 64)


def test_after_a_loss_the_pool_says_who_is_left() -> None:
    twin = NaiveTwin(96, 32)
    follow(twin, batches([ev.RequestAdmitted(i, i, 0) for i in (1, 2, 3)])[0])
    follow(twin, batches([ev.TokensSampled([1, 2], [], [0, 0], [5, 6], ["", ""])], first=1)[0])
    snapshot = ev.PoolSnapshot([], [], [], [], [2, 9], [[4], [5]], [8, 1])
    follow(twin, batches([snapshot], first=2)[0])
    assert twin.running == 3  # nothing was lost, so the snapshot says nothing new
    follow(twin, batches([snapshot], first=7)[0])
    assert (twin.place, twin.filled) == ({2: 1}, 8)


@pytest.mark.parametrize("seed", [3, 11])
def test_a_copy_goes_on_alone(seed: int) -> None:
    state = DashboardState(strict=True)
    storm = Storm(seed, sink=state.apply)
    for _ in range(60):
        storm.act()
    copied, before = state.copy(), (state.twin.filled, dict(state.twin.place), state.pool.filled)
    for _ in range(60):
        storm.act()
    assert (copied.twin.filled, copied.twin.place, copied.pool.filled) == before
    for batch in storm.batches[copied.seq + 1 :]:
        copied.apply(batch)
    mine, other = state.twin, copied.twin
    assert all(getattr(mine, n) == getattr(other, n) for n in NaiveTwin.__slots__)
    assert copied.pool.filled == state.pool.filled
