"""Chained keys of token prefixes: full keys for a node, short ones for routers.

A block's key chains over all tokens before it, ``key(i) = H(key(i-1), tokens of block i)``, so that
equal keys mean equal prefixes. The chain starts from a salt: tenants with different salts never
share blocks, so they cannot detect each other's prompts by timing. The hash is cryptographic
(BLAKE2b, 16 bytes): a collision would leak one user's context to another. Keys are equal in every
process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import Struct

KEY_BYTES = 16
SHORT_BYTES = 8


def chain(
    tokens: Sequence[int], block_size: int, salt: str = "", prefix: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Generate the keys of the full blocks of ``tokens`` after those in ``prefix``."""
    parent = prefix[-1] if prefix else blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
    packed = Struct(f"{block_size}q").pack
    for start in range(len(prefix) * block_size, len(tokens) - block_size + 1, block_size):
        block = packed(*tokens[start : start + block_size])
        parent = blake2b(parent + block, digest_size=KEY_BYTES).digest()
        yield parent


def chain_keys(
    tokens: Sequence[int], block_size: int, salt: str = "", prefix: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the full blocks of ``tokens``; ``prefix`` are leading ones already computed."""
    return [*prefix, *chain(tokens, block_size, salt, prefix)]


def short_key(key: bytes) -> int:
    """The part of a key that is sent to routers. A collision sends a request to the wrong node,
    which costs time; the node itself compares full keys."""
    return int.from_bytes(key[:SHORT_BYTES], "little")


def short_keys(keys: Iterable[bytes]) -> list[int]:
    """The short keys of many keys, without a call for each."""
    return unpack_keys(b"".join(keys))[:: KEY_BYTES // SHORT_BYTES].tolist()


def pack_keys(keys: Iterable[int]) -> bytes:
    """Encode short keys for a message: eight bytes each, in the byte order of every machine that
    Tandem runs on, little-endian."""
    return array("Q", keys).tobytes()


def unpack_keys(packed: bytes) -> array[int]:
    """Decode short keys; an incomplete one at the end is dropped."""
    keys = array("Q")
    keys.frombytes(packed[: len(packed) - len(packed) % keys.itemsize])
    return keys
