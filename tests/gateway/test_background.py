"""Work beside other work."""

from __future__ import annotations

import asyncio
import logging

from gateway.background import alongside
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
