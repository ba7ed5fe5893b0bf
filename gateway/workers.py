"""Worker processes: start, greet, watch, replace with back-off, drain.

A ``Worker`` is one place at a model's table: a child process, or an address where a worker runs already. Who sits there
changes when it dies, falls silent or sends garbage; the place stays. Which request goes to which worker is dispatch's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from gateway.channel import Channel
from gateway.clock import Clock, Timer
from gateway.launcher import Launcher
from gateway.phases import Phases
from policies import settings, wire
from policies.devices import Claim, devices_of

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107 at most, on some systems 103."""
CANNOT_LOAD = 2
"""The exit status by which a worker says that its model will not load, however often it is tried."""
MAX_FIRST_STARTS = 3
"""A child that ends so often before it was ever ready will not be: better to say so than to go on trying."""
FIRST_POLL_S, LAST_POLL_S = 0.02, 0.2
"""Between two looks whether a child listens by now: a tenth of the time that it has been looked for."""
LEAVE_S = 5.0
"""How long a worker that holds nothing may take to leave; then it is ended."""
LAST_WORDS_S = 1.0
"""How long what a process wrote before it ended may take to be read."""
STOOD_STILL_S = 1.0
"""By so much no timer of a gateway that runs is late."""
EXIT_GRACE_S = 10.0
"""How long a process that closed its socket may take to exit by itself, so that its status can be named: on a machine
that is busy, an interpreter with torch in it takes its time."""


class Host(Protocol):
    """Who seats workers: hears what they say, and that they come and go."""

    def joined(self, worker: Worker) -> None:
        """It is ready: ``worker.facts`` is set."""

    def moved(self, worker: Worker, deltas: Sequence[wire.Delta]) -> None:
        """Sequences moved. Raises WireError when they cannot have."""

    def reported(self, worker: Worker) -> None:
        """It told how it stands: ``worker.stats``."""

    def kept(self, worker: Worker, events: wire.KvEvents) -> None:
        """Blocks of its prefix cache came and went. Raises WireError when it cannot have so many."""

    def adapter(self, worker: Worker, message: wire.AdapterLoaded | wire.AdapterRefused) -> None:
        """It can use an adapter, or cannot."""

    def refused(self, worker: Worker, failed: wire.Failed) -> None:
        """One request ended without an answer. Raises WireError when there is no such request."""

    def left(self, worker: Worker) -> None:
        """It was ready and is gone, with everything it held; another will come."""

    def gave_up(self, worker: Worker) -> None:
        """It never was ready and will not be tried again: it cannot load its model."""


