"""POST /tokenize and /detokenize, as vLLM has them: a text or a conversation as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.openai.decoding import decoded
from gateway.openai.failures import Malformed
from gateway.openai.messages import Message
from gateway.openai.requests import ChatRequest, TokenId, parse_chat


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A ``prompt`` as it stands, or ``messages`` as the model's template puts them together. Without ``model``: the one
    that is served, where it is the only one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around a text; for a prompt they are there unless this is false."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    """The conversation ends where the answer begins, unless this is false."""
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat(self) -> ChatRequest:
        """The conversation, as a request for an answer. Raises Malformed."""
        fields = {
            "model": self.model or "",
            "messages": self.messages,
            "tools": self.tools or None,
            "chat_template_kwargs": {
                **(self.chat_template_kwargs or {}),
                **({"add_generation_prompt": False} if self.add_generation_prompt is False else {}),
            },
        }
        return parse_chat(msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` as above."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    """Null while the model is not loaded."""
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, frozen=True):
    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """The request in ``body``. Raises Malformed."""
    asked = decoded(_tokenize, body)
    if (asked.prompt is None) == (asked.messages is None):
        raise Malformed("Either 'prompt' or 'messages' is required, and not both", "prompt")
    for name in ("continue_final_message", "chat_template"):
        if getattr(asked, name):
            raise Malformed(f"'{name}' is not supported by this server", name, "unsupported_parameter")
    if asked.messages is not None and asked.add_special_tokens:
        what = "the template writes those that the model wants"
        raise Malformed(f"'add_special_tokens' is not supported for 'messages'; {what}", "add_special_tokens")
    return asked


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The request in ``body``. Raises Malformed."""
    return decoded(_detokenize, body)
