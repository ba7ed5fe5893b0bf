"""The gateway's end of the process that makes spans: requests that are over go out, and counts come back.

Nothing here waits. What the process has not read yet is bounded, and what comes while the bound is reached is dropped
and counted, as is what comes while there is no such process; one that is lost is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from gateway.background import alongside
from gateway.clock import Clock
from gateway.launcher import environment
from gateway.tracing.kept import LENGTH, SHUTDOWN_S, Count
from gateway.tracing.order import Order

COMMAND = (sys.executable, "-P", "-m", "gateway.tracing")
MAX_BUFFER_BYTES = 4 << 20
RESTART_S, MAX_RESTART_S = 1.0, 60.0
TELL_EVERY_S = 60.0
"""So often a collector that takes nothing is spoken of."""

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """To one such process."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Count)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            (num_bytes,) = LENGTH.unpack_from(buffer)
            end = LENGTH.size + num_bytes
            if end > len(buffer):
                return
            self._sender.heard(self._decoder.decode(buffer[LENGTH.size : end]))
            del buffer[:end]


class Sender:
    """Of one gateway."""

    def __init__(self, order: Order, environ: Mapping[str, str], clock: Clock) -> None:
        """``environ`` has the OTEL_* variables."""
        self._order = order
        self._variables = {name: value for name, value in environ.items() if name.startswith("OTEL_")}
        self._clock = clock
        self._transport: asyncio.WriteTransport | None = None
        self._is_closing = False
        self.process: asyncio.subprocess.Process | None = None
        """The one that runs now."""
        self._before = Count()
        """Of processes that are gone."""
        self._now = Count()
        self._told_at = -TELL_EVERY_S
        self.num_lost = 0
        """Requests whose spans were never made: nobody was there, or had time, to make them."""

    @property
    def count(self) -> Count:
        """Since start."""
        before, now = self._before, self._now
        return Count(
            before.num_exported + now.num_exported,
            before.num_dropped + now.num_dropped,
            before.num_failed + now.num_failed,
            now.trouble,
        )

    @property
    def is_there(self) -> bool:
        """What is sent now is heard."""
        return self._transport is not None

    def send(self, kept: Sequence[bytes]) -> None:
        """Some that were, each as MessagePack; together, so that the process is woken no more often than need be.
        Never waits."""
        transport = self._transport
        if transport is None or transport.get_write_buffer_size() > MAX_BUFFER_BYTES:
            self.num_lost += len(kept)
            return
        transport.write(b"".join([frame for each in kept for frame in (LENGTH.pack(len(each)), each)]))

    def heard(self, count: Count) -> None:
        """From the process that runs now."""
        lost_before = self._now.num_failed + self._now.num_dropped
        self._now = count
        num_new = count.num_failed + count.num_dropped - lost_before
        now = self._clock.now()
        if num_new and now >= self._told_at + TELL_EVERY_S:
            self._told_at = now
            total = self.count
            log.warning(
                "tracing: spans are lost: %d so far were not taken by the collector, %d found no room (%s)",
                *(total.num_failed, total.num_dropped, count.trouble or "it is slow"),
            )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """While this lasts there is a process; on leaving, what waits there has a moment to be exported."""
        async with alongside(self._keep_running()):
            yield
            self._is_closing = True
            if self._transport is not None:
                transport, self._transport = self._transport, None
                transport.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_S + 1.0):
                        await self._ended.wait()

    async def _keep_running(self) -> None:
        delay_s = RESTART_S
        while not self._is_closing:
            began_at = self._clock.now()
            reason = await self._run()
            self._before, self._now = self.count, Count()
            if self._is_closing:
                return
            delay_s = RESTART_S if self._clock.now() - began_at > MAX_RESTART_S else min(2 * delay_s, MAX_RESTART_S)
            log.warning("tracing: the process that exports spans %s; the next one starts in %g s", reason, delay_s)
            await self._clock.sleep(delay_s)

    async def _run(self) -> str:
        """One process, from start to end; how it ended."""
        self._ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        self.process = process = None
        transport: asyncio.Transport | None = None
        try:
            with theirs:
                self.process = process = await asyncio.create_subprocess_exec(
                    *(*COMMAND, msgspec.json.encode(self._order).decode(), str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    env={**environment(), **self._variables},
                )
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(lambda: Connection(self), ours)
            self._transport = transport
            status = await process.wait()
            return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        except OSError as error:
            return f"could not be started: {error.strerror or error}"
        finally:
            self._ended.set()
            self._transport = None
            if transport is None:
                ours.close()
            else:
                transport.abort()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
