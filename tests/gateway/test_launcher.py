"""A worker that is begun before anybody knows what it will compute."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.launcher import Launcher, environment
from policies import settings
from tests import builders
from tests.builders import NO_TEXT, PATIENCE_S, until

DEMO = settings.Model(engine=settings.Engine(max_kv_bytes=64 << 20))
WAITING = "import sys; sys.exit(sys.stdin.readline().count('scripted'))"


async def test_the_first_worker_is_the_one_that_was_begun_and_the_next_one_is_not():
    """Real ones: the demo's."""
    launcher = Launcher()
    async with launcher.ahead([DEMO]):
        begun = launcher._begun.pid
        dispatch = Dispatch(settings.Settings(models={"demo": DEMO}), Clock(), launcher)
        dispatch.serve("demo", NO_TEXT)
        async with asyncio.timeout(PATIENCE_S):
            await dispatch.until_ready()
            (worker,) = dispatch.workers()
            assert worker.facts.pid == begun
            os.kill(begun, signal.SIGKILL)
            await until(lambda: worker.facts is None)
            await until(lambda: worker.facts is not None)
        assert worker.facts.pid != begun
        await dispatch.close(drain_s=0)


async def test_what_nobody_needs_is_ended():
    launcher = Launcher((sys.executable, "-c", WAITING))
    async with launcher.ahead([settings.Model()]):
        process = launcher._begun
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("model", [settings.Model(load_at_start=False), settings.Model(replicas=0)])
async def test_where_no_model_is_loaded_at_once_nothing_is_begun(model):
    launcher = Launcher((sys.executable, "-c", WAITING))
    async with launcher.ahead([model]):
        assert launcher._begun is None


async def test_it_hears_its_settings_once_and_another_start_is_a_process_of_its_own():
    launcher = Launcher((sys.executable, "-c", WAITING))
    async with launcher.ahead([settings.Model()]):
        first = await launcher.start(builders.worker_settings("unix:/nowhere"))
        second = await launcher.start(builders.worker_settings("unix:/nowhere"))
        second.stdin.write(b"\n")
        assert (await first.wait(), await second.wait()) == (2, 0)


async def test_one_that_has_ended_meanwhile_is_not_told_anything():
    launcher = Launcher((sys.executable, "-c", WAITING))
    async with launcher.ahead([settings.Model()]):
        begun = launcher._begun
        begun.kill()
        await begun.wait()
        process = await launcher.start(builders.worker_settings("unix:/nowhere"))
        assert process.pid != begun.pid
        process.stdin.write(b"\n")
        await process.wait()


async def test_a_command_that_is_not_there_is_found_out_by_whoever_starts_it():
    launcher = Launcher(("/nowhere/python",))
    async with launcher.ahead([settings.Model()]):
        with pytest.raises(FileNotFoundError):
            await launcher.start(builders.worker_settings("unix:/nowhere"))


async def test_a_worker_whose_settings_never_come_ends_by_itself_and_one_with_bad_ones_says_so():
    launcher = Launcher()
    async with launcher.ahead([settings.Model()]):
        begun = launcher._begun
        begun.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await begun.wait() == 0
    async with launcher.ahead([settings.Model()]):
        begun = launcher._begun
        begun.stdin.write(b"{}\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await begun.wait() == 2


async def test_a_worker_that_nobody_tells_anything_does_not_keep_its_memory():
    told = "import sys, worker.__main__ as w; w.TOLD_WITHIN_S = 0.1; sys.argv[1:] = ['-']; sys.exit(w.main())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", told, stdin=asyncio.subprocess.PIPE, env=environment()
    )
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="who is whose child is read there")
@pytest.mark.parametrize(("sent", "statuses"), [(signal.SIGINT, (130, 0)), (signal.SIGTERM, (-signal.SIGTERM, 0))])
async def test_a_start_that_is_interrupted_leaves_nobody_behind(tmp_path, sent, statuses):
    """While both import what they need."""
    command = (sys.executable, "-m", "gateway", "serve", "--port", "0", "--data-dir", str(tmp_path))
    process = await asyncio.create_subprocess_exec(*command, env=environment(), start_new_session=True)
    await until(lambda: children_of(process.pid))
    (child,) = children_of(process.pid)
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() in statuses
    await until(lambda: is_gone(child))


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    """Or dead, and nobody has looked."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
