"""Log lines: their shape on a console and as JSON, when they are written, and what never gets into them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest

from gateway import backlog, log_level, telemetry
from gateway.telemetry import Fields, Lines
from policies import settings, wire
from policies.terms import Sampling
from tests.builders import PATIENCE_S, ROOT, an_entry, until

NOON = 1_795_000_000.0


class Heard(Lines):
    """Lines, and what was written of them."""

    def __init__(self, as_json: bool = False) -> None:
        self._file = tempfile.TemporaryFile("w", encoding="utf-8")  # noqa: SIM115
        super().__init__(self._file, Fields(as_json))

    def told(self) -> str:
        self.backlog.drain(PATIENCE_S)
        return os.pread(self._file.fileno(), 1 << 24, 0).decode()


@pytest.fixture
def loggers():
    """The loggers as they were, afterwards."""
    root, events, handler = logging.root, telemetry._events, telemetry._handler
    handlers, level, source = root.handlers[:], root.level, logging._srcfile
    levels = {name: logging.getLogger(name).level for name in telemetry.NOISY}
    yield
    root.handlers[:], telemetry._events, telemetry._handler = handlers, events, handler
    root.setLevel(level)
    logging._srcfile = source
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


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
    lines = Heard(as_json)
    logger = logging.Logger("gateway.somewhere")
    logger.addHandler(lines)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it %s", "failed")
    told = lines.told()
    assert "it failed" in told
    assert "ValueError: broken" in told
    if as_json:
        (line,) = told.splitlines()
        assert json.loads(line)["logger"] == "gateway.somewhere"


def test_what_is_said_of_a_request_has_its_ids_as_fields():
    def told(as_json: bool, extra: dict[str, str | None]) -> str:
        lines = Heard(as_json)
        logger = logging.Logger("gateway.somewhere")
        logger.addHandler(lines)
        logger.error("it failed", extra=extra)
        return lines.told()

    sent = wire.Submit("req_1", [1], Sampling(max_tokens=1), traceparent=f"00-{'4b' * 16}-{'0f' * 8}-01")
    assert told(False, telemetry.about_sent(sent)).endswith(f" it failed request_id=req_1 trace_id={'4b' * 16}\n")
    assert told(False, telemetry.about("req_1")).endswith(" it failed request_id=req_1\n")
    line = json.loads(told(True, telemetry.about("req_1", "4b" * 16)))
    assert (line["message"], line["request_id"], line["trace_id"]) == ("it failed", "req_1", "4b" * 16)
    assert "trace_id" not in json.loads(told(True, telemetry.about("req_1")))


def test_the_same_words_about_two_requests_are_two_lines():
    lines = Heard()
    for request_id in ("req_1", "req_2", "req_2"):
        record = a_record("it failed", NOON)
        vars(record).update(telemetry.about(request_id))
        lines.emit(record)
    lines.close()
    assert [line.split(" warning ")[1] for line in lines.told().splitlines()] == [
        "it failed request_id=req_1",
        "it failed request_id=req_2",
        "it failed (once more in 10 s) request_id=req_2",
    ]


async def test_lines_are_written_together_and_warnings_at_once():
    lines = Heard()
    for _ in range(3):
        lines.event(an_entry())
    assert lines.told() == ""
    lines.emit(logging.makeLogRecord({"msg": "look", "levelno": logging.WARNING, "levelname": "WARNING"}))
    assert [line.split()[1] for line in lines.told().splitlines()] == ["info"] * 3 + ["warning"]
    lines.event(an_entry())
    await until(lambda: len(lines.told().splitlines()) == 5)


def test_a_reader_that_is_gone_stops_nobody():
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as stream:
        lines = Lines(stream, Fields(as_json=False))
        for _ in range(2):
            lines.event(an_entry())
            lines.flush()
            lines.backlog.drain(PATIENCE_S)
    assert lines.backlog.num_lost == 2


TORN = """
import resource, sys
from gateway.backlog import Backlog
backlog = Backlog(sys.stdout, lambda num_lost: f"{num_lost} lost\\n")
all = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for line, most in (("first\\n", 12), ("second\\n", 12), ("third\\n", all)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, all))
    backlog.write(line)
    backlog.drain(60)
