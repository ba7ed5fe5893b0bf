"""An upstream that there is: its terms and its key, which nothing shows or logs.

Keys that administrators give are sealed in the store, under a key that follows from the install's secret: who reads the
table, a copy of it or the audit log has none of them; who has all of the store can open them, as the gateway must.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Literal

import msgspec

from policies.upstreams.terms import Upstream

NUM_NONCE_BYTES = NUM_TAG_BYTES = 16
Origin = Literal["settings", "admin"]


class SealBroken(ValueError):
    """A sealed key was not sealed here, or for another upstream."""


class Key:
    """An API key; "" is none."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Key(***)" if self.value else "Key()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def without(self, text: str) -> str:
        """A text of the upstream's, which may say the key back."""
        return text.replace(self.value, "***") if self.value else text


class Known(msgspec.Struct, frozen=True):
    """One of them."""

    terms: Upstream
    key: Key
    origin: Origin


def key_of(terms: Upstream, given: str, environ: Mapping[str, str]) -> Key:
    """The environment's where the terms name a variable, else the one that was ``given``."""
    return Key(environ.get(terms.key_variable, "").strip() if terms.key_variable else given)


def sealed(secret: bytes, name: str, key: str) -> bytes:
    """For the store."""
    nonce = secrets.token_bytes(NUM_NONCE_BYTES)
    body = _turned(secret, nonce, key.encode())
    return nonce + body + _tag(secret, name, nonce + body)


def unsealed(secret: bytes, name: str, text: bytes) -> str:
    """Raises SealBroken."""
    nonce, body, tag = text[:NUM_NONCE_BYTES], text[NUM_NONCE_BYTES:-NUM_TAG_BYTES], text[-NUM_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(secret, name, nonce + body)):
        raise SealBroken(f"the key of upstream {name} was not sealed by this install")
    return _turned(secret, nonce, body).decode()


def _turned(secret: bytes, nonce: bytes, text: bytes) -> bytes:
    """Each byte turned by SHAKE-256 of the secret and a nonce that is used once; a second time turns it back."""
    turns = hashlib.shake_256(b"penstock upstream key\0" + nonce + secret).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, turns, strict=True))


def _tag(secret: bytes, name: str, text: bytes) -> bytes:
    return hmac.digest(secret, b"penstock upstream tag\0" + name.encode() + b"\0" + text, "sha256")[:NUM_TAG_BYTES]
