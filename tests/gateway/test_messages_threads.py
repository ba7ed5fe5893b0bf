"""Anthropic's clients would have a server keep their conversation between turns; here each request has all of it."""

from __future__ import annotations

from tests.gateway.conftest import HELLO, Front

MESSAGES = "/v1/messages"
ASKED = {"model": "demo", "max_tokens": 9, "messages": HELLO}


async def test_a_client_that_can_go_on_without_a_thread_is_told_so_in_its_own_words(front: Front):
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        status, answer, _ = await front.post(path, {**ASKED, "thread": {"type": "create"}})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    status, answer, _ = await front.post(MESSAGES, {**ASKED, "model": "nobody", "thread": None})
    assert (status, answer["error"].keys()) == (404, {"type", "message"})
