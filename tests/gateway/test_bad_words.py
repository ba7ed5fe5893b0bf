"""What refusals say to whoever has to change something: which values there are, in words without a program's own."""

from __future__ import annotations

import msgspec
import pytest

from gateway import openai
from tests.gateway.conftest import HELLO, Front

TIERS = "'auto', 'default', 'fast', 'flex', 'priority', 'scale'"
ROLES = "'assistant', 'developer', 'function', 'system', 'tool', 'user'"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"service_tier": "gold"}, f"Invalid 'service_tier': expected one of {TIERS}, got 'gold'."),
        (
            {"messages": [*HELLO, {"role": "boss", "content": "Hi"}]},
            f"Invalid 'messages[1].role': expected one of {ROLES}, got 'boss'.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "Invalid 'tools[0].function.name': expected str matching regex '^[a-zA-Z0-9_-]{1,128}$'.",
        ),
    ],
)
def test_what_would_do_is_said(body, message):
    with pytest.raises(openai.Malformed) as refused:
        openai.parse_chat(msgspec.json.encode({"model": "demo", "messages": HELLO, **body}))
    assert (str(refused.value), refused.value.code) == (message, "invalid_value")


async def test_so_it_is_of_a_query(front: Front):
    status, answer, _ = await front.post("/v1/conversations/conv_1/items?include[]=all", {"items": []})
    assert (status, answer["error"]["param"]) == (400, "include[][0]")
    assert answer["error"]["message"].startswith("Invalid 'include[][0]': expected one of '")


async def test_what_a_library_says_is_said_in_one_line(front: Front):
    form = {"content-type": "multipart/form-data; boundary=x"}
    asked = front.http.post(f"{front.url}/v1/files", data=b"--x\r\nno header\r\n\r\na\r\n--x--\r\n", headers=form)
    async with asked as answer:
        message = (await answer.json())["error"]["message"]
    assert message == "The body could not be read as multipart/form-data: Invalid HTTP header: b'no header'"
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    async with front.http.get(f"{front.url}/v1/responses", headers=upgrade) as answer:
        message = (await answer.json())["error"]["message"]
    assert message == "This is no handshake of a WebSocket: Unsupported version"
