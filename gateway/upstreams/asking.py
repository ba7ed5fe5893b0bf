"""What an upstream is asked, in OpenAI's words: a request as it came, without what is this gateway's own affair."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import openai
from policies.upstreams.counting import BYTES_A_TOKEN
from policies.upstreams.terms import Kind

OURS = frozenset(
    (
        *("model", "stream", "stream_options", "penstock", "service_tier", "user", "safety_identifier", "metadata"),
        *("store", "echo", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("enable_thinking", "include_reasoning"),
        *openai.EXTRAS,
    )
)
"""Fields that are not passed on: they are answered here, say who asks, or say what is so anyway."""
PATHS: dict[Kind, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
}
TEMPLATE_BYTES = 64
"""Of a message that a chat template may add to what a client sent."""
_canonical = msgspec.json.Encoder(order="sorted").encode


class Asked(msgspec.Struct, frozen=True):
    """What is asked, whichever upstream is."""

    kind: Kind
    fields: dict[str, Any]
    streams: bool
    num_sequences: int
    max_prompt_tokens: int
    """What an upstream may say that the prompt had."""
    max_completion_tokens: int
    """The same of all sequences together."""
    is_exact: bool = False
    """The prompt's tokens were counted by a tokenizer."""
    cache_salt: str = ""
    """Under which an upstream that takes one keeps its prompt."""
    context: dict[str, str] = {}
    """Headers that say which trace it belongs to; none where it is not traced."""

    @property
    def num_vectors(self) -> int:
        """Scores are some, too."""
        return self.num_sequences if self.kind in ("embeddings", "rerank") else 0

    @property
    def identity(self) -> str:
        """Of all that its answer depends on."""
        fields = _canonical([self.kind, {**self.fields, "seed": None}, self.fields.get("seed") is not None])
        return hashlib.sha256(fields).hexdigest()

    def body(self, model: str, is_salted: bool) -> bytes:
        """For one that calls the model so, and takes a salt or does not. A stream is asked to end with its usage."""
        body = {"model": model, **self.fields}
        if is_salted:
            body["cache_salt"] = self.cache_salt
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body)


def fields_of(call: openai.ChatRequest | openai.CompletionRequest | openai.EmbeddingRequest) -> dict[str, Any]:
    """Those that were given."""
    given = {name: value for name, value in msgspec.to_builtins(call).items() if value is not None and name not in OURS}
    if "messages" in given:
        given["messages"] = [_message(message) for message in given["messages"]]
    if not given.get("logprobs"):
        given.pop("top_logprobs", None)  # a 0 beside nothing, which some refuse
    if "prediction" in given:
        given["prediction"] = _given(given["prediction"])
    return given


def rerank_fields(call: openai.RerankRequest) -> dict[str, Any]:
    """All documents are scored, and the best chosen here."""
    return {"query": call.query, "documents": call.texts}


def packed(prompt: Any) -> list[int]:
    """A prompt in the place of its token ids where nothing here knows them: its canonical JSON, four bytes each, which
    is how many are estimated."""
    data = prompt.encode() if isinstance(prompt, str) else _canonical(prompt)
    data += b" " * (-len(data) % BYTES_A_TOKEN)
    return [int.from_bytes(data[at : at + BYTES_A_TOKEN], "little") for at in range(0, len(data), BYTES_A_TOKEN)]


def most_prompt_tokens(prompt: Any, num_messages: int) -> int:
    """More than these it cannot have: a token has a byte at least."""
    return len(_canonical(prompt)) + TEMPLATE_BYTES * (num_messages + 16)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = _given(message)
    if "content" not in plain:
        plain["content"] = None  # as an assistant's that only calls
    if isinstance(plain["content"], list):
        plain["content"] = [_given(part) for part in plain["content"]]
    return plain


def _given(value: Any) -> Any:
    """Without what is null."""
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_given(each) for each in value]
    return value
