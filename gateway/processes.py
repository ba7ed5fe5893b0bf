"""Several gateway processes on one port: who starts them, replaces those that die, and stops them all.

The first process listens to nobody. It brings the store up to date, starts the workers, and then as many gateways as
the settings say; each binds the port for itself, so that the kernel deals the connections out among those that live.
A gateway (``member``) is told its settings, with their secrets, and which models are not served, over its standard
input, and then how the others stand; its end tells it that it is alone. What it asks for stands on its standard output,
among the lines for everybody (``leases``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway import app, doors, ending, log_level, store, workers
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.crew import Crew
from gateway.dispatch import NothingToServe
from gateway.doors import Stop
from gateway.launcher import Launcher, environment
from gateway.leases import ToOwner
from gateway.memory import Need
from gateway.redis import Redis
from gateway.settings_file import BAD_START
from policies import settings

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "gateway.member")
"""Starts a gateway, which waits for its settings."""
READY = "Penstock ready on "
CLOSING_S = ending.CLOSING_S - ending.WORKERS_S - ending.KILLED_S - ending.LAST_S
"""How long gateways may take when ``server.drain_s`` is over: then the workers end, which are not theirs."""


async def serve(
    config: settings.Settings,
    environ: Mapping[str, str],
    announce: Callable[[str], None],
    launcher: Launcher | None = None,
    stop: Stop | None = None,
) -> None:
    """As ``app.serve``, with ``server.processes`` gateways; raises what it raises."""
    stop, clock = stop or Stop(), Clock()
    is_hopeless = False

    def give_up() -> None:
        nonlocal is_hopeless
        is_hopeless = True
        stop.asked.set()

    # What each of the gateways would refuse is refused once, before anything has begun.
    app.look_at(config, environ)
    await Redis(config.redis, clock).close()
    async with contextlib.AsyncExitStack() as stack:
        reserved = doors.reserve(config.server)
        for bound in reserved:
            stack.enter_context(bound)
        async with doors.until(stop.asked), store.opened(config.store) as rooms:
            seeds = config.policies, config.prices, config.billing.currency
            with store.begun(rooms):
                app.show(await bootstrap(rooms, environ, *seeds), announce)
        if stop.asked.is_set():
            return
        finding = asyncio.ensure_future(_that_can_be_served(config))
        if not await doors.before(stop.asked, _over(finding)):
            return
        served, needs = finding.result()
        crew = Crew(served, clock, give_up, launcher)
        stack.push_async_callback(ending.dismiss, crew.close)
        await crew.start(needs)
        server = msgspec.structs.replace(config.server, port=reserved[0].getsockname()[1])
        family = Family(msgspec.structs.replace(config, server=server), clock, crew, announce, give_up)
        stack.push_async_callback(family.close, stop.urgent)
        log_level.switch_by_signal(family.pids)
        if await doors.before(stop.asked, family.start()):
            announce(f"{READY}{doors.url_of(server, reserved[0])}")
            await stop.asked.wait()
    if is_hopeless:
        raise NothingToServe


async def _over(work: asyncio.Future[Any]) -> None:
    await work


async def _that_can_be_served(config: settings.Settings) -> tuple[settings.Settings, dict[str, Callable[[], Need]]]:
    """Without the models whose files are no good, which one process says rather than all, and what the others need.
    Raises NothingToServe."""
    found = await asyncio.gather(*(app.files_of(config, name) for name in config.models))
    needs = {name: one[1] for name, one in zip(config.models, found, strict=True) if one is not None}
    if not needs and not config.upstreams:
        raise NothingToServe
    return msgspec.structs.replace(config, models={name: config.models[name] for name in needs}), needs


class Family:
    """The gateways."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        crew: Crew,
        announce: Callable[[str], None],
        give_up: Callable[[], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """``give_up`` is called when a gateway cannot be started at all; why is on standard error."""
        self._drain_s = config.server.drain_s
        self._members = [
            Member(number, config, clock, crew, announce, give_up, command) for number in range(config.server.processes)
        ]

    async def start(self) -> None:
        """Until each of them has been ready."""
        for member in self._members:
            member.start()
        await asyncio.gather(*(member.ready.wait() for member in self._members))

    async def close(self, urgent: asyncio.Event) -> None:
        """Each finishes what it answers, or hurries when that is asked; none outlives this."""
        for member in self._members:
            member.stop()
        if not await doors.before(urgent, self._gone(), self._drain_s + CLOSING_S) and urgent.is_set():
            for member in self._members:
                member.stop()
            await doors.before(asyncio.Event(), self._gone(), CLOSING_S)
        await asyncio.gather(*(member.kill() for member in self._members))

    def pids(self) -> list[int]:
        """Of those that are ready, and so hear signals."""
        return [member.pid for member in self._members if member.pid is not None and member.is_ready]

    async def _gone(self) -> None:
        await asyncio.gather(*(member.gone() for member in self._members))


class Member:
    """One place for a gateway, and the process that fills it at the moment."""

    def __init__(
        self,
        number: int,
        config: settings.Settings,
        clock: Clock,
        crew: Crew,
        announce: Callable[[str], None],
        give_up: Callable[[], None],
        command: Sequence[str],
    ) -> None:
        self.ready = asyncio.Event()
        """It has been, once."""
        self._number = number
        self._config = config
        self._clock = clock
        self._crew = crew
        self._announce = announce
        self._give_up = give_up
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self.is_ready = False
        """The process that fills it at the moment."""
        self._stopping = False
        self._lives: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._lives = asyncio.create_task(self._live(), name=f"gateway {self._number}")

    def stop(self) -> None:
        """Asks it to finish; a second time, to hurry. Another will not be started."""
        self._stopping = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        elif self._lives is not None:
            self._lives.cancel()

    async def gone(self) -> None:
        if self._lives is not None:
            await asyncio.wait([self._lives])

    async def kill(self) -> None:
        if self._lives is not None:
            self._lives.cancel()
            await asyncio.wait([self._lives])

    async def _live(self) -> None:
        num_failures = num_lives = 0
        limits = self._config.workers
        while True:
            num_lives += 1
            started_at = self._clock.now()
            reason, status = await self._one_life()
            if self._stopping:
                return
            if not self.ready.is_set() and (status == BAD_START or num_lives == workers.MAX_FIRST_STARTS):
                if status != BAD_START:  # which has said why
                    log.error("gateway %d given up: it %s before it was ever ready", self._number, reason)
                return self._give_up()
            lasted_s = self._clock.now() - started_at
            fresh = self.is_ready and lasted_s > limits.max_restart_backoff_s
            num_failures = 1 if fresh else num_failures + 1
            delay_s = workers.backoff_s(num_failures, limits)
            log.error("gateway %d lost: it %s; the next starts in %.3g s", self._number, reason, delay_s)
            await self._clock.sleep(delay_s)

    async def _one_life(self) -> tuple[str, int | None]:
        """From start to end: how it ended, and the exit status if there was a process."""
        self.is_ready = False
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment(),
                start_new_session=True,  # Ctrl-C is for the first process, which then asks the others once
            )
        except OSError as error:
            return f"could not be started: {error.strerror or error}", None
        status = await self._follow(process)
        return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}", status

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        """Tells it what it has to know, and hears it until it ends: the exit status."""
        assert process.stdin is not None
        assert process.stdout is not None
        told = process.stdin
        given_up = self._config.models.keys() - self._crew.models
        told.write(msgspec.json.encode((self._config, sorted(given_up))) + b"\n")
        lessee = self._crew.admit(lambda message: told.write(msgspec.json.encode(message) + b"\n"))
        try:
            async for line in process.stdout:
                if line.startswith(READY.encode()):
                    self.is_ready = True
                    self.ready.set()
                    if log_level.is_switched():
                        process.send_signal(signal.SIGUSR1)
                    continue
                try:
                    message = msgspec.json.decode(line, type=ToOwner)
                except msgspec.DecodeError:  # a line for everybody
                    self._announce(line.decode().rstrip())
                else:
                    self._crew.heard(lessee, message)
            return await process.wait()
        finally:
            self._crew.leave(lessee)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            process.stdin.close()
            self._process = None
