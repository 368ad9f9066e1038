"""DashboardState against a naive mirror, the pool's own words and the requests' own figures."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import events as ev
from kvtop.state.dashboard import BlockState, DashboardState, StateError
from tests.engine.mirror import Mirror
from tests.kvtop.stage import Stage
from tests.kvtop.streams import Storm, rich_stream


def naive_fill(mirror: Mirror, b: int) -> int:
    """Slots written: the most that an owner computed; a cached block is full, a free one empty. Whoever has it
    from the cache counts only where nobody else has it: it may be hit before its writer's step has run."""
    size = mirror.block_size
    if not mirror.ref[b]:
        return size if mirror.hash[b] else 0
    owners = {s: t for s, t in mirror.tables.items() if b in t}
    writers = {s: t for s, t in owners.items() if (s, b) not in mirror.hit}
    return max(
        min(size, max(0, mirror.computed.get(s, 0) - t.index(b) * size))
        for s, t in (writers or owners).items()
    )


def naive_state(mirror: Mirror, b: int) -> BlockState:
    """The legend of the map, word for word."""
    if mirror.ref[b] == 0:
        return BlockState.CACHED if mirror.hash[b] else BlockState.FREE
    if mirror.ref[b] > 1:
        return BlockState.SHARED
    return BlockState.ACTIVE if naive_fill(mirror, b) == mirror.block_size else BlockState.FILLING


def compare(state: DashboardState, mirror: Mirror) -> None:
    """Everything that the law fixes."""
    n = len(mirror.ref)
    assert state.pool.ref.tolist() == mirror.ref
    assert [state.pool.hash_of(b) for b in range(n)] == mirror.hash
    assert state.pool.hashed.tolist() == [h is not None for h in mirror.hash]
    assert state.pool.next_out(n) == mirror.queue
    queued = np.array(mirror.queue, int)
    assert queued[np.argsort(state.pool.order[queued])].tolist() == mirror.queue
    assert {s: t for s, t in state.pool.mirror.tables.items() if t} == mirror.tables
    assert state.pool.fill.tolist() == [naive_fill(mirror, b) for b in range(n)]
    assert state.pool.state.tolist() == [naive_state(mirror, b) for b in range(n)]
    free = sum(not mirror.hash[b] for b in mirror.queue)
    assert (state.pool.free, state.pool.cached) == (free, len(mirror.queue) - free)
    assert state.pool.active == n - 1 - len(mirror.queue)
    before = next((i for i, b in enumerate(mirror.queue) if mirror.hash[b]), len(mirror.queue))
    assert state.pool.blocks_until_eviction == before
    assert state.pool.num_hashes == len({h for h in mirror.hash if h})


class Pair:
    """A strict state and a naive mirror over the same batches, compared after each."""

    def __init__(self) -> None:
        self.state = DashboardState(strict=True)
        self.mirror: Mirror | None = None
        self._pending: list[ev.StepBatch] = []

    def __call__(self, batch: ev.StepBatch) -> None:
        self.state.apply(batch)
        self._pending.append(batch)
        if self.mirror is None and self.state.started:
            self.mirror = Mirror(self.state.num_blocks, self.state.block_size)
        if self.mirror is not None:
            for b in self._pending:
                self.mirror.apply(b)
            self._pending.clear()
            compare(self.state, self.mirror)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_the_law_holds_at_every_batch_of_a_storm(seed: int, ahead: int) -> None:
    storm = Storm(seed, vocab=2 if seed % 3 == 0 else 60, sink=Pair(), ahead=ahead)
    for _ in range(250):
        storm.act()
    storm.drain()
    storm.stop()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 60), st.sampled_from([1, 2, 4, 16]), st.integers(4, 30))
def test_the_law_holds_for_any_pool(seed: int, acts: int, size: int, blocks: int) -> None:
    storm = Storm(seed, num_blocks=blocks, block_size=size, sink=Pair())
    for _ in range(acts):
        storm.act()
    storm.stop()


def test_dirty_blocks_are_exactly_enough_to_keep_a_picture() -> None:
    state = DashboardState(strict=True)
    picture: np.ndarray | None = None
    for batch in rich_stream():
        state.apply(batch)
        ids = state.pool.take_dirty()
        assert len(ids) == len(set(ids.tolist()))
        if state.started is None:
            continue
        now = np.stack([state.pool.ref, state.pool.state, state.pool.fill])
        if picture is None:
            picture = np.full_like(now, -1)
        picture[:, ids] = now[:, ids]
        assert (picture == now).all()
    assert not len(state.pool.take_dirty())


