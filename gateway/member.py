"""One of several gateways on one port: ``python -m gateway.member``, which ``processes`` starts and instructs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection

import click
import msgspec

from gateway.importing import importing
from gateway.leases import ToGateway, ToOwner
from gateway.settings_file import BAD_START
from policies import settings


class Parent(asyncio.Protocol):
    """The process that started us, by standard input, once the settings are read, and output: the models' ``Owner``."""

    def __init__(self, given_up: Collection[str]) -> None:
        self.given_up = given_up
        self._unread = b""
        self._heard: Callable[[ToGateway], None] | None = None

    def send(self, message: ToOwner) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and so are we in a moment
            click.echo(msgspec.json.encode(message))

    def follow(self, heard: Callable[[ToGateway], None]) -> None:
        self._heard = heard
        self._read()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._read()

    def _read(self) -> None:
        if self._heard is not None:
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                self._heard(msgspec.json.decode(line, type=ToGateway))

    def connection_lost(self, error: Exception | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # running answers may finish


async def _serve(config: settings.Settings, given_up: Collection[str]) -> None:
    from gateway import app, ending, telemetry
    from gateway.dispatch import NothingToServe

    parent = Parent(given_up)
    await asyncio.get_running_loop().connect_read_pipe(lambda: parent, sys.stdin)
    try:
        await app.serve(config, os.environ, click.echo, owner=parent)
    except app.BAD_STARTS as error:
        telemetry.say(f"penstock: {error}")
        ending.leave(BAD_START)
    except NothingToServe:
        ending.leave(BAD_START)
    ending.leave(0)


def main() -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as unbuffered:  # what follows is not ours to read
        config, given_up = msgspec.json.decode(unbuffered.readline(), type=tuple[settings.Settings, tuple[str, ...]])
    with importing():
        import uvloop

        from gateway import app, telemetry  # noqa: F401 (while no signal ends it)
    telemetry.log_to_stderr(config.log)
    uvloop.run(_serve(config, given_up))


if __name__ == "__main__":
    main()
