"""The free queue and the pool: order, hashes, duplicates, events, and that a failed call changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import events as ev
from engine.kv.blocks import BlockPool, FreeQueue, NoFreeBlocks
from engine.kv.hashing import root_hash
from tests.engine.rig import Pool, block_hash

ROOT = root_hash(1)
A, B, C = (bytes([i]) * 16 for i in (1, 2, 3))


def pool_with(hashes: list[bytes], num_blocks: int = 11, block_size: int = 4) -> BlockPool:
    """Blocks 1.. in one table, stored under these hashes; their events are forgotten."""
    pool = Pool(num_blocks, block_size)
    ids = pool.allocate(0, len(hashes))
    pool.store(0, 0, ids, hashes, ROOT, [0] * (len(ids) * block_size))
    pool.events.clear()
    return pool


# ------------------------------------------------------------------------------------- the queue


@pytest.mark.conformance(1)
@pytest.mark.parametrize("num_blocks", [2, 3, 11])
def test_a_new_queue_holds_all_but_the_null_block_in_id_order(num_blocks: int) -> None:
    queue = FreeQueue(num_blocks)
    assert list(queue) == list(range(1, num_blocks)) and len(queue) == num_blocks - 1
    assert 0 not in queue and 1 in queue


@pytest.mark.conformance(2)
def test_popping_more_than_there_is_says_so_and_changes_nothing() -> None:
    queue = FreeQueue(4)
    assert queue.pop(1) == [1] and len(queue) == 2 and 1 not in queue
    with pytest.raises(NoFreeBlocks, match="no free blocks available"):
        queue.pop(3)
    assert list(queue) == [2, 3]
    queue.pop(2)
    with pytest.raises(NoFreeBlocks, match="no free blocks available"):
        queue.pop(1)
    assert list(queue) == [] and len(queue) == 0


@pytest.mark.conformance(3)
def test_a_block_is_taken_out_of_the_middle_once() -> None:
    queue = FreeQueue(6)
    for block, left in ((3, [1, 2, 4, 5]), (1, [2, 4, 5]), (5, [2, 4])):
        queue.remove(block)
        assert list(queue) == left and len(queue) == len(left)
        with pytest.raises(ValueError, match=rf"not in the free queue: \[{block}\]"):
            queue.remove(block)
    with pytest.raises(ValueError, match=r"not in the free queue: \[5, 0\]"):
        queue.remove(2, 5, 0)
    assert list(queue) == [2, 4] and len(queue) == 2
    queue.remove(4, 2)
    assert list(queue) == []


@pytest.mark.conformance(4)
def test_the_tail_takes_blocks_in_their_order() -> None:
    queue = FreeQueue(5)
    queue.pop(4)
    queue.push_tail([])
    assert list(queue) == []
    queue.push_tail([3, 1])
    queue.push_tail([4])
    assert list(queue) == [3, 1, 4] and len(queue) == 3


@pytest.mark.conformance(5)
def test_a_later_group_at_the_head_goes_before_an_earlier_one() -> None:
    queue = FreeQueue(7)
    queue.pop(6)
    queue.push_tail([1])
    queue.push_head([5, 6])
    queue.push_head([])
    queue.push_head([2, 3])
    assert queue.pop(5) == [2, 3, 5, 6, 1]


@pytest.mark.conformance(6, 8)
@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_drained_queue_fills_again(size: int) -> None:
    queue = FreeQueue(size + 1)
    assert queue.pop(0) == []
    taken = queue.pop(size)
    assert taken == list(range(1, size + 1)) and list(queue) == []
    queue.push_tail(taken[::-1])
    assert queue.pop(size) == taken[::-1]
    queue.push_head(taken)
    assert list(queue) == taken and len(queue) == size


@pytest.mark.conformance(19)
def test_a_negative_count_is_refused_and_inflates_nothing() -> None:
    pool = Pool(5, 4)
    with pytest.raises(ValueError, match="cannot take -1 blocks"):
        pool.allocate(0, -1)
    assert pool.num_available == 4
    pool.check([])


@pytest.mark.conformance(7)
@given(st.integers(2, 9), st.lists(st.tuples(st.sampled_from("prht"), st.integers(0, 8)), max_size=30))
def test_the_queue_is_a_list_with_fast_ends(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    queue, want = FreeQueue(num_blocks), list(range(1, num_blocks))
    out: list[int] = []
    for move, n in moves:
        if move == "p" and n <= len(want):
            assert queue.pop(n) == want[:n]
            out, want = out + want[:n], want[n:]
        elif move == "r" and want:
            block = want.pop(n % len(want))
            queue.remove(block)
            out.append(block)
        elif move in "ht" and out:
            some, out = out[: n % 3], out[n % 3 :]
            if move == "h":
                queue.push_head(some)
                want = some + want
            else:
                queue.push_tail(some)
                want = want + some
        assert list(queue) == want and len(queue) == len(want)
        assert [b in queue for b in range(num_blocks)] == [b in want for b in range(num_blocks)]


# -------------------------------------------------------------------------------------- the pool


@pytest.mark.conformance(9, 11)
def test_a_fresh_pool_hands_out_1_2_3_unreferenced_and_unhashed() -> None:
    pool = Pool(11, 16)
    assert pool.num_usable == pool.num_available == 10 and pool.num_active == pool.num_cached == 0
    assert all(pool.ref(b) == 0 and pool.hash_of(b) is None for b in range(11))
    assert pool.allocate(0, 3) == [1, 2, 3]
    assert [pool.ref(b) for b in range(5)] == [0, 1, 1, 1, 0]


@pytest.mark.conformance(9)
def test_a_block_has_at_most_one_hash() -> None:
    pool = pool_with([A, B])
    with pytest.raises(ValueError, match="without a hash"):
        pool.store(0, 0, [1], [C], ROOT, [0] * 4)
    assert pool.hash_of(1) == A and pool.events == []
    pool.unpublish([1], None, "invalid")
    assert pool.hash_of(1) is None and pool.lookup([A]) == []
    pool.store(0, 0, [1], [C], ROOT, [0] * 4)
    assert pool.lookup([C]) == [1]


@pytest.mark.conformance(10)
def test_pool_and_queue_are_slotted() -> None:
    """Ours are arrays, not one object a block, so only the two owners could grow by mistake."""
    for thing in (BlockPool(3, 4, [].append), FreeQueue(3)):
        assert not hasattr(thing, "__dict__")
        with pytest.raises(AttributeError):
            thing.unknown = 1  # type: ignore[attr-defined]


@pytest.mark.conformance(11)
def test_the_null_block_is_never_touched_released_stored_or_evicted() -> None:
    pool = pool_with([A])
    with pytest.raises(ValueError, match="not in the free queue"):
        pool.touch(1, [1, 0], "hit")
    with pytest.raises(ValueError, match="unreferenced"):
        pool.release(0, [1, 0])
    with pytest.raises(ValueError, match="referenced"):
        pool.store(0, 0, [0], [B], ROOT, [0] * 4)
    pool.unpublish([0], None, "invalid")
    assert pool.events == [] and pool.ref(0) == 0
    pool.check([[1]])


def test_a_release_that_is_wrong_changes_nothing() -> None:
    pool = pool_with([A, B])
    for ids in ([2, 3], [2, 2]):
        with pytest.raises(ValueError, match="unreferenced or repeated"):
            pool.release(0, ids)
    assert pool.events == []
    pool.check([[1, 2]])
    with pytest.raises(ValueError, match="2 blocks but 1 hashes"):
        pool.store(0, 2, pool.allocate(0, 2), [C], ROOT, [0] * 8)
    pool.check([[1, 2, 3, 4]])


def test_only_a_shared_block_is_copied() -> None:
    pool = pool_with([A], num_blocks=3)
    with pytest.raises(ValueError, match="only a shared block"):
        pool.copy(0, 0, 1)
    pool.touch(1, [1], "fork")
    assert pool.copy(1, 0, 1) == 2 and pool.ref(1) == pool.ref(2) == 1
    pool.touch(2, [1], "fork")
    pool.events.clear()
    with pytest.raises(NoFreeBlocks):
        pool.copy(2, 0, 1)
    assert pool.events == [] and pool.ref(1) == 2
    pool.check([[1], [2], [1]])


# ------------------------------------------------------------------------- hashes and duplicates


@pytest.mark.conformance(13, 14)
def test_of_two_blocks_with_one_hash_each_can_go_and_leaves_the_other() -> None:
    for first, second in ((1, 2), (2, 1)):
        pool = pool_with([A, A])
        assert pool.lookup([B]) == [] and pool.lookup([A]) == [1] and pool.num_hashes == 1
        pool.unpublish([3], None, "invalid")  # neither of them: nothing happens
        assert pool.events == []
        pool.unpublish([first], None, "invalid")
        assert pool.lookup([A]) == [second] and pool.num_hashes == 1
        pool.check([[1, 2]])
        pool.unpublish([second], None, "invalid")
        assert pool.lookup([A]) == [] and pool.num_hashes == 0
        pool.check([[1, 2]])


@pytest.mark.conformance(14)
@given(st.integers(1, 6), st.randoms())
def test_duplicates_can_be_evicted_in_any_order(copies: int, random: object) -> None:
    pool = pool_with([A] * copies)
    order = list(range(1, copies + 1))
    random.shuffle(order)  # type: ignore[attr-defined]
    for i, block in enumerate(order):
        assert pool.lookup([A])[0] in order[i:]
        pool.unpublish([block], None, "invalid")
        pool.check([range(1, copies + 1)])
    assert pool.lookup([A]) == []


@pytest.mark.conformance(15, 90)
def test_a_reallocated_block_loses_its_hash_before_it_is_handed_out() -> None:
    pool = pool_with([A, B], num_blocks=3)
    pool.release(0, [2, 1])
    assert pool.num_cached == 2 and pool.lookup([A, B]) == [1, 2]
    pool.events.clear()
    assert pool.allocate(5, 1) == [2]
    assert pool.events == [ev.BlocksEvicted([2], [B.hex()], 5, "reallocated"), ev.BlocksAllocated(5, [2])]
    assert pool.lookup([A, B]) == [1] and pool.num_cached == 1


@pytest.mark.conformance(16)
def test_storing_more_of_a_chain_keeps_what_was_stored() -> None:
    pool = Pool(5, 4)
    ids = pool.allocate(0, 3)
    pool.store(0, 0, ids[:2], [A, B], ROOT, [0] * 8)
    assert pool.num_hashes == 2
    pool.store(0, 2, ids[2:], [C], B, [0] * 4)
    assert pool.num_hashes == 3 and pool.lookup([A, B, C]) == [1, 2, 3]


def test_a_lookup_stops_at_the_first_miss_and_changes_nothing() -> None:
    pool = pool_with([A, C])
    assert pool.lookup([A, B, C]) == [1] and pool.lookup([B, A]) == []
    assert pool.events == [] and pool.ref(1) == 1


@pytest.mark.conformance(92)
def test_clearing_drops_every_hash_and_keeps_the_order() -> None:
    pool = pool_with([A, B, B])
    pool.release(0, [3, 2, 1])
    order = pool.eviction_order()
    pool.events.clear()
    pool.clear()
    assert pool.events == [ev.CacheCleared()] and pool.eviction_order() == order
    assert pool.num_hashes == pool.num_cached == 0 and pool.lookup([A]) == []
    pool.check([])


# ---------------------------------------------------------------------------------------- events


@pytest.mark.conformance(89, 94)
def test_storing_k_blocks_is_one_event_with_k_hashes_their_tokens_and_the_parent() -> None:
    """One event with arrays; the salt stands in it once, as block 0's."""
    pool = Pool(5, 2)
    ids = pool.allocate(3, 2)
    pool.events.clear()
    pool.store(3, 0, ids, [A, B], ROOT, [9, 8, 7, 6], salt=C)
    assert pool.events == [
        ev.BlocksStored(3, 0, [1, 2], [A.hex(), B.hex()], ROOT.hex(), [9, 8, 7, 6], C.hex())
    ]
    pool.store(3, 2, [], [], B, [])
    assert len(pool.events) == 1