def test_requests_agree_with_what_the_engine_says_at_their_end() -> None:
    batches = rich_stream()
    state = DashboardState(strict=True)
    for batch in batches:
        state.apply(batch)
    finished = [e for b in batches for e in b.events if isinstance(e, ev.RequestFinished)]
    assert len(finished) == len(state.requests) > 20
    assert not state.requests.running
    assert not state.requests.waiting
    for e in finished:
        view = state.requests[e.request_id]
        assert view.phase == "finished"
        assert view.finish_reason == e.reason
        assert view.cached_tokens == e.usage.cached_tokens
        assert view.preemptions == e.usage.preemptions
        assert view.summary()["output_tokens"] == e.usage.output_tokens
        assert len(view.hit_ids) == view.hit_blocks
        if len(view.seq_ids) == 1:
            assert len(view.output_ids) == view.num_output == e.usage.output_tokens
    looks = [e for b in batches for e in b.events if isinstance(e, ev.PrefixLookup) and not e.resumed]
    assert state.cache.lookups == len(looks)
    rate = sum(e.hit_tokens for e in looks) / sum(e.prompt_tokens for e in looks)
    assert state.cache.hit_rate() == rate
    assert all(state.requests[e.request_id].explanation is not None for e in looks)
    preempted = sum(isinstance(e, ev.RequestPreempted) for b in batches for e in b.events)
    assert state.requests.preemptions == preempted > 0


@pytest.mark.conformance(52, 56)
def test_no_lookups_is_not_a_hit_rate_of_zero() -> None:
    state = DashboardState()
    assert state.cache.hit_rate() is None
    assert "hit_rate" not in state.summary()["prefix_cache"]


def test_log_probabilities_stand_in_the_summary_with_their_texts() -> None:
    state = DashboardState()
    e: list[ev.Event] = [
        ev.RequestQueued(0, [1, 2], 0.0, params={"logprobs": 1}),
        ev.RequestAdmitted(0, 0, 0),
        ev.TokenPieces([5, 6], [b"yes", b"no"]),
        ev.TokensSampled([0], [5], [1], [2], ["yes"]),
        ev.TokenLogprobs([0], [5], [-1.25], [[6]], [[-0.5]]),
    ]
    state.apply(ev.StepBatch(0, 0.0, 0, 0, e))
    (row,) = state.summary()["requests"]
    top = {"token": 6, "text": "no", "logprob": -0.5}
    assert row["logprobs"] == [{"token": 5, "text": "yes", "logprob": -1.25, "top": [top]}]


def test_step_counts_agree_with_the_engines_own() -> None:
    state = DashboardState(strict=True)
    checked = 0
    for batch in rich_stream():
        state.apply(batch)
        for e in batch.events:
            if isinstance(e, ev.StepCompleted) and e is batch.events[-1]:
                assert (e.free, e.active, e.cached) == (state.pool.free, state.pool.active, state.pool.cached)
                assert e.queues == {
                    "running": len(state.requests.running),
                    "waiting": len(state.requests.waiting),
                    "preempted": sum(state.requests[i].phase == "preempted" for i in state.requests.waiting),
                }
                checked += 1
    assert checked > 50


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_the_waiting_are_in_the_engines_order(seed: int, policy: str) -> None:
    state = DashboardState(strict=True)
    storm = Storm(seed, sink=state.apply, scheduling_policy=policy)
    most = 0
    for _ in range(200):
        storm.act()
        if not storm.core.has_work:
            continue
        storm.core.flush()
        waiting = [r.request_id for r in storm.core.scheduler.waiting]
        assert state.requests.waiting == waiting
        most = max(most, len(waiting))
    assert most


def test_an_older_recording_has_no_positions() -> None:
    """A new request waits at the end, a preempted one at the head."""
    state = DashboardState()
    events: list[ev.Event] = [
        ev.RequestQueued(1, [1], 0.0),
        ev.RequestQueued(2, [1], 0.0),
        ev.RequestAdmitted(1, 1, 0),
        ev.RequestPreempted(1, [1], 1),
        ev.RequestQueued(3, [1], 0.0),
    ]
    state.apply(ev.StepBatch(0, 0.0, 0, 0, events))
    assert state.requests.waiting == [1, 2, 3]


def test_a_copy_goes_on_alone_and_restore_brings_it_back() -> None:
    batches = rich_stream()
    half = len(batches) // 2
    state = DashboardState(strict=True)
    for batch in batches[:half]:
        state.apply(batch)
    kept = state.copy()
    before = fingerprint(kept)
    for batch in batches[half:]:
        state.apply(batch)
    assert fingerprint(kept) == before, "going on changed the copy"
    end = fingerprint(state)
    generation = state.generation
    state.restore(kept)
    assert fingerprint(state) == before
    assert state.generation > generation
    for batch in batches[half:]:
        state.apply(batch)
    assert fingerprint(state) == end
    assert fingerprint(kept) == before


