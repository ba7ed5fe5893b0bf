"""Work beside other work."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.background import alongside, to_its_end
from tests.builders import until


async def test_it_runs_while_the_block_does_and_no_longer():
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with alongside(work()):
        await until(lambda: turns > 2)
    after = turns
    await asyncio.sleep(0)
    assert turns == after


async def test_a_failure_that_ends_it_is_in_the_log_and_the_block_goes_on(caplog):
    async def work() -> None:
        raise ZeroDivisionError

    async with alongside(work()):
        await until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_whoever_is_cancelled_again_and_again_still_waits_for_the_end():
    begun, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        has_ended.set()

    waiting = asyncio.create_task(to_its_end(work()))
    await begun.wait()
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert has_ended.is_set()
