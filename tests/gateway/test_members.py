"""Gateway processes that cannot be started: tried again, and given up where none has ever been ready."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gateway.clock import Clock
from gateway.crew import Crew
from gateway.memory import Need
from gateway.processes import Family
from policies import settings
from tests.builders import until

CONFIG = settings.Settings(
    models={"demo": settings.Model(load_at_start=False)},
    server=settings.Server(processes=2),
    workers=settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02),
)


@contextlib.asynccontextmanager
async def starting(program: Path, give_up: Callable[[], None]) -> AsyncIterator[Family]:
    """Two gateways that are this program."""
    crew = Crew(CONFIG, Clock(), give_up)
    await crew.start({"demo": lambda: Need(1, 1, 0.3)})
    family = Family(CONFIG, Clock(), crew, print, give_up, [str(program)])
    for member in family._members:
        member.start()
    try:
        yield family
    finally:
        for member in family._members:
            await member.kill()
        await crew.close(0.0)


async def test_a_gateway_that_cannot_be_started_at_first_is_given_up_and_it_is_said_why(tmp_path, caplog):
    given_up: list[int] = []
    async with starting(tmp_path / "nothing", lambda: given_up.append(1)):
        await until(lambda: len(given_up) == 2)
    assert "gateway 1 given up: it could not be started: No such file or directory" in caplog.text


async def test_a_gateway_that_cannot_be_replaced_is_replaced_when_it_can_be(tmp_path, caplog):
    program, aside = tmp_path / "gateway", tmp_path / "aside"
    program.write_text("#!/bin/sh\necho Penstock ready on nowhere\nexec cat > /dev/null\n")
    program.chmod(0o755)
    async with starting(program, list) as family:
        await until(lambda: len(family.pids()) == 2)
        shot, other = family.pids()
        program.rename(aside)
        os.kill(shot, signal.SIGKILL)
        await until(lambda: "could not be started" in caplog.text)
        assert family.pids() == [other]
        aside.rename(program)
        await until(lambda: len(family.pids()) == 2)
        assert shot not in family.pids()
