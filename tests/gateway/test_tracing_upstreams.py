"""What a trace tells of servers elsewhere that were asked, and what they are told of it."""

from __future__ import annotations

import pytest

from policies import settings
from tests.gateway.conftest import HELLO
from tests.gateway.elsewhere import elsewhere, fails

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = 3
"""A span's kind."""


def told(collector):
    """Traces of what failed, and of what others have chosen."""
    return settings.Tracing(endpoint=collector.endpoint, protocol="http/protobuf", sample_ratio=0.0)


async def test_an_upstream_is_told_which_trace_it_belongs_to(open_front, collector):
    async with (
        elsewhere() as far,
        open_front(tracing=told(collector), upstreams=(far.upstream(upstream_model="theirs"),)) as front,
    ):
        asked = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "congo=t61", "baggage": "user=1"}
        body = {"model": "far", "messages": HELLO}
        status, _, headers = await front.post("/v1/chat/completions", body, **asked)
        assert status == 200
        heard = far.heard[0].request.headers
        assert (heard["tracestate"], heard["baggage"]) == ("congo=t61", "user=1")
        whole, *below = await collector.trace(headers["x-trace-id"])
        parts = [span for span in below if span.parent_id == whole.span_id]
        assert [span.name for span in parts][-4:] == ["queue", "upstream", "stream", "settle"]
        (asking,) = [span for span in parts if span.name == "upstream"]
        assert heard["traceparent"] == f"00-{TRACE}-{asking.span_id}-01"
        assert (asking.kind, asking.attributes) == (CLIENT, {"penstock.upstream": "far-1"})


async def test_every_upstream_that_was_asked_has_a_span_that_says_how_it_failed(open_front, collector):
    async with (
        elsewhere(fails(503)) as near,
        elsewhere() as far,
        open_front(
            tracing=told(collector), upstreams=(near.upstream("a", max_retries=2), far.upstream("b", priority=1))
        ) as front,
    ):
        body = {"model": "far", "messages": HELLO}
        status, _, headers = await front.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{SPAN}-01")
        assert status == 200
        whole, *below = await collector.trace(headers["x-trace-id"])
        assert (whole.is_error, whole.attributes["penstock.upstream"]) == (False, "b")
        failed, answered = [span for span in below if span.name == "upstream"]
        assert failed.is_error
        assert failed.attributes == {
            "penstock.upstream": "a",
            "penstock.upstream.left": "failed",
            "error.type": "upstream_failed",
        }
        assert (answered.is_error, answered.attributes) == (False, {"penstock.upstream": "b"})
        asked = [server.heard[0].request.headers["traceparent"].split("-")[2] for server in (near, far)]
        assert asked == [failed.span_id, answered.span_id]
        assert [span.name for span in below][-5:] == ["upstream", "queue", "upstream", "stream", "settle"]


async def test_upstreams_that_all_fail_are_the_reason_that_a_trace_tells(open_front, collector):
    async with (
        elsewhere(fails(503)) as far,
        open_front(tracing=told(collector), upstreams=(far.upstream(max_retries=1),)) as front,
    ):
        status, _, headers = await front.post("/v1/chat/completions", {"model": "far", "messages": HELLO})
        assert status == 502
        whole, *below = await collector.trace(headers["x-trace-id"])
        assert (whole.is_error, whole.attributes["error.type"]) == (True, "upstream_failed")
        assert [span.attributes["error.type"] for span in below if span.name == "upstream"] == ["upstream_failed"] * 2
        assert sum(span.seconds for span in below) == pytest.approx(whole.seconds)
