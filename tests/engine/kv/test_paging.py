"""Tables over the pool: look-up, hits, growth, publication, forks and what freeing leaves behind."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import events as ev
from engine.kv.hashing import pack, root_hash
from tests.engine.rig import Books, block_hash, prompt

COMMON = prompt(48)


# ------------------------------------------------------------------------- admission and freeing


@pytest.mark.conformance(21)
def test_a_cold_prompt_of_55_tokens_takes_4_blocks_and_hashes_3() -> None:
    books = Books()
    seq = books.sequence(prompt(55))
    assert len(books.paging.queried(seq)) == 3 and books.paging.lookup(seq) == []
    seq = books.start(prompt(55))
    assert seq.table == [1, 2, 3, 4] and books.refs(seq.table) == [1, 1, 1, 1]
    parent = root_hash(7)
    for i, block in enumerate(seq.table[:3]):
        parent = block_hash(parent, pack(seq.tokens[16 * i : 16 * i + 16]))
        assert books.pool.hash_of(block) == parent
    assert books.pool.hash_of(4) is None and books.pool.num_hashes == 3


@pytest.mark.conformance(22, 23, 24, 25)
def test_hits_sharing_and_the_order_in_which_blocks_go() -> None:
    books = Books()
    first = books.start(COMMON + prompt(7, 1))
    second = books.start(COMMON + prompt(5, 2))
    assert second.table == [1, 2, 3, 5] and second.num_published == 3
    assert books.refs([1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
    assert books.pool.num_available == 5

    books.end(first)
    books.end(second)
    assert books.pool.eviction_order() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    third = books.start(COMMON + prompt(3, 3))  # the owners are gone: three out of the middle, one new
    assert third.table == [1, 2, 3, 5] and books.pool.num_available == 6
    books.end(third)
    assert books.pool.eviction_order() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    order = books.pool.eviction_order()
    stranger = books.start(prompt(160, 4))  # a miss that needs them all takes the cached ones last
    assert stranger.table == order and books.pool.num_available == 0
    assert books.paging.lookup(books.sequence(COMMON + [1])) == []


@pytest.mark.conformance(26)
def test_a_chain_loses_its_tail_first_and_the_older_chain_goes_first() -> None:
    books = Books()
    a = books.start(prompt(5 * 16 + 7))
    b = books.start(prompt(48, 1))
    books.end(a)
    assert books.pool.eviction_order() == [6, 10, 5, 4, 3, 2, 1]
    books.end(b)
    assert books.pool.eviction_order() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    again = books.start(prompt(2 * 16) + prompt(3, 2))
    assert again.table == [1, 2, 6]
    assert books.pool.eviction_order() == [10, 5, 4, 3, 9, 8, 7]


@pytest.mark.conformance(27)
def test_a_block_just_hit_is_never_taken_for_the_same_sequence() -> None:
    books = Books(num_blocks=3)
    books.end(books.start(prompt(32)))
    assert books.pool.eviction_order() == [2, 1]
    seq = books.start(prompt(16) + prompt(16, 1))
    assert seq.table == [1, 2]


@pytest.mark.conformance(28, 29)
def test_hits_that_nobody_holds_count_against_what_is_free() -> None:
    books = Books()
    books.end(books.start(COMMON))
    books.start(prompt(80, 1))
    assert books.pool.num_available == 5
    for more, need in ((32, 5), (33, 6)):
        seq = books.sequence(COMMON + prompt(more, 2))
        hits = books.paging.lookup(seq)
        assert hits == [1, 2, 3] and books.refs(hits) == [0, 0, 0]
        assert books.paging.blocks_to_admit(seq, hits, len(seq)) == need
    # The scheduler checks this before. Without the check, grow returns False and changes nothing.
    books.paging.admit(seq, hits, books.flight)
    before = books.pool.eviction_order(), len(books.pool.events)
    assert not books.grow(seq, len(seq)) and seq.table == hits
    assert (books.pool.eviction_order(), len(books.pool.events)) == before
    books.check()


@pytest.mark.conformance(29)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), max_size=12))
def test_the_gate_counts_exactly_what_admission_takes(moves: list[tuple[int, int, bool]]) -> None:
    books = Books(num_blocks=12, block_size=4)
    for family, length, keep in moves:
        seq = books.sequence(prompt(length, family))
        hits = books.paging.lookup(seq)
        free = books.pool.num_available
        need = books.paging.blocks_to_admit(seq, hits, length)
        if need <= free:
            books.begin_step()
            books.paging.admit(seq, hits, books.flight)
            assert (
                books.paging.blocks_to_grow(seq, seq.num_computed, length)
                == need - free + books.pool.num_available
            )
            assert books.grow(seq, length)
            books.publish(seq, length)
            seq.num_computed = length
            assert free - books.pool.num_available == need
            books.check()
        if not keep or need > free:
            books.end(seq)


@pytest.mark.conformance(30)
@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (1, 0)])
def test_at_least_one_token_is_computed_and_an_aligned_resend_computes_its_last_block(
    length: int, cached: int
) -> None:
    """The whole last block is computed again, into a duplicate: no copy of the cached one."""
    books = Books()
    books.end(books.start(prompt(length)))
    seq = books.start(prompt(length))
    assert len(books.paging.queried(seq)) * 16 == cached == seq.table.index(seq.table[-1]) * 16
    copies = books.pool.lookup(seq.hashes)
    if length % 16 == 0:
        assert copies[-1] != seq.table[-1]
        assert books.pool.hash_of(copies[-1]) == books.pool.hash_of(seq.table[-1]) is not None
    assert copies[: cached // 16] == seq.table[: cached // 16]


@pytest.mark.conformance(35)
def test_who_computes_the_same_content_beside_another_gets_blocks_of_its_own() -> None:
    """Two that were looked up before either was published; we have no request that refuses to read."""
    books = Books()
    books.begin_step()
    pair = [books.sequence(prompt(32)) for _ in range(2)]
    for seq in pair:
        books.admit(seq)
        assert books.grow(seq, 32)
    for seq in pair:
        books.publish(seq, 32)
    books.check()
    a, b = (s.table for s in pair)
    assert (a, b) == ([1, 2], [3, 4]) and books.refs(a + b) == [1, 1, 1, 1]
    assert [books.pool.hash_of(x) for x in a] == [books.pool.hash_of(x) for x in b]
    assert books.pool.num_hashes == 2


# -------------------------------------------------------------------------------------- decoding


@pytest.mark.conformance(16, 31, 91)
def test_decoding_allocates_at_the_border_and_publishes_what_it_filled() -> None:
    books = Books()
    seq = books.start(prompt(55))
    books.pool.events.clear()
    books.decode(seq, prompt(4, 1))
    assert books.pool.events == [] and len(seq.table) == 4
    books.decode(seq, prompt(19, 2))
    assert [type(e) for e in books.pool.events] == [ev.BlocksStored, ev.BlocksAllocated]
    stored = books.pool.events[0]
    assert isinstance(stored, ev.BlocksStored)
    assert (stored.start_index, stored.ids, stored.token_ids) == (3, [4], seq.tokens[48:64].tolist())
    assert stored.parent == seq.hashes[2].hex()
    assert len(seq.table) == 5 and books.pool.hash_of(5) is None


@pytest.mark.conformance(32)
def test_a_longer_prompt_hits_what_was_decoded() -> None:
    books = Books()
    seq = books.start(prompt(20))
    books.decode(seq, prompt(30, 1))
    tokens = seq.tokens.tolist()
    books.end(seq)
    assert len(books.paging.lookup(books.sequence(tokens + [5]))) == 3


@pytest.mark.conformance(34)
def test_without_caching_nothing_hits_blocks_return_and_a_full_pool_says_no() -> None:
    books = Books(num_blocks=5, block_size=4, caching=False)
    first = books.start(prompt(10))
    assert first.table == [1, 2, 3]
    books.end(first)
    second = books.start(prompt(16))
    assert books.pool.num_available == 0 and books.pool.num_hashes == 0
    third = books.sequence(prompt(4))
    assert books.paging.lookup(third) == [] and not books.grow(third, 4) and third.table == []
    books.end(second)
    assert books.pool.num_available == 4 and books.pool.num_cached == 0
    assert not any(isinstance(e, ev.BlocksStored) for e in books.pool.events)


@pytest.mark.conformance(36)
def test_another_salt_misses_and_the_same_one_hits() -> None:
    books = Books(num_blocks=20)
    books.end(books.start(COMMON, salt="a"))
    assert books.start(COMMON + [1], salt="a").table[:3] == [1, 2, 3]
    for other in (None, "b", "a "):
        assert books.paging.lookup(books.sequence(COMMON + [1], salt=other)) == []
    salts = [e.salt for e in books.pool.events if isinstance(e, ev.BlocksStored)]
    assert len(salts) == 1 and salts[0] is not None and len(salts[0]) == 32


def test_publishing_twice_stores_once() -> None:
    books = Books()
    seq = books.start(prompt(48))
    books.pool.events.clear()
    books.publish(seq, 48)
    assert books.pool.events == []


# ----------------------------------------------------------------------------------------- forks


@pytest.mark.conformance(102)
def test_four_branches_hold_the_prompt_once_and_all_but_the_last_writer_copy_its_partial_block() -> None:
    books = Books(num_blocks=20)
    parent = books.start(prompt(40))
    branches = [parent]
    for _ in range(3):
        child = books.sequence(prompt(40))
        books.paging.fork(parent, child)
        branches.append(child)
    books.check()
    assert all(s.table == [1, 2, 3] for s in branches) and books.refs([1, 2, 3]) == [4, 4, 4]
    for i, seq in enumerate(branches):
        assert books.paging.blocks_to_grow(seq, seq.num_computed, 41) == (i < 3)
        books.decode(seq, [i])
    assert [s.table for s in branches] == [[1, 2, 4], [1, 2, 5], [1, 2, 6], [1, 2, 3]]
    copies = [e for e in books.pool.events if isinstance(e, ev.BlocksCopied)]
    assert [(e.index, e.src, e.dst) for e in copies] == [(2, 3, 4), (2, 3, 5), (2, 3, 6)]
    assert [c[1:] for c in books.flight.copies] == [(3, 4), (3, 5), (3, 6)]


@pytest.mark.conformance(102)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_branches_freed_in_any_order_return_every_block(order: tuple[int, ...]) -> None:
    books = Books()
    branches = [books.start(prompt(23))]
    for _ in range(2):
        child = books.sequence(prompt(23))
        books.paging.fork(branches[0], child)
        branches.append(child)
    books.decode(branches[1], prompt(12, 1))
    for i in order:
        books.end(branches[i])
    assert books.pool.num_active == 0 and books.pool.num_available == 10


@pytest.mark.conformance(102)
def test_a_fork_shares_only_blocks_that_hold_computed_tokens() -> None:
    books = Books()
    parent = books.sequence(prompt(64))
    for end in (20, 32):
        books.begin_step()
        assert books.grow(parent, end)
        books.publish(parent, end)
        parent.num_computed = end
    assert books.grow(parent, 64)  # the next chunk has its slots, but no KV yet
    child = books.sequence(prompt(64))
    books.paging.fork(parent, child)
    assert child.table == parent.table[:2] and child.num_computed == 32 and child.num_published == 2
    books.check()


def test_truncating_gives_back_the_blocks_beyond_a_position() -> None:
    books = Books()
    seq = books.start(prompt(20))
    assert books.grow(seq, 60)
    books.paging.truncate(seq, 20)
    assert seq.table == [1, 2] and seq.table_sent == -1 and books.pool.num_available == 8
    books.check()
    seq.table_sent = 2  # the runner has been given it
    books.paging.truncate(seq, 5)
    assert (seq.table, seq.table_sent) == ([1], 1)
    books.check()


# ------------------------------------------------------------------------- a forward that won't run


@pytest.mark.conformance(111)
def test_what_was_published_for_a_forward_that_will_not_run_is_dropped_with_its_sharers_named() -> None:
    books = Books(num_blocks=20)
    books.begin_step()
    first, second = books.sequence(prompt(40)), books.sequence(prompt(40))
    for seq in (first, second):
        books.admit(seq)
        assert books.grow(seq, 40)
        books.publish(seq, 40)
    assert second.table[:2] == first.table[:2] and first.request.cache_write_tokens == 32
    assert books.retract(second) == [] and books.pool.num_hashes == 2  # it published nothing
    books.admit(third := books.sequence(prompt(40)))
    assert books.retract(first) == [third] and books.pool.num_hashes == 0
    assert first.request.cache_write_tokens == first.request.high_published == 0
    event = books.pool.events[-1]
    assert isinstance(event, ev.BlocksEvicted) and (event.ids, event.why) == ([1, 2], "unwritten")
    books.check()


@pytest.mark.conformance(105, 111)
def test_what_a_forward_wrote_stays_findable_whatever_ends_its_sequence() -> None:
    books = Books()
    seq = books.start(prompt(31))
    books.begin_step()
    books.decode(seq, [5])  # fills block 2, published after its forward
    assert books.retract(seq) == []
    assert books.pool.hash_of(1) is not None and books.pool.hash_of(2) is not None


@pytest.mark.conformance(111)
def test_the_copies_of_a_sequence_that_will_not_run_are_dropped() -> None:
    books = Books(num_blocks=20)
    parent = books.start(prompt(20))
    children = [books.sequence(prompt(20)) for _ in range(2)]
    for child in children:
        books.paging.fork(parent, child)
        assert books.grow(child, 21)
    assert [c[1:] for c in books.flight.copies] == [(2, 3), (2, 4)]
    books.retract(children[0])
    assert [c[1:] for c in books.flight.copies] == [(2, 4)]


@pytest.mark.conformance(111)
def test_blocks_whose_kv_proved_bad_are_dropped_but_not_what_took_their_place() -> None:
    books = Books(num_blocks=4)
    seq = books.start(prompt(48))
    books.end(seq)
    other = books.start(prompt(16, 1))
    assert other.table == [3]
    books.live.append(seq)
    books.paging.invalidate(seq, books.flights)
    assert books.pool.hash_of(1) is None and books.pool.hash_of(2) is None
    assert books.pool.hash_of(3) == other.hashes[0]
    books.check()
