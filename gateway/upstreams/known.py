"""An upstream that there is: its terms and its key, which nothing shows or logs.

Keys that administrators give are sealed in the store (``gateway/sealing.py``): who reads the table, a copy of it or the
audit log has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from policies.upstreams.terms import Upstream

Origin = Literal["settings", "admin"]


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
