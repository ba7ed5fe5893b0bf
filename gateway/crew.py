"""The workers of a house with several gateways: one process starts and replaces them, and all the gateways use them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

import msgspec

from gateway.clock import Clock
from gateway.workers import COMMAND, Worker, child_of, claims_of, socket_directory
from policies import settings, wire

LISTEN_S = 10.0
"""How long workers may take to listen before gateways are started that would find nobody there."""
LISTEN_POLL_S = 0.02


class Crew:
    """Hears of the workers as their ``Host``, and asks them for nothing."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        give_up: Callable[[], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """``give_up`` is called when nobody is left that could compute anything; each has said why on standard error.
        ``command`` starts a worker process; its settings follow as JSON."""
        self._models = config.models
        self._directory = socket_directory()
        self._places: dict[str, list[str]] = {name: [] for name in config.models}
        self._workers: list[Worker] = []
        self._give_up = give_up
        claims = claims_of(config.models)
        for name, model in config.models.items():
            for index in range(model.replicas):
                address = f"unix:{self._directory.name}/{len(self._workers)}"
                self._places[name].append(address)
                child = child_of(name, model, index, address, claims)
                self._workers.append(
                    Worker(child.name, address, self, config.workers, clock, child, command, asks=False)
                )

    def models(self) -> dict[str, settings.Model]:
        """As a gateway is told of them that starts no worker itself."""
        return {
            name: msgspec.structs.replace(model, replicas=0, addresses=(*self._places[name], *model.addresses))
            for name, model in self._models.items()
        }

    async def start(self) -> None:
        """Until the workers listen; what they compute is loaded while they do."""
        for worker in self._workers:
            worker.start()
        places = [place.removeprefix("unix:") for addresses in self._places.values() for place in addresses]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S):
                while not all(map(os.path.exists, places)):  # noqa: ASYNC110 (another process makes them)
                    await asyncio.sleep(LISTEN_POLL_S)

    async def close(self, drain_s: float) -> None:
        """Ends them all, letting them finish what they still hold for ``drain_s``."""
        await asyncio.gather(*(worker.close(drain_s) for worker in self._workers))
        self._directory.cleanup()

    # Host of the workers

    def joined(self, worker: Worker) -> None:
        """The gateways hear it themselves."""

    def left(self, worker: Worker) -> None:
        """Likewise."""

    def reported(self, worker: Worker) -> None:
        """Likewise."""

    def kept(self, worker: Worker, events: wire.KvEvents) -> None:
        """Likewise."""

    def moved(self, worker: Worker, deltas: Sequence[wire.Delta]) -> None:
        if deltas:
            raise wire.WireError("a delta of a request that was not made")

    def adapter(self, worker: Worker, message: wire.AdapterLoaded | wire.AdapterRefused) -> None:
        raise wire.WireError("an answer about an adapter that nobody has asked for")

    def refused(self, worker: Worker, failed: wire.Failed) -> None:
        raise wire.WireError("a failure of a request that was not made")

    def gave_up(self, worker: Worker) -> None:
        self._workers.remove(worker)
        if not self._workers and not any(model.addresses for model in self._models.values()):
            self._give_up()
