"""/api/embed and /api/embeddings: vectors in Ollama's shapes. Of a text that is too long the beginning is read, unless
``truncate`` is false; the older of the two has no such word, and refuses it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway import openai
from gateway.ollama.requests import name_of
from gateway.openai import Malformed, decoded
from gateway.reply import VectorAnswer, long


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    options: dict[str, Any] | None = None
    """Of no consequence where nothing is drawn."""

    keep_alive: float | str | None = None


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embeddings, which is older."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class EmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsBody(msgspec.Struct, frozen=True):
    embedding: list[float]


_embed = msgspec.json.Decoder(EmbedRequest)
_embeddings = msgspec.json.Decoder(EmbeddingsRequest)


def parse_embed(body: bytes) -> openai.EmbeddingRequest:
    """What is asked in ``body``. Raises Malformed."""
    asked = decoded(_embed, body)
    fields: dict[str, Any] = {"model": name_of(asked.model), "input": asked.input}
    if asked.truncate is not False:
        fields["truncate_prompt_tokens"] = -1
    if asked.dimensions is not None:
        fields["dimensions"] = asked.dimensions
    return openai.parse_embedding(msgspec.json.encode(fields))


def parse_embeddings(body: bytes) -> openai.EmbeddingRequest:
    """As ``parse_embed``."""
    asked = decoded(_embeddings, body)
    if not asked.prompt:
        raise Malformed("Invalid 'prompt': it is empty", "prompt", "empty_string")
    return openai.parse_embedding(msgspec.json.encode({"model": name_of(asked.model), "input": asked.prompt}))


class EmbedAnswer(VectorAnswer):
    """To /api/embed."""

    endpoint = "/api/embed"
    _id_prefix = "ollama-"

    def __init__(self, *parts: Any, started_at: float) -> None:
        """``started_at``: when the request came, in monotonic seconds."""
        super().__init__(*parts)
        self._started_at = started_at

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        whole = EmbedBody(
            model=self.call.model,
            embeddings=[],
            total_duration=int(1e9 * (time.monotonic() - self._started_at)),
            prompt_eval_count=self.usage().num_prompt_tokens,
        )
        return long.joined(long.framed(whole, "embeddings", long.listed(self.numbers())))


class EmbeddingsAnswer(VectorAnswer):
    """To /api/embeddings."""

    endpoint = "/api/embeddings"
    _id_prefix = "ollama-"

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        (vector,) = self.numbers()
        return msgspec.json.encode(EmbeddingsBody(vector))
