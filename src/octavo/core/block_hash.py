"""Chained hashes: how a block gets the name under which a later request finds it.

    root = H("root", fingerprint, salt)
    key0 = H(root.hash, tokens of block 0)
    key1 = H(key0.hash, tokens of block 1)      so key1 names blocks 0 and 1 together

The fingerprint covers everything that decides the bits of K and V besides the tokens (model, dtypes, kernel
arithmetic, block size; see design section 3). Salts separate tenants: they enter at the root, so one salted root
separates the whole chain below it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from octavo.core.block import BlockHash, BlockKey

HashFunction = Callable[[bytes, bytes], BlockHash]
"""Maps (parent hash, token bytes) to a hash; tests pass weak ones to force collisions."""


def chain_hash(parent: bytes, tokens: bytes) -> BlockHash:
    """Hash a block after its parent: 128 bits of BLAKE2b, keyed by nothing, about 1 microsecond a block."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(tokens)
    return BlockHash(digest.digest())


def root_key(fingerprint: bytes, salt: str | None, hash_function: HashFunction = chain_hash) -> BlockKey:
    """Return the key above the first block of a request.

    Parts are length-prefixed, so that ("ab", "c") and ("a", "bc") differ; `None` and "" differ by a tag byte.
    """
    salt_bytes = b"" if salt is None else salt.encode("utf-8", "surrogatepass")  # any string that JSON can carry
    parts = len(fingerprint).to_bytes(4, "little") + fingerprint + (b"\0" if salt is None else b"\1") + salt_bytes
    return BlockKey(None, parts, hash_function(b"octavo", parts))


def child_key(parent: BlockKey, tokens: bytes, hash_function: HashFunction = chain_hash) -> BlockKey:
    """Return the key of a block that follows `parent` and holds `tokens`."""
    return BlockKey(parent, tokens, hash_function(parent.hash, tokens))
