"""How long a response's prompt may be before it is made short: openai-python's ``context_management``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta


class Compaction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """A conversation whose prompt has more tokens is made short before it is answered. None: three quarters of what the
    model takes, where it is known here how much that is."""

    compact_threshold: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None


def most_tokens(asked: Iterable[Compaction], max_model_tokens: int | None) -> int | None:
    """Of a prompt that is not made short; None: none is. ``max_model_tokens``: what the model takes, where that is
    known."""
    default = None if max_model_tokens is None else max_model_tokens * 3 // 4
    each = [one.compact_threshold or default for one in asked]
    return min([most for most in each if most is not None], default=None)