def fingerprint(state: DashboardState) -> str:
    """Everything that a reader can see, as text."""
    columns = [
        getattr(state.pool, n).tolist()
        for n in ("ref", "state", "fill", "hashed", "born", "touched", "hits", "last_seq")
    ]
    mirror = state.pool.mirror
    parts = [
        columns,
        list(mirror.queue()),
        mirror.hash,
        sorted(mirror.where.items()),
        sorted(mirror.tables.items()),
        {i: [getattr(r, f) for f in r.__slots__] for i in state.requests for r in [state.requests[i]]},
        {i: [getattr(s, f) for f in s.__slots__] for i, s in state.requests.sequences.items()},
        list(state.moments),
        state.requests.waiting,
        state.requests.running,
        [
            (
                state.cache.lookups,
                state.cache.hit_tokens,
                state.pool.evictions,
                state.pool.duplicates,
                state.pool.copies,
            ),
            (
                state.requests.preemptions,
                state.steps.output_tokens,
                state.t,
                state.seq,
                state.stream.step,
                state.stream.num_events,
            ),
        ],
        [getattr(state.series, n).rows().tolist() for n in ("ttft", "itl", "hit_rate", "step")],
        [
            getattr(state.series, n).points(state.t, 10)[1].tolist()
            for n in ("output", "prefill", "evictions")
        ],
        state.summary(),
    ]
    return repr(parts)


def test_seconds_that_slow_motion_added_stay_out_of_the_latencies() -> None:
    batches = rich_stream()
    slow = [
        msgspec.structs.replace(
            b,
            events=[
                msgspec.structs.replace(e, slow=True) if isinstance(e, ev.StepCompleted) else e
                for e in b.events
            ],
        )
        for b in batches
    ]
    fast_state, slow_state = DashboardState(strict=True), DashboardState(strict=True)
    for a, b in zip(batches, slow, strict=True):
        fast_state.apply(a)
        slow_state.apply(b)
    assert len(fast_state.series.itl) > 50
    assert len(fast_state.series.ttft) > 10
    assert not len(slow_state.series.itl)
    assert not len(slow_state.series.ttft)
    assert slow_state.steps.output_tokens == fast_state.steps.output_tokens


# ------------------------------------------------------------------------------------------ losses


def test_a_lost_batch_is_counted_and_the_next_snapshot_heals() -> None:
    batches = rich_stream()
    snapshots = [i for i, b in enumerate(batches) if isinstance(b.events[-1], ev.PoolSnapshot)]
    lost = snapshots[1] - 4
    whole, holed = DashboardState(strict=True), DashboardState()
    for i, batch in enumerate(batches):
        whole.apply(batch)
        if not lost <= i < lost + 3:
            holed.apply(batch)
        if i == lost + 3:
            assert holed.stream.losses == 3
            assert not holed.stream.synced
        if i == snapshots[1]:
            assert holed.stream.synced
        if i >= snapshots[1]:
            assert holed.pool.ref.tolist() == whole.pool.ref.tolist()
            assert holed.pool.next_out(99) == whole.pool.next_out(99)
            assert holed.pool.hashed.tolist() == whole.pool.hashed.tolist()
    assert holed.stream.losses == 3


def test_the_strict_state_names_the_law_that_broke() -> None:
    batches = rich_stream()
    state = DashboardState(strict=True)
    for batch in batches[:20]:
        state.apply(batch)
    with pytest.raises(StateError, match="seq is not contiguous"):
        state.apply(batches[21])
    again = state.copy()
    with pytest.raises(StateError, match="first_event"):
        again.apply(msgspec.structs.replace(batches[20], first_event=3))


@pytest.mark.parametrize(
    ("event", "law"),
    [
        (ev.BlocksAllocated(1, [3]), "head"),
        (ev.BlocksAllocated(1, [0]), "head"),
        (ev.BlocksTouched(1, [99], "hit"), "not one of"),
        (ev.BlocksTouched(1, [0], "hit"), "not one of"),
        (ev.BlocksReleased(1, [1]), "table"),
        (ev.BlocksCopied(1, 0, 1, 2), "table"),
        (ev.BlocksStored(1, 0, [1], ["00" * 16], "00" * 16, [1] * 4), "table"),
        (ev.BlocksEvicted([1], ["00" * 16], None, "invalid"), "does not carry"),
    ],
)
def test_an_impossible_pool_event_is_refused(event: ev.Event, law: str) -> None:
    storm = Storm(3, num_blocks=8, block_size=4)
    state, loose = DashboardState(strict=True), DashboardState()
    for batch in storm.batches:
        state.apply(batch)
        loose.apply(batch)
    batch = ev.StepBatch(state.seq + 1, state.t, 0, state.stream.num_events, [event])
    with pytest.raises(StateError, match=law):
        state.apply(batch)
    loose.apply(batch)
    assert loose.stream.losses == 1
    assert not loose.stream.synced