@pytest.mark.conformance(90)
def test_an_allocation_evicts_k_blocks_before_it_stores_k() -> None:
    pool = pool_with([A, B], num_blocks=3)
    pool.release(0, [2, 1])
    pool.events.clear()
    ids = pool.allocate(1, 2)
    pool.store(1, 0, ids, [C, bytes(16)], ROOT, [1] * 8)
    assert [type(e) for e in pool.events] == [ev.BlocksEvicted, ev.BlocksAllocated, ev.BlocksStored]
    assert pool.events[0] == ev.BlocksEvicted([2, 1], [B.hex(), A.hex()], 1, "reallocated")


@pytest.mark.conformance(96)
def test_nothing_asked_is_nothing_told() -> None:
    pool = Pool(5, 4)
    assert pool.allocate(0, 0) == []
    pool.touch(0, [], "hit")
    pool.release(0, [])
    pool.store(0, 0, [], [], ROOT, [])
    pool.unpublish([1, 2], None, "unwritten")
    assert pool.events == []


def test_ids_in_events_are_no_aliases() -> None:
    pool = Pool(5, 4)
    ids = pool.allocate(0, 2)
    table = list(ids)
    pool.touch(1, table, "fork")
    pool.release(1, table[::-1])
    ids.clear()
    table.clear()
    assert [e.ids for e in pool.events] == [[1, 2], [1, 2], [2, 1]]  # type: ignore[attr-defined]


