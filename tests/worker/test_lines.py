"""A worker's log: nobody who reads it can hold a step."""

from __future__ import annotations

import logging
import os
import time

import pytest

from worker import lines
from worker.lines import Aside, Lines


@pytest.fixture
def pipe():
    """Both ends: one that reads, and the descriptor of one that writes."""
    reads, writes = os.pipe()
    with open(reads, "rb") as reader:
        yield reader, writes
    os.close(writes)


def told_by(aside: Aside) -> logging.Logger:
    logger = logging.Logger("worker.somewhere")
    logger.addHandler(aside)
    return logger


def test_a_reader_that_stalls_costs_lines_beyond_a_bound_and_is_told_how_many(pipe, monkeypatch):
    monkeypatch.setattr(lines, "MAX_WAITING", 1000)
    reader, writes = pipe
    aside = Aside(writes, Lines("demo-0", as_json=False))
    logger = told_by(aside)
    logger.warning("x" * 2_000_000)
    while not aside._waiting.empty():
        time.sleep(0.001)
    # The thread is in the middle of it.
    for number in range(1500):
        logger.warning("line %d", number)
    assert aside._num_lost == 500
    assert reader.readline().decode().endswith("x\n")
    for number in range(1000):
        assert reader.readline().decode().endswith(f" warning worker demo-0: line {number}\n")
    logger.warning("and on")
    assert "worker demo-0: 500 lines before this one are lost" in reader.readline().decode()
    assert reader.readline().decode().endswith("and on\n")


def test_the_end_waits_for_lines_that_are_read_and_not_for_a_reader_that_stalls(pipe, monkeypatch):
    monkeypatch.setattr(lines, "LAST_S", 0.1)
    reader, writes = pipe
    aside = Aside(writes, Lines("demo-0", as_json=False))
    told_by(aside).warning("x" * 100_000)
    aside.close()
    assert reader.readline().decode().endswith("x\n")


def test_a_reader_that_is_gone_stops_nobody():
    reads, writes = os.pipe()
    os.close(reads)
    aside = Aside(writes, Lines("demo-0", as_json=False))
    told_by(aside).warning("to nobody")
    aside.close()
    os.close(writes)
