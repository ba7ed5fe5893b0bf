"""A dispatch whose workers the test plays itself, and what it holds."""

from __future__ import annotations

import contextlib

from gateway.dispatch import Dispatch
from policies import settings
from tests.builders import dispatching, until
from tests.gateway.peer import Peer

FAST = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02)
SCRIPT = [72, 105, 33, 32]
"""What a scripted worker says, again and again."""


@contextlib.asynccontextmanager
async def peers(tmp_path, num=1, clock=None, workers=FAST, **options):
    """A dispatch, and the workers behind it, played by the test."""
    played = [Peer(**options) for _ in range(num)]
    addresses = [await peer.listen(tmp_path / f"{number}.socket") for number, peer in enumerate(played)]
    try:
        async with dispatching(*addresses, workers=workers, clock=clock) as dispatch:
            yield dispatch, *played
    finally:
        for peer in played:
            await peer.close()


async def lost(dispatch: Dispatch, number: int = 0) -> None:
    """Until the gateway has noticed that a worker is gone."""
    await until(lambda: dispatch.workers()[number].facts is None)


def held(dispatch: Dispatch) -> int:
    """Places that are taken: with the workers, reserved there, or waiting."""
    (line,) = dispatch._lines.values()
    return line.num_waiting + sum(seat._room.num_sequences for seat in line.seats.values() if seat._room is not None)
