"""GET /v1/models as Anthropic's clients know it; they say by their header that they are meant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.openai import Malformed
from gateway.openai.pages import ends_of


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model; ``created_at`` in RFC 3339."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    """Null while it is not loaded; prompt and answer together are no longer, so neither is."""
    max_tokens: int | None

    @classmethod
    def of(cls, name: str, created: int, max_model_tokens: int | None) -> ModelInfo:
        """``created`` in Unix seconds."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
        return cls(
            id=name,
            display_name=name,
            created_at=at,
            max_input_tokens=max_model_tokens,
            max_tokens=max_model_tokens,
        )


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of them, in the order of the list."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
    """There are others in the direction that was asked in."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of models that the page is behind, or before."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def page_of(models: Sequence[ModelInfo], query: ModelQuery) -> ModelPage:
    """Raises Malformed for an id that is not among them."""
    if query.after_id is not None and query.before_id is not None:
        raise Malformed("'after_id' and 'before_id' cannot both be given", "before_id")
    if query.before_id is not None:
        left = models[: _place_of(models, query.before_id, "before_id")]
        data = left[-query.limit :]
    else:
        left = models if query.after_id is None else models[_place_of(models, query.after_id, "after_id") + 1 :]
        data = left[: query.limit]
    first_id, last_id = ends_of(data)
    return ModelPage(data=list(data), first_id=first_id, last_id=last_id, has_more=len(left) > len(data))


def _place_of(models: Sequence[ModelInfo], name: str, param: str) -> int:
    for place, model in enumerate(models):
        if model.id == name:
            return place
    raise Malformed(f"Invalid '{param}': no model has this id", param)
