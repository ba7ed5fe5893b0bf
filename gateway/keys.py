"""API keys: how one is made, and what is kept of it. The key itself is shown once and never stored."""

from __future__ import annotations

import hashlib
import secrets
import string

import msgspec

PREFIX = "sk-penstock-"
ADMIN_PREFIX = "sk-penstock-admin-"
NUM_RANDOM_CHARS = 43
"""256 bits in letters and digits, which a double click selects as a whole."""
NUM_SECRET_BYTES = 32
_ALPHABET = string.ascii_letters + string.digits


class Kept(msgspec.Struct, frozen=True):
    """What the store holds of a key."""

    hash: bytes
    """Keyed BLAKE2b under the install's secret: found by one look-up, of no use without the secret."""
    prefix: str
    last_four: str


def new_key() -> str:
    """For inference."""
    return PREFIX + _random()


def new_admin_key() -> str:
    """For the administration."""
    return ADMIN_PREFIX + _random()


def new_secret() -> bytes:
    return secrets.token_bytes(NUM_SECRET_BYTES)


def hash_of(secret: bytes, key: str) -> bytes:
    # A header may hold any bytes; aiohttp decodes them so. BLAKE2b is a keyed hash by itself (RFC 7693) and takes a
    # quarter of the time of HMAC-SHA256.
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=secret, digest_size=32).digest()


def kept(secret: bytes, key: str) -> Kept:
    """A key that people made up may be short: then nothing of it is kept in clear."""
    for prefix in (ADMIN_PREFIX, PREFIX):
        if key.startswith(prefix) and len(key) >= len(prefix) + 16:
            return Kept(hash_of(secret, key), prefix, key[-4:])
    return Kept(hash_of(secret, key), "", "")


def _random() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(NUM_RANDOM_CHARS))
