"""What a table of bad bodies is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEEP = 10_000
"""As deep as nothing honest is nested."""
SURROGATE = "\ud800"
"""JSON can say it, and UTF-8 cannot."""
NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**400
TEN_MB = 10 << 20


@dataclass(frozen=True, repr=False)
class Case:
    """``param``: the part at fault, as the answer names it; None where it is none or the dialect names none. ``body``:
    JSON, or bytes that are sent as they stand."""

    param: str | None
    body: Any
    path: str | None = None
    """None: the first of the family."""
    status: int = 400
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    is_unread: bool = False
    """It fails before there is a request."""


def nested(depth: int = DEEP) -> Any:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def nested_text(opening: bytes, closing: bytes, depth: int = DEEP) -> bytes:
    return opening * depth + closing * depth
