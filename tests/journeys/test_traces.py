"""One request's trace, from its client's bytes to a real worker and back, as a real collector has it."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from benchmarks import failover
from policies import settings
from tests import batches, collectors
from tests.builders import until
from tests.house import running

ENGINE = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=64 << 20, max_step_tokens=64)
PARTS = ["receive", "auth", "parse", "render", "cache", "admit", "queue", "route", "worker", "stream", "settle"]


@pytest.mark.parametrize("kind", [collectors.by_grpc, collectors.by_http])
async def test_a_streaming_request_is_told_from_its_first_byte_to_its_last(tmp_path, kind, capfd):
    with kind() as collector:
        tracing = settings.Tracing(
            endpoint=collector.endpoint,
            protocol="grpc" if kind is collectors.by_grpc else "http/protobuf",
            sample_ratio=1.0,
            headers={"x-of": "penstock"},
        )
        with running(tmp_path, models={"demo": settings.Model(engine=ENGINE)}, tracing=tracing) as house:
            asked_at = time.time_ns()
            async with house.stream("Count. " * 200, max_tokens=24, ignore_eos=True) as answer:
                trace_id = answer.response.headers["x-trace-id"]
                response = answer.response.headers["traceresponse"]
                request_id = answer.response.headers["x-request-id"]
                await answer.text()
            answered_at = time.time_ns()
            spans = await collector.trace(trace_id)
            (row,) = await house.ledger_rows()
    whole, *below = spans
    assert whole.name == "chat demo"
    assert whole.kind == 2
    assert response == f"00-{trace_id}-{whole.span_id}-01"
    assert row.trace_id == trace_id
    assert row.request_id == request_id == whole.attributes["penstock.request.id"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == row.num_completion_tokens == 24
    assert asked_at <= whole.start_ns < whole.end_ns <= answered_at

    parts = [span for span in below if span.parent_id == whole.span_id]
    assert [span.name for span in parts] == PARTS
    for before, after in itertools.pairwise(parts):
        assert before.end_ns == after.start_ns
    assert sum(span.seconds for span in parts) == pytest.approx(whole.seconds, abs=1e-3)
    assert 1e3 * whole.seconds >= row.duration_ms

    worker = parts[PARTS.index("worker")]
    assert worker.attributes["penstock.worker"] == "demo-0"
    happened = [event[0] for event in worker.events]
    chunks = [event for event in worker.events if event[0] == "prefill chunk"]
    assert len(chunks) >= 3
    assert happened == ["taken in", "scheduled", *["prefill chunk"] * len(chunks), "first token", "last token"]
    assert all(worker.start_ns <= at <= worker.end_ns for _, at, _ in worker.events)
    told = [worker.attributes[f"penstock.worker.{part}_ms"] for part in ("queue", "prefill", "decode")]
    assert sum(told) <= 1e3 * worker.seconds
    assert worker.attributes["penstock.speculation.num_accepted_tokens"] == row.num_accepted_tokens
    assert sum(event[2]["penstock.num_tokens"] for event in chunks) == row.num_prompt_tokens
    assert [event[0] for event in whole.events] == ["first token"]
    assert whole.resource["service.name"] == "penstock"
    assert collector.headers[0]["x-of"] == "penstock"


async def test_every_way_of_asking_has_its_trace(tmp_path):
    with collectors.by_http() as collector:
        tracing = settings.Tracing(endpoint=collector.endpoint, protocol="http/protobuf", sample_ratio=1.0)
        with running(tmp_path, tracing=tracing, **failover.sections(2)) as house:
            async with house.http() as session:
                for path, body, name, num_prompts in WAYS:
                    async with session.post(path, json={"model": "demo", **body}) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                        trace_id = answer.headers["x-trace-id"]
                    whole, *below = await collector.trace(trace_id)
                    assert whole.name == f"{name} demo"
                    assert_parts_add_up(whole, below)
                    workers = [span for span in below if "penstock.worker" in span.attributes and span.name == "worker"]
                    assert len(workers) == num_prompts

            async with house.client() as client:
                batch = await batches.over(client, await batches.begun(client, batches.lines(3)))
                assert batch.status == "completed"
            await until(lambda: sum(of_batch(span) == batch.id for span in collector.spans) == 3)


@pytest.mark.parametrize("kept", [{"sample_ratio": 1.0}, {"sample_ratio": 0.0, "keep_slower_s": 1e-6}])
async def test_a_lost_worker_is_in_the_trace_also_of_what_nobody_had_chosen(tmp_path, kept):
    with collectors.by_http() as collector:
        tracing = settings.Tracing(endpoint=collector.endpoint, protocol="http/protobuf", **kept)
        with running(tmp_path, tracing=tracing, **failover.sections(2)) as house:
            wanted = {"max_tokens": 1500, "temperature": 1, "seed": 1, "ignore_eos": True}
            async with house.stream("Tell me a story.", **wanted) as answer:
                trace_id = answer.response.headers["x-request-id"].removeprefix("req_")
                await answer.take(3)
                (lost,) = [worker for worker, flights in failover.held(house).items() if flights]
                os.kill(lost.facts.pid, signal.SIGKILL)
                await answer.text()
            whole, *below = await collector.trace(trace_id)
            assert_parts_add_up(whole, below)
            names = [span.name for span in below if span.parent_id == whole.span_id]
            assert names == [*PARTS[:6], *2 * PARTS[6:9], *PARTS[9:]]
            first, second = [span for span in below if span.name == "worker"]
            assert (first.attributes["penstock.worker"], first.is_error) == (lost.name, True)
            assert first.attributes["penstock.worker.left"] == "lost"
            assert second.attributes["penstock.worker"] != lost.name
            assert second.attributes["penstock.num_continued_tokens"] >= 1
            assert [event[0] for event in whole.events] == ["first token", "worker lost"]
            num_tokens = second.attributes["penstock.num_continued_tokens"]
            assert whole.events[1][2] == {"penstock.worker": lost.name, "penstock.num_tokens": num_tokens}
            assert not whole.is_error


HELLO = [{"role": "user", "content": "Hello"}]
WAYS = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "n": 2}, "chat", 1),
    ("/v1/completions", {"prompt": ["One", "Two", "Three"], "max_tokens": 4}, "text_completion", 3),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 4}, "chat", 1),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}, "chat", 1),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 4}}, "chat", 1),
    ("/v1/embeddings", {"input": "Hello"}, "embeddings", 1),
    ("/v1/rerank", {"query": "Hello", "documents": ["Hello there"]}, "rerank", 2),
]


def assert_parts_add_up(whole, below):
    parts = [span for span in below if span.parent_id == whole.span_id]
    assert parts[0].start_ns == whole.start_ns
    assert parts[-1].end_ns == whole.end_ns
    for before, after in itertools.pairwise(parts):
        assert before.end_ns == after.start_ns


def of_batch(span):
    return span.attributes.get("penstock.batch.id")
