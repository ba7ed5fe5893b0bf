"""What the log says of requests that have a trace, or might have one, with a worker that the test plays."""

from __future__ import annotations

import asyncio
import json
import logging

from gateway import telemetry
from policies import settings, wire
from tests.gateway.elsewhere import elsewhere, fails
from tests.gateway.traced import ASK, CHAT, SPAN, TRACE, answered, tracing


async def test_the_log_names_the_trace_of_every_request(open_front, collector, capfd):
    root, events = logging.root, telemetry._events
    handlers, level, handler = root.handlers[:], root.level, telemetry._handler
    telemetry.log_to_stderr(settings.Log(format="json"))
    try:
        async with open_front(tracing=tracing(collector, sample_ratio=1.0)) as front:
            fine, _ = await answered(front)
            _, _, refused = await front.post(CHAT, {"model": "demo"})
            root.handlers[0].close()
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
        told = {line["request_id"]: line for line in lines if "request_id" in line}
        (row,) = front.rows()
        assert told[fine["x-request-id"]]["trace_id"] == fine["x-trace-id"] == row["trace_id"]
        line = told[refused["x-request-id"]]
        assert (line["status"], line["trace_id"]) == (400, refused["x-trace-id"])
        assert (line["tenant_id"], line["key_id"]) == (row["tenant_id"], row["key_id"])
    finally:
        root.handlers[:], telemetry._events, telemetry._handler = handlers, events, handler
        root.setLevel(level)


async def test_whatever_the_log_says_of_a_request_has_its_ids(open_front, collector, caplog):
    def said(words: str) -> tuple[str, str]:
        (record,) = [record for record in caplog.records if words in record.getMessage()]
        return record.request_id, record.trace_id

    caplog.set_level(logging.INFO, "gateway")
    async with (
        elsewhere(fails(401)) as far,
        open_front(tracing=tracing(collector), upstreams=(far.upstream(),)) as front,
    ):
        call = asyncio.create_task(front.post(CHAT, ASK))
        submit = await front.peer.submitted()
        front.peer.send(wire.Failed(submit.request_id, "internal", "broken"))
        status, _, headers = await call
        assert status == 500
        assert said("a worker failed this request: broken") == (headers["x-request-id"], headers["x-trace-id"])
        status, _, headers = await front.post(CHAT, {**ASK, "model": "far"}, traceparent=f"00-{TRACE}-{SPAN}-01")
        assert status >= 500
        assert said("upstream far-1: ") == (headers["x-request-id"], TRACE)


async def test_what_nobody_expected_is_logged_with_the_ids_of_its_request(open_front, collector, caplog, monkeypatch):
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.api.chat.taken_body_of", wrong)
    async with open_front(tracing=tracing(collector)) as front:
        status, _, headers = await front.post(CHAT, ASK)
    assert status == 500
    (record,) = [record for record in caplog.records if record.exc_info]
    assert (record.request_id, record.trace_id) == (headers["x-request-id"], headers["x-trace-id"])
