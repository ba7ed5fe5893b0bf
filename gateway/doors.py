"""The way in: listening sockets, the requests that are inside, and how the doors are closed behind the last of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from gateway.background import alongside
from policies.settings import Server

BACKLOG = 1024
"""Connections that may wait to be accepted."""
MAX_CODES = 200
"""Of errors that are counted by themselves: some are other servers'."""
LOOK_S = 0.05
"""Between two looks whether answers are still being sent."""


class DoorsError(Exception):
    """Nobody could be let in; the message is one sentence for the operator."""


class Doors:
    """Counts the requests inside. Once closed, connections end with the answer they are waiting for."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.answered: dict[int, int] = {}
        """Answers since start, by status."""
        self.refused: dict[str, int] = {}
        """Those that were errors, by code."""
        self.is_sending: Callable[[], bool] = lambda: False
        """Whether anybody who has left has still to be sent some of an answer; whoever sends them says so."""
        self._closed = False
        self._left = asyncio.Event()

    @property
    def are_closed(self) -> bool:
        """Whoever is answered from now on is sent away."""
        return self._closed

    def enter(self) -> bool:
        """A request comes in. True: it counts until it has to ``leave``; False: the doors are closed, and nobody waits
        for it."""
        if self._closed:
            return False
        self.num_inside += 1
        return True

    def leave(self) -> None:
        """It is answered."""
        self.num_inside -= 1
        if self._closed and not self.num_inside:
            self._left.set()

    def refuse(self, code: str) -> None:
        """One is answered with this error."""
        refused = self.refused
        code = code if code in refused or len(refused) < MAX_CODES else "other"
        refused[code] = refused.get(code, 0) + 1

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """One more, for as long as this lasts."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """One that is inside does not count for as long as this lasts: nobody waits for it."""
        self.leave()
        try:
            yield
        finally:
            self.num_inside += 1

    def close(self) -> None:
        """Whoever comes now is answered and sent away."""
        self._closed = True
        if not self.num_inside:
            self._left.set()

    async def all_left(self) -> None:
        """Until the last request that was inside at ``close`` has left, with all of its answer."""
        await self._left.wait()
        while self.is_sending():  # noqa: ASYNC110 (a socket that is empty tells nobody)
            await asyncio.sleep(LOOK_S)


class Stop:
    """SIGTERM or Ctrl-C: the first asks to finish, the second to hurry. The end of the terminal (SIGHUP) asks to
    finish, unless whoever started us wants it to be nothing to us (nohup)."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.asked.set)

    def _heard(self) -> None:
        (self.urgent if self.asked.is_set() else self.asked).set()


async def before(event: asyncio.Event, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> bool:
    """Whether ``work`` is done before the event and in time; it is cancelled otherwise. Raises what it raises."""
    task, happened = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, happened], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for future in (task, happened):
            future.cancel()


@contextlib.asynccontextmanager
async def until(event: asyncio.Event) -> AsyncIterator[None]:
    """The block is broken off when the event happens before its end, as by a timeout, and what it raises then is that
    alone."""
    patience = asyncio.timeout(None)

    async def look() -> None:
        await event.wait()
        patience.reschedule(asyncio.get_running_loop().time())

    try:
        async with patience, alongside(look()):
            yield
    except TimeoutError:
        if not patience.expired():
            raise


def listen(config: Server) -> list[socket.socket]:
    """A listening socket for each address of the host; connections wait until somebody accepts. Raises DoorsError.

    One of several processes shares the port with the others.
    """
    return _bound(config, config.port, listening=True, shared=config.processes > 1)


def reserve(config: Server) -> list[socket.socket]:
    """The port, for processes that will ``listen`` there: bound, but without accepting anything. Raises DoorsError."""
    # Shared by its option, a port would be shared with another Penstock of the same user too, and nobody would notice.
    alone = _bound(config, config.port, listening=True, shared=False)
    port: int = alone[0].getsockname()[1]
    for bound in alone:
        bound.close()
    return _bound(config, port, listening=False, shared=True)


def _bound(config: Server, port: int, listening: bool, shared: bool) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        try:
            infos = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError):
            raise DoorsError(f"server.host {config.host} is no address of this machine") from None
        sockets = []
        for family, kind, protocol, _, address in infos:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                bound.bind((address[0], port, *address[2:]))
                if listening:
                    bound.listen(BACKLOG)
            except OSError as error:
                raise DoorsError(_sentence(config.host, port, error)) from None
            port = bound.getsockname()[1]  # the one that was free serves the host's other addresses too
            sockets.append(bound)
        stack.pop_all()
        return sockets


def url_of(config: Server, bound: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{bound.getsockname()[1]}"


def _sentence(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is taken by another program; choose one with --port (0: any free one)"
        case errno.EACCES:
            return f"port {port} of {host} is not open to this user; choose one with --port"
        case errno.EADDRNOTAVAIL:
            return f"server.host {host} is no address of this machine"
        case _:
            return f"port {port} of {host} cannot be listened on: {error.strerror}"
