"""Texts for the gateway alone, which the store or a client keeps for it: sealed under keys that follow from the
install's secret. Whoever has one can neither read it nor make another; whoever has all of the store can, as the gateway
must."""

from __future__ import annotations

import hashlib
import hmac
import secrets

NUM_NONCE_BYTES = NUM_TAG_BYTES = 16


class SealBroken(ValueError):
    """It was not sealed here, or as something else."""


def sealed(secret: bytes, what: str, name: str, text: str) -> bytes:
    """``text`` as the ``what`` of ``name``, and of nothing else."""
    nonce = secrets.token_bytes(NUM_NONCE_BYTES)
    body = _turned(secret, what, nonce, text.encode())
    return nonce + body + _tag(secret, what, name, nonce + body)


def unsealed(secret: bytes, what: str, name: str, text: bytes) -> str:
    """Raises SealBroken."""
    nonce, body, tag = text[:NUM_NONCE_BYTES], text[NUM_NONCE_BYTES:-NUM_TAG_BYTES], text[-NUM_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(secret, what, name, nonce + body)):
        raise SealBroken(f"this was not sealed by this install as the {what} of {name}")
    return _turned(secret, what, nonce, body).decode()


def _turned(secret: bytes, what: str, nonce: bytes, text: bytes) -> bytes:
    """Each byte turned by SHAKE-256 of the secret and a nonce that is used once; a second time turns it back."""
    turns = hashlib.shake_256(b"penstock %b key\0" % what.encode() + nonce + secret).digest(len(text))
    return (int.from_bytes(text) ^ int.from_bytes(turns)).to_bytes(len(text))


def _tag(secret: bytes, what: str, name: str, text: bytes) -> bytes:
    said = b"penstock %b tag\0" % what.encode() + name.encode() + b"\0" + text
    return hmac.digest(secret, said, "sha256")[:NUM_TAG_BYTES]
