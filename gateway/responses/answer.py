"""An answer in the form of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import openai, reply
from gateway.reply.choices import ChatLogprobs
from gateway.responses.events import Events
from gateway.text import Text


class ResponseAnswer(reply.Answer):
    """To /v1/responses."""

    endpoint = "/v1/responses"
    _logprobs = ChatLogprobs
    _id_prefix = "resp_"
    _continues = False

    def __init__(
        self,
        events: Events,
        call: openai.ChatRequest,
        parts: Sequence[reply.Part],
        text: Text,
        fingerprint: str,
        service_tier: str,
        *others: Any,
    ) -> None:
        super().__init__(call, parts, text, fingerprint, service_tier, *others)
        events.usage = self.usage
        events.started(service_tier)
        self._events = events

    def shaper(self) -> Events:
        return self._events

    def body(self, extras: openai.PenstockExtras | None = None) -> bytes:
        for choice in self.choices:
            self._events.moved(choice)
        self._events.last(extras)
        return msgspec.json.encode(self._events.body)
