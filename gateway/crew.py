"""The workers of a house with several gateways: one process starts, replaces and ends them, and all the gateways use
them. Which models are in memory is decided here, by what the gateways ask for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Literal

from gateway.clock import Clock
from gateway.launcher import Launcher
from gateway.leases import Change, Changed, Lease, Return, Standing, ToGateway, ToOwner
from gateway.memory import Need
from gateway.residence import Residence
from gateway.resident import InUse, NotOurs
from gateway.workers import LEAVE_S, Worker, child_of, socket_directory
from policies import settings, wire


class Lessee:
    """A gateway, how it is told, and what it has been told."""

    def __init__(self, send: Callable[[ToGateway], None]) -> None:
        self.send = send
        self.standings: dict[str, Standing] = {}


class Berth:
    """A model: its workers, of whom it hears as their ``Host`` and asks for nothing, and the gateways that use them."""

    def __init__(self, here: Sequence[str], elsewhere: Sequence[str], changed: Callable[[], None]) -> None:
        """Addresses: of workers that are started here, and of those that run elsewhere. ``changed`` is called when one
        joins or is given up."""
        self.here = here
        self.elsewhere = tuple(elsewhere)
        self.workers: dict[Worker, str] = {}
        """Those started here, each with its address."""
        self.places = self.elsewhere
        """Where gateways may connect to."""
        self.leases: dict[Lessee, int] = {}
        """Each with its number."""
        self._changed = changed

    @property
    def seats(self) -> Collection[object]:
        return [*self.workers, *self.elsewhere]

    @property
    def num_flights(self) -> int:
        return len(self.leases)

    def ready(self) -> wire.Ready | None:
        return next((worker.facts for worker in self.workers if worker.facts is not None), None)

    def joined(self, worker: Worker) -> None:
        address = self.workers[worker]
        if address not in self.places:
            self.places += (address,)
        self._changed()

    def left(self, worker: Worker) -> None:
        """The gateways hear it themselves."""

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
        del self.workers[worker]
        self._changed()


class Crew:
    """All of them."""

    def __init__(
        self,
        config: settings.Settings,
        clock: Clock,
        give_up: Callable[[], None],
        launcher: Launcher | None = None,
    ) -> None:
        """``give_up`` is called when nobody is left that could compute anything; each has said why on standard error.
        ``launcher`` starts workers."""
        self._config = config
        self._clock = clock
        self._give_up = give_up
        self._launcher = launcher or Launcher()
        self._directory = socket_directory()
        numbers = itertools.count()
        self._berths: dict[str, Berth] = {}
        for name, model in config.models.items():
            here = [f"unix:{self._directory.name}/{next(numbers)}" for _ in range(model.replicas)]
            self._berths[name] = Berth(here, model.addresses, self._look_around)
        self._lessees: set[Lessee] = set()
        self.residence = Residence(config, clock, self._berths, self._seat, self._unseat, self._look_around)

    @property
    def models(self) -> Collection[str]:
        return self._berths.keys()

    async def start(self, needs: Mapping[str, Callable[[], Need]]) -> None:
        """Starts the workers that are needed from the beginning; what they compute is loaded meanwhile. ``needs`` says
        what each model takes."""
        for name, measure in needs.items():
            self.residence.add(name, await asyncio.to_thread(measure), measure)

    async def close(self, drain_s: float) -> None:
        """Ends them all, letting them finish what they still hold for ``drain_s``."""
        await self.residence.close()
        workers = [worker for berth in self._berths.values() for worker in berth.workers]
        await asyncio.gather(*(worker.close(drain_s) for worker in workers))
        self._directory.cleanup()

    def admit(self, send: Callable[[ToGateway], None]) -> Lessee:
        """A gateway has begun, and is told how all models stand by ``send``."""
        lessee = Lessee(send)
        self._lessees.add(lessee)
        self._tell()
        return lessee

    def leave(self, lessee: Lessee) -> None:
        """It has ended, and with it whatever it asked for."""
        self._lessees.remove(lessee)
        for name, berth in self._berths.items():
            if berth.leases.pop(lessee, None):
                self.residence.returned(name)
        self._tell()

    def heard(self, lessee: Lessee, message: ToOwner) -> None:
        """From this gateway."""
        match message:
            case Lease(model, number):
                self._berths[model].leases[lessee] = number
                self.residence.leased(model)
                self._tell()
            case Return(model):
                del self._berths[model].leases[lessee]
                self.residence.returned(model)
                self._tell()
            case Change(number):
                fault = self._fault_of(message)
                self._tell()
                lessee.send(Changed(number, fault))

    def _fault_of(self, change: Change) -> Literal["", "not_ours", "in_use"]:
        """That keeps it from being done; empty: it is done."""
        try:
            self.residence.do(change.model, change.verb)
        except NotOurs:
            return "not_ours"
        except InUse:
            return "in_use"
        return ""

    def _tell(self) -> None:
        """To each gateway what is news to it."""
        for lessee in self._lessees:
            for name, berth in self._berths.items():
                standing = self.residence.standing(name, berth.leases.get(lessee, 0), berth.places)
                if lessee.standings.get(name) != standing:
                    lessee.standings[name] = standing
                    lessee.send(standing)

    def _look_around(self) -> None:
        self.residence.look_around()
        self._tell()
        if not self._config.upstreams and all(map(self.residence.is_hopeless, self._berths)):
            self._give_up()

    def _seat(self, name: str, max_kv_bytes: int) -> None:
        config, berth = self._config, self._berths[name]
        for index, address in enumerate(berth.here):
            child = child_of(name, config, index, address, max_kv_bytes)
            worker = Worker(child.name, address, berth, config.workers, self._clock, child, self._launcher, asks=False)
            berth.workers[worker] = address
            worker.start()
        self._tell()

    def _unseat(self, name: str) -> Coroutine[Any, Any, None]:
        berth = self._berths[name]
        berth.places = berth.elsewhere
        self._tell()
        return self._end(berth)

    async def _end(self, berth: Berth) -> None:
        await asyncio.gather(*(worker.close(LEAVE_S) for worker in berth.workers))
        berth.workers.clear()