class Worker:
    """One place for a worker, and the process or connection that fills it at the moment."""

    def __init__(
        self,
        name: str,
        address: str,
        host: Host,
        limits: settings.Workers,
        clock: Clock,
        child: settings.WorkerSettings | None = None,
        launcher: Launcher | None = None,
        asks: bool = True,
    ) -> None:
        """``child``: what to tell the process that ``launcher`` starts here; None when the worker at ``address`` is not
        ours. ``asks``: it will be sent requests."""
        self.name = name
        self.is_ours = child is not None
        """Started here, and nobody else's."""
        self.facts: wire.Ready | None = None
        """What it said of itself; None while it is not ready."""
        self.stats: wire.Stats | None = None
        self.num_lives = 0
        """Processes that were started here, or those elsewhere that were ready when they were reached."""
        self.phases = Phases()
        """Of what was sent there from here."""
        self._address = address
        self._host = host
        self._limits = limits
        self._clock = clock
        self._child = child
        self._launcher = launcher or Launcher()
        self._asks = asks
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lost: asyncio.Future[str] | None = None
        self._was_ready = False
        self._may_exit_by_itself = False
        self._silence: Timer | None = None
        self._closing = False
        self._lives: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the first life; ``close`` ends the last."""
        self._lives = asyncio.create_task(self._live(), name=f"worker {self.name}")

    def send(self, message: wire.Submit | wire.Cancel | wire.LoadAdapter | wire.UnloadAdapter) -> None:
        """To a ready worker. Raises WireError when the message is too long for a frame."""
        assert self._channel is not None
        self._channel.send(message)

    async def close(self, drain_s: float) -> None:
        """Lets a child finish what it holds for ``drain_s``, then ends it; a worker that is not ours is only left."""
        self._closing = True
        if self._lives is None:
            return
        if self._process is not None and self._channel is not None and self.facts is not None:
            self._channel.send(wire.Drain())
            await asyncio.wait([self._lives], timeout=drain_s)
        self._lives.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._lives

    # What the channel hears

    def heard(self, message: wire.ToGateway) -> None:
        match message:
            case wire.StepOutput(deltas):
                self._host.moved(self, deltas)
            case wire.Stats():
                self.stats = message
                self._host.reported(self)
            case wire.KvEvents():
                self._host.kept(self, message)
            case wire.Failed():
                self._host.refused(self, message)
            case wire.AdapterLoaded() | wire.AdapterRefused():
                self._host.adapter(self, message)
            case wire.Ready():
                self._greet(message)
            case wire.Hello():
                raise AssertionError("the channel keeps Hello to itself")

    def hung_up(self, reason: str, by_worker: bool) -> None:
        self._may_exit_by_itself = by_worker
        self._lose(reason)

    def _greet(self, facts: wire.Ready) -> None:
        if self.facts is not None:
            raise wire.WireError("a second Ready")
        self.facts = facts
        self._was_ready = True
        if self._child is None:
            self.num_lives += 1
        log.info(
            "worker %s ready: %s on %s%s in %s, %d KV blocks of %d tokens, process %d",
            *(self.name, facts.model, facts.device, f" by {facts.num_ranks} ranks" if facts.num_ranks > 1 else ""),
            *(facts.dtype, facts.num_blocks, facts.block_size, facts.pid),
        )
        self._listen_for_silence(0, self._clock.now())
        self._host.joined(self)

    def _listen_for_silence(self, num_heard_bytes: int, due_at: float, is_sure: bool = False) -> None:
        """Once a silence timeout: has anything come since the last look? ``due_at``: this one was to be then; where it
        is much later, it is we who stood still (a container that is paused), and the worker with us. We may have stood
        still for hardly longer than that, so before it is ``is_sure`` the worker has a moment more."""
        if self._channel is None:
            return
        num_bytes, now = self._channel.num_received_bytes, self._clock.now()
        is_silent = num_bytes == num_heard_bytes and now < due_at + STOOD_STILL_S
        if is_silent and is_sure:
            return self._lose(f"said nothing for {self._limits.silence_timeout_s:g} s")
        again = STOOD_STILL_S if is_silent else self._limits.silence_timeout_s
        self._silence = self._clock.call_later(
            again, lambda: self._listen_for_silence(num_bytes, now + again, is_silent)
        )

    # One life after another

    async def _live(self) -> None:
        num_failures = 0
        was_ever_ready = False
        while True:
            if self._child is not None:
                self.num_lives += 1
            started_at = self._clock.now()
            reason, status = await self._one_life()
            if self._closing:
                return
            was_ever_ready |= self._was_ready
            if status is not None and not was_ever_ready:
                if status == CANNOT_LOAD:  # and it has said why
                    return self._host.gave_up(self)
                if self.num_lives == MAX_FIRST_STARTS:
                    log.error("worker %s given up: it %s before it was ever ready, as it did before", self.name, reason)
                    return self._host.gave_up(self)
            lasted_s = self._clock.now() - started_at
            fresh = self._was_ready and lasted_s > self._limits.max_restart_backoff_s
            num_failures = 1 if fresh else num_failures + 1
            delay_s = backoff_s(num_failures, self._limits)
            log.warning("worker %s lost: it %s; next try in %.3g s", self.name, reason, delay_s)
            await self._clock.sleep(delay_s)

    async def _one_life(self) -> tuple[str, int | None]:
        """From start to loss: the reason, and the exit status if it was a child that ended by itself."""
        self._lost = asyncio.get_running_loop().create_future()
        self._was_ready = self._may_exit_by_itself = False
        limit_s = self._limits.start_timeout_s
        patience = self._clock.call_later(limit_s, lambda: self._lose_unready(f"was not ready within {limit_s:g} s"))
        tasks = []
        status = None
        try:
            if self._child is not None:
                self._process = await self._launcher.start(self._child)
                log.debug("worker %s started as process %d", self.name, self._process.pid)
                tasks.append(asyncio.create_task(self._watch_exit(self._process)))
            tasks.append(asyncio.create_task(self._connect()))
            reason = await asyncio.shield(self._lost)  # whoever ends this has still to lose it
        except OSError as error:
            reason = f"could not be started: {error.strerror or error}"
        finally:
            patience.cancel()
            for task in tasks:
                task.cancel()
            self._lose("was closed")
            if self._process is not None:
                status = await self._end(self._process)
        if status is not None:
            reason = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        return reason, status

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if self._channel is not None and self._lost is not None:
            # Its last words may still be in the socket, and the end of the connection comes after them.
            await asyncio.wait([self._lost], timeout=LAST_WORDS_S)
        self.hung_up("exited", by_worker=True)

    async def _connect(self) -> None:
        poll_s = FIRST_POLL_S
        while True:
            # Known before it is connected: what the worker says first may be heard before connect() returns.
            self._channel = Channel(self, self._limits.max_send_buffer_bytes, self._asks)
            try:
                return await self._channel.connect(self._address)
            except OSError as error:
                self._channel = None
                # A child comes to listening in its own time, and its exit would be noticed; nobody watches the others.
                if self._child is None:
                    return self._lose(f"cannot be reached at {self._address}: {error.strerror or error}")
                await asyncio.sleep(poll_s)
                poll_s = min(1.1 * poll_s, LAST_POLL_S)

    def _lose_unready(self, reason: str) -> None:
        if self.facts is None:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Ends this life; whoever waits for an answer hears of it before the loop turns again."""
        if self._lost is None or self._lost.done():
            return
        self._lost.set_result(reason)
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.stats = None
        if self.facts is not None:
            self.facts = None
            self._host.left(self)

    async def _end(self, process: asyncio.subprocess.Process) -> int | None:
        """The status of a process that ended, or is about to end, by itself; any other is killed, as is one that is
        waited for no longer."""
        self._process = None
        by_itself = process.returncode is not None
        try:
            if self._may_exit_by_itself and not by_itself:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), EXIT_GRACE_S)
                    by_itself = True
        finally:
            if not by_itself:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            status = await process.wait()
            assert process.stdin is not None
            process.stdin.close()
        return status if by_itself else None


