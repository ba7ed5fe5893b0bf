"""What is asked about a response's prompt before it is read: openai-python's ``context_management``,
``prompt_cache_options`` and ``image``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Compaction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """A conversation whose prompt has more tokens is made short before it is answered. None: three quarters of what the
    model takes, where it is known here how much that is."""

    compact_threshold: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes are kept for every tenant anyway, as long as there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("prewarm", "comparison_response_id"):
            if getattr(self, name):
                raise ValueError(f"'{name}' is not supported by this server")


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no images, whose compression could be asked for."""

    context_compression: Literal["auto", "disabled"] | None = None


def most_tokens(asked: Iterable[Compaction], max_model_tokens: int | None) -> int | None:
    """Of a prompt that is not made short; None: none is. ``max_model_tokens``: what the model takes, where that is
    known."""
    default = None if max_model_tokens is None else max_model_tokens * 3 // 4
    each = [one.compact_threshold or default for one in asked]
    return min([most for most in each if most is not None], default=None)
