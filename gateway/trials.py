"""Trials in a process of their own: they compute for seconds, and the gateway's requests must not feel it.

``python -m gateway.trials`` reads a ``Trial`` as MessagePack from standard input and writes what would have happened,
or why it was not computed. One at a time, at the lowest priority, ended when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from gateway.launcher import environment
from policies import simulation
from policies.simulation import Outcome, Trial

LIMIT_S = 60.0
"""How long one may compute."""
COMMAND = (sys.executable, "-P", "-m", "gateway.trials")


class TooMuch(Exception):
    """It would take too long; the message says what to ask less of."""


class Said(msgspec.Struct):
    """What the process says."""

    outcome: Outcome | None
    too_much: str = ""


class Trials:
    """Of one gateway; whoever comes second waits."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """One is being computed."""
        return self._turn.locked()

    async def run(self, trial: Trial) -> Outcome:
        """What would have happened. ``simulation.check`` must find nothing wrong with the trial. Raises TooMuch."""
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment()
            )
            try:
                async with asyncio.timeout(LIMIT_S):
                    output, _ = await process.communicate(msgspec.msgpack.encode(trial))
            except TimeoutError:
                raise TooMuch(f"More than {LIMIT_S:g} s; ask about fewer or shorter arrivals.") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        assert process.returncode == 0, f"a trial's process exited with {process.returncode}"
        said = msgspec.msgpack.decode(output, type=Said)
        if said.outcome is None:
            raise TooMuch(said.too_much)
        return said.outcome


def main() -> None:
    """The process."""
    os.nice(19)
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Trial)
    try:
        said = Said(simulation.run(trial))
    except simulation.TooMuch as error:
        said = Said(None, str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(said))


if __name__ == "__main__":
    main()
