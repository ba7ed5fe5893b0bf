"""What came of a call, as Anthropic's clients say it and the model is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.anthropic import parse_message


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"content": "Rain."}, "Rain."),
        ({"content": "Rain.", "is_error": False}, "Rain."),
        ({"content": "no such city", "is_error": True}, "failed: no such city"),
        ({"content": [{"type": "text", "text": "no such city"}], "is_error": True}, "failed: no such city"),
        ({"is_error": True}, "failed"),
        ({}, ""),
    ],
)
def test_the_model_is_told_that_a_call_has_failed(said: dict[str, Any], told: str):
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **said}
    messages = [{"role": role, "content": [block]} for role, block in (("assistant", call), ("user", result))]
    chat = parse_message(msgspec.json.encode({"model": "demo", "max_tokens": 9, "messages": messages}))
    assert [message.content for message in chat.messages if message.role == "tool"] == [told]