@pytest.mark.conformance(95)
def test_a_reader_recomputes_the_hashes_from_the_event_alone() -> None:
    tokens = [5, 6, 7, 8]
    first = block_hash(ROOT, b"".join(t.to_bytes(4, "little") for t in tokens[:2]), C)
    second = block_hash(first, b"".join(t.to_bytes(4, "little") for t in tokens[2:]))
    pool = Pool(5, 2)
    pool.store(0, 0, pool.allocate(0, 2), [first, second], ROOT, tokens, C)
    event = pool.events[-1]
    assert isinstance(event, ev.BlocksStored)
    parent = bytes.fromhex(event.parent)
    for i, h in enumerate(event.hashes):
        data = b"".join(t.to_bytes(4, "little") for t in event.token_ids[2 * i : 2 * i + 2])
        salt = bytes.fromhex(event.salt) if event.salt and not event.start_index + i else b""
        parent = block_hash(parent, data, salt)
        assert parent.hex() == h


# -------------------------------------------------------------------------- the pool's own word


def test_a_snapshot_tells_refs_queue_hashes_and_tables() -> None:
    pool = pool_with([A, B, A], num_blocks=8)
    pool.touch(1, [1, 2], "hit")
    pool.allocate(1, 1)
    pool.release(0, [3, 2, 1])
    snap = pool.snapshot({1: ([1, 2, 4], 11)})
    assert snap.refs == [1, 2, 1, 4, 1, 1]
    assert list(ev.from_runs(snap.queue)) == pool.eviction_order() == [5, 6, 7, 3]
    assert snap.hashed_ids == [1, 2, 3] and snap.hashes == [A.hex(), B.hex(), A.hex()]
    assert (snap.seq_ids, snap.tables, snap.computed) == ([1], [[1, 2, 4]], [11])


@given(st.lists(st.integers(1, 30), unique=True))
def test_runs_say_any_order(ids: list[int]) -> None:
    assert list(ev.from_runs(ev.to_runs(ids))) == ids


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p._ref.__setitem__(1, 2),
        lambda p: p._ref.__setitem__(3, 1),
        lambda p: p._hash.__setitem__(1, None),
        lambda p: p._hash.__setitem__(2, B),
        lambda p: p._hash.__setitem__(0, A),
        lambda p: p._table.__setitem__(B, 2),
        lambda p: p._queue.remove(4),
        lambda p: p._copies.__setitem__(C, {2: None}),
        lambda p: setattr(p, "_num_cached", 1),
    ],
)
def test_check_finds_whatever_is_wrong(harm: object) -> None:
    pool = pool_with([A])
    pool.allocate(0, 1)
    pool.check([[1, 2]])
    harm(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check([[1, 2]])
