"""Which requests have a trace and what is in it, with a worker that the test plays and a collector of its own; and what
becomes of spans that nobody takes."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time

import pytest

from gateway.head import Head
from gateway.traceparent import UNDECIDED
from gateway.tracing.keeping import SamplerUnknown, sampler_of
from gateway.tracing.order import TracingInvalid, order_of
from policies import settings, wire
from policies.policy import Policy
from tests import builders, collectors
from tests.builders import until
from tests.gateway.traced import ASK, CHAT, SPAN, TRACE, answered, tracing

LATEST = {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai_latest_experimental"}


async def test_of_all_that_are_not_sampled_every_failure_is_kept_and_nothing_else(open_front, collector):
    async with open_front(tracing=tracing(collector)) as front:
        fine, submit = await answered(front)
        trace_id = fine["x-request-id"].removeprefix("req_")
        assert submit.traceparent == UNDECIDED
        assert not {"traceresponse", "x-trace-id"} & fine.keys()
        failures = [
            await front.post(CHAT, {"model": "demo", "messages": "none"}),
            await front.post(CHAT, {**ASK, "model": "<script>nobody's</script>"}),
            await front.post(CHAT, ASK, authorization="Bearer sk-wrong"),
            await front.post("/v1/nowhere", ASK),
        ]
        assert [status for status, _, _ in failures] == [400, 404, 401, 404]
        stream = front.chat(stream=True)
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hi"))
        front.peer.send(wire.Failed(submit.request_id, "internal", "broken by SECRET"))
        with pytest.raises(Exception, match="failed"):
            async for _ in await stream:
                pass
        told = [await collector.trace(headers["x-trace-id"]) for _, _, headers in failures]
        names = [spans[0].name for spans in told]
        assert names == ["chat", "chat", "chat", "POST"]
        errors = [spans[0].attributes["error.type"] for spans in told]
        assert errors == ["invalid_type", "model_not_found", "invalid_api_key", "unknown_url"]
        assert [[span.name for span in spans[1:]] for spans in told] == [
            ["receive", "auth", "parse"],
            ["receive", "auth", "parse", "render"],
            ["receive", "auth"],
            ["receive", "answer"],
        ]
        assert not any(span.is_error for spans in told for span in spans)
        (broken,) = [row for row in await front.settled(2) if row["status"] == 500]
        spans = await collector.trace(broken["trace_id"])
        assert spans[0].is_error
        assert spans[0].attributes["penstock.trace.kept_for"] == "error"
        assert spans[0].attributes["error.type"] == "internal_error"
        assert front.rows()[0]["trace_id"] is None
        assert not collector.of(trace_id)
        assert "SECRET" not in repr(collector.spans)
        assert "script" not in repr(collector.spans)


@pytest.mark.parametrize("missed", [{"ttft_ms": 0.001}, {"tpot_ms": 0.001}])
async def test_what_missed_its_promise_is_kept(open_front, collector, missed):
    async with open_front(tracing=tracing(collector), classes=builders.classes(**missed)) as front:
        call = asyncio.create_task(front.post(CHAT, {**ASK, "max_tokens": 8}))
        submit = await front.peer.submitted()
        for _ in range(3):
            front.peer.say(submit, front.ids("Hi"))
        timeline = wire.Timeline([wire.Chunk(0.001, 0.002, 7)], [])
        front.peer.say(submit, [3], "stop", timeline=timeline)
        _, _, headers = await call
        (row,) = front.rows()
        spans = await collector.trace(headers["x-trace-id"])
        assert row["trace_id"] == headers["x-trace-id"] == row["request_id"].removeprefix("req_")
        assert spans[0].attributes["penstock.trace.kept_for"] == "missed"
        assert not spans[0].is_error
        (worker,) = [span for span in spans if span.name == "worker"]
        assert "prefill chunk" in [event[0] for event in worker.events]


async def test_what_took_longer_than_the_operator_says_is_kept(open_front, collector):
    async with open_front(tracing=tracing(collector, keep_slower_s=1e-6, keep_missed=False)) as front:
        headers, _ = await answered(front)
        whole, *_ = await collector.trace(headers["x-request-id"].removeprefix("req_"))
        assert whole.attributes["penstock.trace.kept_for"] == "slow"


async def test_a_client_that_leaves_has_its_trace_in_its_row(open_front, collector):
    async with open_front(tracing=tracing(collector)) as front:
        call = asyncio.create_task(front.post(CHAT, ASK))
        await front.peer.submitted()
        call.cancel()
        (row,) = await front.settled(1)
        assert row["status"] == 499
        whole, *_ = await collector.trace(row["trace_id"])
        assert whole.attributes["penstock.trace.kept_for"] == "error"


async def test_what_is_noted_of_a_request_takes_no_dictionary(open_front, collector, monkeypatch):
    begun = [Head(None, None, {}) for _ in range(100)]
    async with open_front(tracing=tracing(collector)) as front:
        monkeypatch.setattr(front.gw.tracing, "end", lambda noted, *_: begun.append(noted))
        await answered(front, {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "congo=1", "baggage": "user=1"})
    noted = begun[-1]
    assert noted.entry is not None
    assert not [held for held in gc.get_referents(noted) if isinstance(held, dict) and "request_id" in held]


async def test_failures_that_nobody_keeps_are_told_without_a_trace(open_front, collector):
    async with open_front(tracing=tracing(collector, keep_errors=False)) as front:
        status, _, headers = await front.post(CHAT, {**ASK, "model": "nobody's"})
        assert (status, "x-trace-id" in headers) == (404, False)
        call = asyncio.create_task(front.post(CHAT, ASK))
        submit = await front.peer.submitted()
        front.peer.send(wire.Failed(submit.request_id, "internal", "broken"))
        assert (await call)[0] == 500
        assert [row["trace_id"] for row in front.rows()] == [None]
        assert front.gw.tracing.num_kept == 0


async def test_whoever_asks_within_a_trace_has_it_go_on_here(open_front, collector):
    async with open_front(tracing=tracing(collector)) as front:
        asked = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "congo=t61, rojo=1", "baggage": "user=1"}
        headers, submit = await answered(front, asked)
        assert headers["x-trace-id"] == TRACE
        assert submit.traceparent == f"00-{TRACE}-{headers['x-request-id'][20:36]}-01"
        assert headers["traceresponse"] == submit.traceparent
        whole, *below = await collector.trace(TRACE)
        assert (whole.parent_id, whole.state) == (SPAN, "congo=t61,rojo=1")
        assert whole.attributes["penstock.trace.kept_for"] == "parent"
        assert {span.trace_id for span in below} == {TRACE}
        assert front.rows()[0]["trace_id"] == TRACE
        # Whose trace is not sampled keeps its id, and nothing else.
        headers, _ = await answered(front, {"traceparent": f"00-{TRACE[::-1]}-{SPAN}-00"}, seed=1)
        assert headers["x-trace-id"] == TRACE[::-1]
        assert front.rows()[1]["trace_id"] == TRACE[::-1]
        # A forged one is none.
        await answered(front, {"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, seed=2)
        assert front.rows()[2]["trace_id"] is None
        assert [span.kind for span in collector.spans].count(2) == 1


async def test_that_a_traces_id_is_random_is_passed_on_and_what_nobody_knows_is_not(open_front, collector):
    async with open_front(tracing=tracing(collector)) as front:
        headers, submit = await answered(front, {"traceparent": f"00-{TRACE}-{SPAN}-07"})
        assert submit.traceparent == headers["traceresponse"] == f"00-{TRACE}-{headers['x-request-id'][20:36]}-03"


@pytest.mark.parametrize(
    ("environ", "there", "absent"),
    [
        ({}, {"gen_ai.system": "penstock", "gen_ai.openai.request.service_tier": "auto"}, "gen_ai.provider.name"),
        (
            LATEST,
            {
                "gen_ai.provider.name": "penstock",
                "gen_ai.usage.cache_read.input_tokens": 0,
                "openai.api.type": "chat_completions",
                "openai.request.service_tier": "auto",
                "openai.response.service_tier": "default",
            },
            "gen_ai.system",
        ),
    ],
)
async def test_names_are_those_that_the_operator_asks_for(open_front, collector, environ, there, absent):
    sampled = {"OTEL_TRACES_SAMPLER": "always_on", "OTEL_SERVICE_NAME": "ours"}
    async with open_front(tracing=tracing(collector), environ={**sampled, **environ}) as front:
        asked = {"seed": 7, "service_tier": "auto", "response_format": {"type": "text"}}
        headers, _ = await answered(front, temperature=0.5, max_tokens=9, **asked)
        whole, *_ = await collector.trace(headers["x-trace-id"])
        common = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "demo",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.seed": 7,
            "gen_ai.output.type": "text",
            "gen_ai.response.model": "demo",
            "gen_ai.response.finish_reasons": ["stop"],
            "http.route": CHAT,
            "http.response.status_code": 200,
        }
        assert whole.attributes.items() >= {**common, **there}.items()
        assert absent not in whole.attributes
        assert whole.resource["service.name"] == "ours"


@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.parametrize("tenant", [True, False])
async def test_prompts_and_answers_are_told_only_if_operator_and_tenant_say_so(open_front, collector, operator, tenant):
    sections = {
        "tracing": tracing(collector, sample_ratio=1.0, content=operator),
        "policies": {"default": Policy(trace_content=tenant)},
    }
    async with open_front(environ=LATEST, **sections) as front:
        headers, _ = await answered(front, messages=[{"role": "user", "content": "My secret"}])
        spans = await collector.trace(headers["x-trace-id"])
        is_told = operator and tenant
        assert ("My secret" in repr(spans)) == is_told
        if is_told:
            said = spans[0].attributes
            (asked,) = json.loads(said["gen_ai.input.messages"])
            assert asked == {"role": "user", "parts": [{"type": "text", "content": "My secret"}]}
            (answer,) = json.loads(said["gen_ai.output.messages"])
            assert answer["parts"][0]["content"].strip() == "Hi"


async def test_whoever_reads_along_with_another_s_answer_links_to_that_request(open_front, collector):
    async with open_front(tracing=tracing(collector, sample_ratio=1.0)) as front:
        first = asyncio.create_task(front.post(CHAT, {**ASK, "temperature": 0}))
        submit = await front.peer.submitted()
        second = asyncio.create_task(front.post(CHAT, {**ASK, "temperature": 0}))
        (run,) = front.gw.cache._runs.values()
        await until(lambda: len(run.readers) == 2)
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop")
        began, followed = [headers for _, _, headers in (await first, await second)]
        assert followed["x-penstock-cache"] == "shared"
        whole, *below = await collector.trace(began["x-trace-id"])
        assert not any(span.links for span in (whole, *below))
        spans = await collector.trace(followed["x-trace-id"])
        assert {span.name: span.links for span in spans if span.links} == {"shared": [(whole.trace_id, whole.span_id)]}
        assert "worker" not in {span.name for span in spans}


async def test_a_stream_tells_the_times_that_its_worker_told(open_front, collector):
    async with open_front(tracing=tracing(collector, sample_ratio=1.0)) as front:
        stream = front.chat(stream=True)
        submit = await front.peer.submitted()
        timeline = wire.Timeline([wire.Chunk(0.001, 0.002, 7), wire.Chunk(0.003, 0.002, 5)], [0.006])
        front.peer.say(submit, front.ids("Hi"))
        told = {"prefill_s": 0.004, "num_drafted_tokens": 8, "num_accepted_tokens": 5, "engine_s": 0.5}
        front.peer.say(submit, [3], "stop", timeline=timeline, **told)
        async for _ in await stream:
            pass
        (row,) = await front.settled(1)
        whole, *below = await collector.trace(row["trace_id"])
        (worker,) = [span for span in below if span.name == "worker"]
        said = worker.attributes
        assert (said["penstock.speculation.num_drafted_tokens"], said["penstock.engine_s"]) == (8, 0.5)
        assert said["penstock.speculation.num_accepted_tokens"] == 5
        happened = [(event[0], event[2].get("penstock.num_tokens")) for event in worker.events]
        chunks = [("prefill chunk", 7), ("prefill chunk", 5)]
        ends = [("first token", None), ("last token", None)]
        assert happened == [("taken in", None), ("scheduled", None), *chunks, ("preempted", None), *ends]
        assert said["penstock.worker.prefill_ms"] == 4
        assert sum(span.seconds for span in below if span.parent_id == whole.span_id) == pytest.approx(whole.seconds)


async def test_the_wait_before_the_handler_runs_is_part_of_the_whole(open_front, collector):
    async with open_front(tracing=tracing(collector, sample_ratio=1.0)) as front:
        reader, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
        body = b'{"model": "nobody"}'
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n".encode())
        await writer.drain()
        await answered(front)  # and those bytes have come meanwhile
        between_ns = time.time_ns()
        writer.write(b"authorization: Bearer sk-of-the-tests\r\n\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        (line,) = [line for line in answer.decode().splitlines() if line.startswith("x-trace-id")]
        whole, receive, after, *_ = await collector.trace(line.partition(": ")[2])
        assert (receive.name, after.name) == ("receive", "auth")
        assert whole.start_ns == receive.start_ns < between_ns < receive.end_ns == after.start_ns


async def test_responses_in_the_background_and_the_admin_api_have_their_spans(open_front, collector):
    async with open_front(tracing=tracing(collector, sample_ratio=1.0)) as front:
        status, body, headers = await front.post(
            "/v1/responses", {"model": "demo", "input": "Hello", "background": True}
        )
        assert (status, body["status"]) == (200, "queued")
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop")
        spans = await collector.trace(headers["x-trace-id"], num_wholes=2)
        first, behind = [span for span in spans if span.kind == 2]
        assert (first.name, behind.name) == ("chat", "chat demo")
        assert behind.parent_id == first.span_id
        assert [row["trace_id"] for row in await front.settled(1)] == [first.trace_id]
        admin = {"authorization": "Bearer sk-of-the-tests-admin"}
        async with front.http.get(f"{front.url}/admin/v1/tenants", headers=admin) as answer:
            trace_id = answer.headers["x-trace-id"]
        spans = await collector.trace(trace_id)
        assert [span.name for span in spans] == ["GET /admin/v1/tenants", "receive", "answer"]


async def test_a_collector_that_hangs_costs_spans_and_no_request(open_front, collector):
    collector.hang()
    config = tracing(collector, sample_ratio=1.0, max_queued_spans=64)
    async with open_front(tracing=config) as front:
        for seed in range(12):
            await answered(front, seed=seed)
        sender = front.gw.tracing.sender
        await until(lambda: sender.count.num_dropped > 0)
        assert sender.count.num_exported == 0
        assert len(front.rows()) == 12
        collector.go_on()
        await until(lambda: sender.count.num_exported > 0)
        headers, _ = await answered(front, seed=99)
        await collector.trace(headers["x-trace-id"])
        collector.hang()
        await answered(front, seed=100)
        began_at = time.monotonic()
    assert time.monotonic() - began_at < 10  # it is not waited for


@pytest.mark.parametrize(
    ("protocol", "opened", "turned_away"),
    [
        ("grpc", collectors.by_grpc, "UNAUTHENTICATED: no key"),
        ("http/protobuf", collectors.by_http, "401 Unauthorized"),
    ],
)
async def test_what_a_collector_refuses_is_counted_and_why_is_told(open_front, caplog, protocol, opened, turned_away):
    with opened() as collector:
        collector.num_refused = 2
        async with open_front(tracing=tracing(collector, protocol=protocol, sample_ratio=1.0)) as front:
            headers, _ = await answered(front)
            spans = await collector.trace(headers["x-trace-id"])
            sender = front.gw.tracing.sender
            await until(lambda: sender.count.num_exported > 0)
            assert (sender.count.num_exported, sender.count.num_failed) == (len(spans) - 2, 2)
            assert "refused 2 of them: too old" in caplog.text
            collector.turns_away, sender._told_at = True, -1e9
            await answered(front, seed=1)
            await until(lambda: turned_away in caplog.text)


async def test_where_no_collector_is_spans_are_counted_and_the_next_process_goes_on(open_front, caplog):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        config = settings.Tracing(endpoint=endpoint, protocol="http/protobuf", sample_ratio=1.0, export_timeout_s=0.2)
        async with open_front(tracing=config) as front:
            await answered(front)
            sender = front.gw.tracing.sender
            await until(lambda: sender.count.num_failed > 0)
            assert any("spans are lost" in record.getMessage() for record in caplog.records)
            failed = sender.count.num_failed
            process = sender.process
            process.kill()
            await until(lambda: sender.process is not process and sender.is_there)
            await answered(front, seed=1)
            await until(lambda: sender.count.num_failed > failed)
            assert len(front.rows()) == 2


def test_opentelemetry_s_own_variables_say_where_and_which():
    def order(environ, **asked):
        return order_of(settings.Settings(tracing=settings.Tracing(**asked)), environ)

    assert order({}) is None
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert order(there).protocol == "http/protobuf"
    assert order(there).endpoint == ""
    assert order({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}).protocol == "grpc"
    assert order({**there, "OTEL_SDK_DISABLED": "true"}) is None
    assert order({**there, "OTEL_TRACES_EXPORTER": "none"}) is None
    assert order({**there, **LATEST}).is_latest
    with pytest.raises(TracingInvalid, match="zipkin"):
        order({**there, "OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(TracingInvalid, match="http/json"):
        order({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, endpoint="http://c")


def test_a_sampler_is_one_of_opentelemetry_s():
    config = settings.Tracing(sample_ratio=0.25)
    assert sampler_of(config, {}) == (0.25, True)
    asked = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    assert sampler_of(config, asked) == (0.5, True)
    assert sampler_of(config, {"OTEL_TRACES_SAMPLER": "always_off"}) == (0.0, False)
    for wrong in ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, {**asked, "OTEL_TRACES_SAMPLER_ARG": "2"}):
        with pytest.raises(SamplerUnknown):
            sampler_of(config, wrong)