"""


def test_a_line_of_which_a_full_disk_took_a_part_does_not_run_into_the_next(tmp_path):
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", TORN], cwd=ROOT, stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "first\nsecond\n1 lost\nthird\n"


def test_a_reader_that_stalls_costs_lines_beyond_a_bound_and_is_told_how_many(monkeypatch):
    monkeypatch.setattr(backlog, "MAX_BYTES", 200_000)
    reads, writes = os.pipe()
    with open(writes, "w") as stream, open(reads, "rb") as reader:
        lines = Lines(stream, Fields(as_json=False))
        for number in range(20_000):
            lines.emit(a_record(f"line {number}", NOON))
        lines.backlog.drain(0.0)
        num_lost = lines.backlog.num_lost
        assert 10_000 < num_lost < 20_000
        kept = [reader.readline().decode() for _ in range(20_000 - num_lost)]
        assert [line.split()[-1] for line in kept] == [str(number) for number in range(len(kept))]
        said = reader.readline().decode()
        assert f"warning log: {num_lost} lines before this one are lost" in said
        lines.backlog.drain(PATIENCE_S)
        lines.emit(a_record("and on", NOON))
        assert reader.readline().decode().endswith(" warning and on\n")
        assert lines.backlog.num_lost == num_lost


def test_a_stream_that_refuses_to_wait_is_waited_for():
    reads, writes = os.pipe()
    os.set_blocking(writes, False)  # as another process that has it may do
    with open(writes, "w") as stream, open(reads, "rb") as reader:
        lines = Lines(stream, Fields(as_json=False))
        for number in range(3000):
            lines.emit(a_record(f"line {number}", NOON))
        assert [reader.readline().split()[-1] for _ in range(3000)] == [b"%d" % number for number in range(3000)]


def test_the_end_waits_for_lines_that_are_read_and_not_for_a_reader_that_stalls(monkeypatch):
    monkeypatch.setattr(telemetry, "LAST_S", 0.1)
    reads, writes = os.pipe()
    with open(writes, "w") as stream, open(reads, "rb") as reader:
        lines = Lines(stream, Fields(as_json=False))
        lines.emit(a_record("x" * 100_000, NOON))
        lines.close()
        assert reader.readline().decode().endswith("x\n")


async def test_a_thread_writes_its_own_line_at_once():
    lines = Heard()
    record = logging.makeLogRecord({"msg": "from afar", "levelno": logging.INFO, "levelname": "INFO"})
    await asyncio.to_thread(lines.emit, record)
    assert "from afar" in lines.told()


@pytest.mark.parametrize(("level", "num_lines"), [("info", 1), ("warning", 0)])
def test_the_level_holds_for_requests_too(loggers, capfd, level, num_lines):
    telemetry.log_to_stderr(settings.Log(level=level))
    telemetry.tell(an_entry())
    logging.root.handlers[0].close()
    assert len(capfd.readouterr().err.splitlines()) == num_lines


async def test_a_signal_switches_to_debug_and_back(loggers, capfd):
    telemetry.log_to_stderr(settings.Log(level="warning"))
    signal.raise_signal(signal.SIGUSR1)  # nobody hears it yet
    assert not logging.root.isEnabledFor(logging.DEBUG)
    log_level.switch_by_signal()
    logger = logging.getLogger("gateway.somewhere")
    try:
        signal.raise_signal(signal.SIGUSR1)
        await until(lambda: logger.isEnabledFor(logging.DEBUG))
        telemetry.tell(an_entry(request_id="req_seen"))
        signal.raise_signal(signal.SIGUSR1)
        await until(lambda: not logger.isEnabledFor(logging.DEBUG))
        telemetry.tell(an_entry(request_id="req_unseen"))
        logging.root.handlers[0].close()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    told = capfd.readouterr().err
    assert "req_seen" in told
    assert "req_unseen" not in told
    assert "log: from warning up" in told


def a_record(text: str, unix_s: float, level: int = logging.WARNING) -> logging.LogRecord:
    said = {"name": "gateway.a", "msg": text, "levelno": level, "levelname": logging.getLevelName(level)}
    return logging.makeLogRecord({**said, "created": unix_s})


def test_what_is_said_again_and_again_is_told_once_and_then_counted():
    lines = Heard()
    for number in range(1000):
        lines.emit(a_record("the store is away", NOON + number / 1000))
        lines.emit(a_record(f"worker {number % 2} is lost", NOON + number / 1000))
    told = lines.told().splitlines()
    assert [line.split(" warning ")[1] for line in told] == [
        "the store is away",
        "worker 0 is lost",
        "worker 1 is lost",
    ]
    lines.emit(a_record("the store is away", NOON + telemetry.REPEAT_S + 1))
    told = lines.told().splitlines()[3:]
    assert [line.split(" warning ")[1] for line in told] == [
        "the store is away (999 times more in 10 s)",
        "worker 0 is lost (499 times more in 10 s)",
        "worker 1 is lost (499 times more in 10 s)",
        "the store is away",
    ]
    lines.emit(a_record("the store is away", NOON + telemetry.REPEAT_S + 2))
    lines.close()
    assert lines.told().endswith("the store is away (once more in 10 s)\n")


def test_a_clock_that_is_set_back_silences_nothing():
    lines = Heard()
    for unix_s in (NOON, NOON + 1, NOON - 3600, NOON - 3599, NOON - 1800):
        lines.emit(a_record("the store is away", unix_s))
    told = [line.split(" warning ")[1] for line in lines.told().splitlines()]
    again = "the store is away (once more in 10 s)"
    assert told == ["the store is away", again, "the store is away", again, "the store is away"]


def test_more_kinds_of_lines_than_are_remembered_are_all_told():
    lines = Heard()
    for _ in range(2):
        for number in range(telemetry.MAX_REPEATS + 5):
            lines.emit(a_record(f"kind {number}", NOON))
    assert len(lines.told().splitlines()) == telemetry.MAX_REPEATS + 10
