"""Responses over a WebSocket, and summaries on their way, have spans of their own within the client's trace."""

from __future__ import annotations

from tests.gateway.responding import END
from tests.gateway.talking import talking
from tests.gateway.test_responses_context import GIVEN, SHORT, SUMMARY
from tests.gateway.traced import SPAN, TRACE, tracing


async def test_each_response_has_its_span_and_so_has_a_summary(open_front, collector):
    async with open_front(tracing=tracing(collector)) as front:
        async with talking(front, traceparent=f"00-{TRACE}-{SPAN}-01") as socket:
            await socket.answered()
            await socket.ask(GIVEN, **SHORT)
            submit = await front.peer.submitted()
            front.peer.say(submit, [*front.ids(SUMMARY), END], "stop")
            await socket.say()
            await socket.events()
            await socket.ask(model="other")
            await socket.refusal()
        rows = await front.settled(3)
        assert {row["trace_id"] for row in rows} == {TRACE}
        spans = [span for span in await collector.trace(TRACE, 5) if span.kind == 2]
        # The connection, a response, one with its summary, and what was refused.
        named = ["GET /v1/responses", "chat", "chat demo", "chat demo", "chat demo"]
        assert sorted(span.name for span in spans) == named
        (connection,) = [span for span in spans if span.name == named[0]]
        assert connection.attributes["http.route"] == "/v1/responses"
        assert connection.attributes["http.response.status_code"] == 101
        assert not [name for name in connection.attributes if name.startswith(("gen_ai.", "openai."))]
        assert [span.attributes.get("error.type") for span in spans].count("model_not_found") == 1