def test_a_hostile_pool_size_is_not_believed() -> None:
    storm = Storm(3)
    begin = msgspec.structs.replace(storm.batches[1].events[0], num_blocks=1 << 50)
    state = DashboardState()
    state.apply(storm.batches[0])
    state.apply(msgspec.structs.replace(storm.batches[1], events=[begin]))
    assert state.stream.losses == 1
    assert state.num_blocks == 0


@pytest.mark.conformance(98)
def test_unknown_events_are_skipped_and_counted() -> None:
    state = DashboardState(strict=True)
    state.apply(ev.StepBatch(0, 0.0, 0, 0, [ev.UnknownEvent("Teleported"), ev.ModelLoading(1, 2, "x")]))
    assert state.stream.unknown == {"Teleported": 1}
    assert state.engine.loading is not None


# ------------------------------------------------------------------------------------------ blocks


def test_a_block_tells_its_owners_text_and_place() -> None:
    storm = Storm(1, num_blocks=16, block_size=4)
    state = DashboardState(strict=True)
    rid = storm.submit([5, 6, 7, 8, 9, 10], max_tokens=3)
    storm.core.step()
    for batch in storm.batches:
        state.apply(batch)
    first, second = state.table(rid)
    info = state.block(first)
    assert (info.ref, info.state, info.fill) == (1, BlockState.ACTIVE, 4)
    assert info.token_ids == (5, 6, 7, 8)
    assert info.text == "fghi"
    assert info.owners == [(rid, 0)]
    assert info.last_owner == rid
    assert info.eviction_place is None
    assert info.parent == state.history.root
    half = state.block(second)
    assert half.state is BlockState.FILLING
    assert half.fill == 2
    assert half.text == "jk"
    assert half.hash is None
    seen = len(storm.batches)
    storm.drain()
    for batch in storm.batches[seen:]:
        state.apply(batch)
    assert state.block(first).state is BlockState.CACHED
    assert state.block(first).eviction_place == state.pool.next_out(99).index(first)
    assert state.table(rid)[:2] == [first, second]
    with pytest.raises(IndexError):
        state.block(16)


def test_an_evicted_content_is_remembered_with_who_took_it() -> None:
    storm = Storm(1, num_blocks=6, block_size=4)
    a = storm.submit([1, 2, 3, 4] * 3, max_tokens=1)
    storm.drain()
    b = storm.submit([9, 8, 7, 6] * 4, max_tokens=1)
    storm.drain()
    state = DashboardState(strict=True)
    for batch in storm.batches:
        state.apply(batch)
    moment = next(m for m in state.moments if m.kind == "evicted")
    assert moment.request_id == b
    assert state.requests[b].evicted_ids == list(moment.ids)
    record = state.history.get(moment.hashes[0])
    assert record is not None
    assert record.gone is not None
    assert record.gone.why == "reallocated"
    assert state.requests.of_sequence(record.gone.by_seq or 0) == b
    assert state.vocabulary.text(record.token_ids) == "bcde"
    assert state.requests[a].evicted_ids == []


def test_history_stays_bounded() -> None:
    state = DashboardState()
    for batch in rich_stream():
        state.apply(batch)
    history = copy.copy(state.history)
    history.limit = 5
    live = set(state.pool.mirror.where)
    history._trim()
    assert live <= set(history._records)
    assert len(history) <= max(5, len(live))
    for h in live:
        record = history.get(h)
        assert record is not None
        assert record in history.children(record.parent)


def test_begin_anew_forgets_requests_and_keeps_blocks() -> None:
    """What comes after a warm-up reads as if it came first, and the pool stays exact."""
    stage = Stage(num_blocks=60)
    stage.submit("why?", " ".join(f"w{i}" for i in range(300)))
    stage.run()
    n = len(stage.batches)
    stage.submit("how?", " ".join(f"w{i}" for i in range(300)))
    state = DashboardState(strict=True)
    for batch in stage.batches[:n]:
        state.apply(batch)
    cached = state.pool.cached
    state.begin_anew()
    assert not state.requests and state.cache.hit_rate() is None and state.pool.cached == cached > 0
    assert not len(state.series.ttft) and state.cache.latest_lookup is None
    for batch in stage.batches[n:]:
        state.apply(batch)
    with pytest.raises(ValueError, match="under way"):
        state.begin_anew()
    n = len(stage.batches)
    stage.run()
    stage.stop()
    for batch in stage.batches[n:]:
        state.apply(batch)
    assert list(state.requests) == [1] and state.requests[1].done and state.requests[1].hit_blocks > 0
    assert state.cache.lookups == 1 and state.requests.skipped == 1 and state.stream.losses == 0
