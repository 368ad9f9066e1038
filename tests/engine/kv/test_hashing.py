"""Chain hashes: the formula byte by byte, and that an equal hash means an equal prefix."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from engine.kv.hashing import extend_chain, pack, root_hash, salt_digest
from tests.engine.rig import block_hash

tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def chain(tokens: list[int], block_size: int = 4, seed: int = 7, salt: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, array("i", tokens), block_size, root_hash(seed), salt)
    return hashes


@pytest.mark.conformance(40)
def test_a_hash_covers_its_parent_its_tokens_and_in_block_0_the_salt() -> None:
    """Ours is xxh3-128 over packed bytes, where the reference pickles a tuple."""
    root = xxh3_128_hexdigest(struct.pack(">Q", 2**64 - 1))
    assert root_hash(2**64 - 1).hex() == root
    salt = salt_digest("tenant")
    tokens = list(range(70_000, 70_008))
    first = xxh3_128_hexdigest(bytes.fromhex(root) + struct.pack("<4i", *tokens[:4]) + salt)
    second = xxh3_128_hexdigest(bytes.fromhex(first) + struct.pack("<4i", *tokens[4:]))
    assert [h.hex() for h in chain(tokens, seed=2**64 - 1, salt=salt)] == [first, second]
    assert block_hash(bytes.fromhex(root), struct.pack("<4i", *tokens[:4]), salt).hex() == first


@pytest.mark.conformance(40)
def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.conformance(38)
@given(tokens_of, st.lists(st.integers(0, 80), max_size=6))
def test_a_chain_grown_step_by_step_is_the_chain_made_at_once(tokens: list[int], cuts: list[int]) -> None:
    hashes: list[bytes] = []
    for cut in [*sorted(cuts), len(tokens)]:
        extend_chain(hashes, array("i", tokens[:cut]), 4, root_hash(7))
    assert hashes == chain(tokens)


@pytest.mark.conformance(40)
@given(tokens_of, tokens_of)
def test_two_chains_share_exactly_their_common_full_blocks(a: list[int], b: list[int]) -> None:
    same = sum(1 for i in range(min(len(a), len(b)) // 4) if a[: 4 * i + 4] == b[: 4 * i + 4])
    assert sum(x == y for x, y in zip(chain(a), chain(b), strict=False)) == same


@pytest.mark.conformance(36, 94)
def test_a_salt_enters_block_0_and_reaches_the_others_through_the_chain() -> None:
    plain, one, two = (chain(list(range(12)), salt=s and salt_digest(s)) for s in (None, "1", "2"))  # type: ignore[arg-type]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain, one, two, strict=True))
    tail: list[bytes] = one[:1]
    extend_chain(
        tail, array("i", range(12)), 4, root_hash(7), None
    )  # after block 0 the salt is not asked for
    assert tail == one


def test_a_salt_may_be_any_text() -> None:
    assert len(salt_digest("\ud800")) == 16


@pytest.mark.conformance(41)
def test_the_seed_decides_every_hash() -> None:
    assert chain([1, 2, 3, 4], seed=1) != chain([1, 2, 3, 4], seed=2)
    assert root_hash(5) == root_hash(5) != root_hash(6)


def test_tokens_are_packed_as_little_endian_int32() -> None:
    assert pack(array("i", [1, -2, 2**31 - 1])) == struct.pack("<3i", 1, -2, 2**31 - 1)