def claims_of(models: Mapping[str, settings.Model]) -> tuple[Claim, ...]:
    """What all the workers that may ever be started here ask for of the machine: where one computes is settled when it
    starts, and stays so while others come and go."""
    claims = []
    for name, model in models.items():
        engine = model.engine
        num_ranks, devices = engine.tensor_parallel * engine.pipeline_parallel, engine.devices
        for replica in range(model.replicas):
            named = devices_of(devices, replica, num_ranks) if engine.device != "cpu" else ()
            claims.append(Claim(model=name, replica=replica, num_ranks=num_ranks, device=engine.device, devices=named))
    return tuple(claims)


def child_of(
    model: str, config: settings.Settings, index: int, address: str, max_kv_bytes: int
) -> settings.WorkerSettings:
    """What the process is told that computes a model's ``index``-th replica at ``address``, with at most so many bytes
    of KV (0: as its settings say)."""
    served = config.models[model]
    engine = msgspec.structs.replace(served.engine, max_kv_bytes=max_kv_bytes) if max_kv_bytes else served.engine
    return settings.WorkerSettings(
        name=f"{model}-{index}",
        model=model,
        source=served.source,
        listen=address,
        exit_with_stdin=True,
        replica=index,
        claims=claims_of(config.models),
        engine=engine,
        log=config.log,
    )


class NoSocketDirectory(Exception):
    """There is nowhere for the sockets of workers; the message is one sentence for the operator."""


def socket_directory() -> tempfile.TemporaryDirectory[str]:
    """For sockets: ours alone, and short enough for the address of one wherever TMPDIR points. Raises
    NoSocketDirectory.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix="penstock-")
        if len(directory.name) > MAX_SOCKET_PATH - 4:
            directory.cleanup()
            directory = tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp")
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        raise NoSocketDirectory(
            "there is no directory for the sockets of workers; TMPDIR may name one that can be written to"
            f" ({error.strerror}{where})"
        ) from None
    return directory


def backoff_s(num_failures: int, limits: settings.Workers) -> float:
    """Seconds before the next try after so many failures in a row, >= 1."""
    doubled = limits.restart_backoff_s * 2.0 ** min(num_failures - 1, 30)
    return min(doubled, max(limits.max_restart_backoff_s, limits.restart_backoff_s))
