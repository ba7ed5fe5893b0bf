"""A gateway's requests that are traced, or might be."""

from __future__ import annotations

import asyncio

from policies import settings
from tests.gateway.conftest import HELLO

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"
ASK = {"model": "demo", "messages": HELLO}


def tracing(collector, **others):
    return settings.Tracing(endpoint=collector.endpoint, **{"protocol": "http/protobuf", "sample_ratio": 0.0, **others})


async def answered(front, headers=None, **others):
    """A chat that is answered "Hi"; its answer's headers."""
    call = asyncio.create_task(front.post(CHAT, {**ASK, **others}, **(headers or {})))
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi"), 3], "stop", queue_s=0.001, prefill_s=0.002, decode_s=0.003)
    status, _, told = await call
    assert status == 200
    return told, submit
