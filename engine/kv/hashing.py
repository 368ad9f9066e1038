"""Chain hashes of full blocks. Two equal hashes mean that the whole prefixes are equal.

hash_i = xxh3_128(parent, 16 bytes big-endian + tokens of the block as little-endian int32 + digest of the salt, in
block 0 only). The parent of block 0 is xxh3_128(seed as 8 bytes big-endian). The seed is random at each start, so
nobody can prepare a prompt that collides. BlocksStored has everything that a reader needs to compute a hash again, as
`verify` does.
"""

from __future__ import annotations

import sys
from array import array

from xxhash import xxh3_128_digest


def root_hash(seed: int) -> bytes:
    """Parent of every block 0; 16 bytes. seed: 0 <= seed < 2**64."""
    return xxh3_128_digest(seed.to_bytes(8, "big"))


def salt_digest(salt: str) -> bytes:
    """Digest of a salt for the hash of block 0, 16 bytes. The salt itself is in no event."""
    return xxh3_128_digest(salt.encode("utf-8", "surrogatepass"))


def pack(tokens: array[int]) -> bytes:
    """Token ids as little-endian int32."""
    if sys.byteorder == "big":  # pragma: no cover
        tokens = array("i", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def extend_chain(
    hashes: list[bytes], tokens: array[int], block_size: int, root: bytes, salt: bytes | None = None
) -> None:
    """Append the missing hashes of the full blocks of `tokens` to `hashes`."""
    first, last = len(hashes), len(tokens) // block_size
    if first >= last:
        return
    data = pack(tokens[first * block_size : last * block_size])
    parent = hashes[-1] if hashes else root
    width = 4 * block_size
    for at in range(0, len(data), width):
        extra = salt if salt is not None and not hashes else b""
        parent = xxh3_128_digest(parent + data[at : at + width] + extra)
        hashes.append(parent)
