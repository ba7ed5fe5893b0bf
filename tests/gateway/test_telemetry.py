"""Log lines: their shape on a console and as JSON, when they are written, and what never gets into them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re

import pytest

from gateway import telemetry
from gateway.telemetry import Fields, Lines
from policies import settings
from tests.builders import an_entry, until

NOON = 1_795_000_000.0


@pytest.fixture
def loggers():
    """The loggers as they were, afterwards."""
    root, events = logging.root, telemetry._events
    handlers, level, source = root.handlers[:], root.level, logging._srcfile
    levels = {name: logging.getLogger(name).level for name in telemetry.NOISY}
    yield
    root.handlers[:], telemetry._events = handlers, events
    root.setLevel(level)
    logging._srcfile = source
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", None),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", None),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n", None),
        ("", None),
    ],
)
def test_a_trace_is_named_as_w3c_says_or_not_at_all(header, trace_id):
    assert telemetry.trace_id_of(header) == trace_id


def test_a_request_is_a_line_of_fields():
    entry = an_entry(request_id="req_1", queue_ms=0.123, ttft_ms=12.345, duration_ms=321.0, finish_reason=None)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info    request_id=req_1 tenant_id=ten_1 key_id=key_1 model=demo "
        r"endpoint=/v1/chat/completions status=200 finish_reason=- num_prompt_tokens=12 num_cached_tokens=4 "
        r"num_completion_tokens=34 num_sequences=1 created_at=1795000000 queue_ms=0.1 ttft_ms=12.3 duration_ms=321.0 "
        r"sla_class=standard service_tier=default cache=miss policy_name=default policy_version=1 cost_micros=0",
        Fields(as_json=False).event(entry, NOON),
    )
    assert " ttft_ms=- " in Fields(as_json=False).event(an_entry(ttft_ms=None), NOON)


def test_a_request_is_a_json_object_with_the_same_fields():
    entry = an_entry(ttft_ms=None)
    line = json.loads(Fields(as_json=True).event(entry, NOON))
    assert line.pop("time")
    assert line.pop("level") == "info"
    assert line == {name: getattr(entry, name) for name in entry.__struct_fields__}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_record_keeps_its_trace(as_json):
    stream = io.StringIO()
    logger = logging.Logger("gateway.somewhere")
    logger.addHandler(Lines(stream, Fields(as_json)))
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it %s", "failed")
    told = stream.getvalue()
    assert "it failed" in told
    assert "ValueError: broken" in told
    if as_json:
        (line,) = told.splitlines()
        assert json.loads(line)["logger"] == "gateway.somewhere"


async def test_lines_are_written_together_and_warnings_at_once():
    stream = io.StringIO()
    lines = Lines(stream, Fields(as_json=False))
    for _ in range(3):
        lines.event(an_entry())
    assert stream.getvalue() == ""
    lines.emit(logging.makeLogRecord({"msg": "look", "levelno": logging.WARNING, "levelname": "WARNING"}))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["info"] * 3 + ["warning"]
    lines.event(an_entry())
    await until(lambda: len(stream.getvalue().splitlines()) == 5)


async def test_a_reader_that_is_gone_stops_nobody():
    stream = io.StringIO()
    stream.close()
    lines = Lines(stream, Fields(as_json=False))
    lines.event(an_entry())
    lines.flush()


async def test_a_thread_writes_its_own_line_at_once():
    stream = io.StringIO()
    lines = Lines(stream, Fields(as_json=False))
    record = logging.makeLogRecord({"msg": "from afar", "levelno": logging.INFO, "levelname": "INFO"})
    await asyncio.to_thread(lines.emit, record)
    assert "from afar" in stream.getvalue()


@pytest.mark.parametrize(("level", "num_lines"), [("info", 1), ("warning", 0)])
def test_the_level_holds_for_requests_too(loggers, capsys, level, num_lines):
    telemetry.log_to_stderr(settings.Log(level=level))
    telemetry.tell(an_entry())
    assert len(capsys.readouterr().err.splitlines()) == num_lines
