"""Names for what a KV block holds: chained hashes of full blocks, salted.

A block's digest covers its own tokens and, through its parent's digest, every token before them; so equal digests mean
equal histories, and a longest shared prefix is found by one dictionary look-up a block. The hash is keyed with the
salt: without it nobody can compute, or by timing guess, the names of another tenant's blocks. (vLLM's
``docs/design/prefix_caching.md`` has the scheme without the key.) The packed tokens travel beside the digest, so
whoever serves a hit can compare them and need not trust the hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class Link(NamedTuple):
    """One full block in a chain."""

    digest: bytes
    token_bytes: bytes
    """Its token ids, 4 bytes each, little-endian."""


@lru_cache(4096)
def salt_of(secret: bytes, tenant_id: str, group: str = "") -> bytes:
    """The salt of a tenant's prompts, or of the group that it names: 16 bytes that nobody can guess without the
    install's secret. A group is none of its tenants."""
    owner = f"group\0{group}" if group else f"tenant\0{tenant_id}"
    return blake2b(owner.encode(), digest_size=16, key=secret[:64], person=b"penstock salt").digest()


def narrowed(salt: bytes, own: str) -> bytes:
    """The salt of those who share ``salt`` and also say ``own``: a client's word for one of its users."""
    return blake2b(own.encode(), digest_size=16, key=key_of(salt), person=b"penstock own").digest()


def told(salt: bytes) -> str:
    """The ``cache_salt`` of those who have this salt, for an engine elsewhere, which learns nothing of ours by it."""
    return blake2b(salt, digest_size=32, person=b"penstock told").hexdigest()


def root_of(salt: bytes, adapter: str, kv_dtype: str) -> bytes:
    """The salt of what is computed with this adapter, by its id; "": without any; and kept so, as ``engine.kv_dtype``
    says. Equal tokens have other keys and values under another adapter, under another version of the same, and in
    another type."""
    if kv_dtype != "auto":
        salt = blake2b(kv_dtype.encode(), digest_size=16, key=key_of(salt), person=b"penstock kv type").digest()
    if not adapter:
        return salt
    return blake2b(adapter.encode(), digest_size=16, key=key_of(salt), person=b"penstock adapter").digest()


def key_of(salt: bytes) -> bytes:
    """The hash key for a salt of any length: 32 bytes."""
    return blake2b(salt, digest_size=32, person=b"penstock prefix").digest()


def link(parent_digest: bytes, token_ids: Sequence[int], key: bytes) -> Link:
    """The link after ``parent_digest`` (empty for the first block) for one block's token ids, each in [0, 2**32)."""
    token_bytes = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return Link(blake2b(parent_digest + token_bytes, digest_size=DIGEST_BYTES, key=key).digest(), token_bytes)


def digests_of(token_ids: Sequence[int], block_size: int, salt: bytes, max_blocks: int) -> list[bytes]:
    """The names of a prompt's first full blocks, without the one that its last token ends: that token is computed even
    when it is cached, so its block is never found."""
    num_blocks = min(max_blocks, (len(token_ids) - 1) // block_size)
    return [link.digest for link in Chain(block_size, salt).extend(token_ids[: num_blocks * block_size])]


class Chain:
    """The links of one sequence's full blocks, extended as its tokens grow; a token is hashed once."""

    __slots__ = ("block_size", "key", "links")

    def __init__(self, block_size: int, salt: bytes) -> None:
        self.block_size = block_size
        self.key = key_of(salt)
        self.links: list[Link] = []

    def extend(self, token_ids: Sequence[int]) -> list[Link]:
        """All links, after naming each full block of ``token_ids`` (the whole sequence from its start) that has no
        name yet.
        """
        links, size = self.links, self.block_size
        for start in range(len(links) * size, len(token_ids) - size + 1, size):
            links.append(link(links[-1].digest if links else b"", token_ids[start : start + size], self.key))
        return links

    def fork(self) -> Chain:
        """An independent chain with the same links so far."""
        twin = Chain.__new__(Chain)
        twin.block_size, twin.key, twin.links = self.block_size, self.key, list(self.links)
        return twin
