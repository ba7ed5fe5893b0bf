"""An answer on its way to its reader, as the reader sees it; and the flights of one request, read as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gateway.errors import GatewayError
from gateway.flight import Flight
from gateway.spent import Spent
from policies import wire
from policies.answers import Outcome


class Source(Protocol):
    """An answer on its way to one reader, wherever it comes from."""

    async def deltas(self) -> list[wire.Delta]:
        """As ``Flight.deltas``."""

    def cancel(self, request_id: str, index: int) -> None:
        """The sequence's stop string was found, so the rest of it is needed by nobody who asked for the same. Whoever
        wants less than was asked for, closes."""

    def close(self) -> None:
        """This reader leaves; a second time does nothing."""

    @property
    def outcome(self) -> Outcome:
        """What the cache did for this reader. It may change until the end: when the one who pays for a computation
        leaves, the next reader does ("miss")."""

    @property
    def were_sent(self) -> bool:
        """A worker has begun, or none is needed."""

    @property
    def queue_s(self) -> float:
        """How long this request waited for a worker with room."""

    @property
    def first_token_at(self) -> float | None:
        """In monotonic seconds."""

    @property
    def spent(self) -> Spent:
        """What this reader's answer took of the engine. What several read is the account of the one who pays."""

    @property
    def is_over(self) -> bool:
        """``spent`` is all of it."""

    async def over(self) -> None:
        """Until it ``is_over``; for a reader who has closed, or has read to the end."""


class Send(Protocol):
    """Sends one prompt of a request on its way."""

    def __call__(self, submit: wire.Submit, after: Flight | None) -> Flight:
        """``after``: another one of the request, which was let in: so is this one."""


def launched(send: Send, submits: Sequence[wire.Submit]) -> Source:
    """A source that computes: one flight for each prompt. Raises what ``send`` raises; nothing is left behind then."""
    return send(submits[0], None) if len(submits) == 1 else Flights(send, submits)


MAX_AT_ONCE = 128
"""Prompts of one request that wait or are computed at a time; the others follow as these end."""


class Flights:
    """The flights of several prompts, as one ``Source``. Closing cancels every sequence that has not finished."""

    outcome: Outcome = "bypass"

    def __init__(self, send: Send, submits: Sequence[wire.Submit]) -> None:
        """Raises what ``send`` raises; nothing is left behind then."""
        self._readers: list[asyncio.Task[None]] = []
        self._flights: dict[str, Flight] = {}
        self._arrived: list[wire.Delta] = []
        self._error: GatewayError | None = None
        self._moved = asyncio.Event()
        self._send = send
        self._later = deque(submits[MAX_AT_ONCE:])
        try:
            for each in submits[:MAX_AT_ONCE]:
                self._flights[each.request_id] = send(each, None)
            for flight in self._flights.values():
                flight.is_let_in = True
        except BaseException:
            self.close()
            raise
        self._readers = [asyncio.create_task(self._read(flight)) for flight in self._flights.values()]

    def close(self) -> None:
        """Cancels what has not finished; a second time does nothing."""
        self._later.clear()
        for reader in self._readers:
            reader.cancel()
        for flight in self._flights.values():
            flight.close()

    async def deltas(self) -> list[wire.Delta]:
        """As ``Flight.deltas``."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._moved.clear()
            await self._moved.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, request_id: str, index: int) -> None:
        """Nobody needs the rest of this sequence."""
        self._flights[request_id].cancel(request_id, index)

    @property
    def first(self) -> Flight:
        """Of the first prompt."""
        return next(iter(self._flights.values()))

    @property
    def were_sent(self) -> bool:
        """A worker has begun with one of them."""
        return any(flight.were_sent for flight in self._flights.values())

    @property
    def queue_s(self) -> float:
        """How long the request waited for a worker with room; of several flights the longest wait."""
        return max(flight.queue_s for flight in self._flights.values())

    @property
    def first_token_at(self) -> float | None:
        """When the first token arrived, in monotonic seconds."""
        return min((at for flight in self._flights.values() if (at := flight.first_token_at) is not None), default=None)

    @property
    def spent(self) -> Spent:
        return Spent.of(flight.spent for flight in self._flights.values())

    @property
    def is_over(self) -> bool:
        return all(flight.is_over for flight in self._flights.values())

    async def over(self) -> None:
        for flight in self._flights.values():
            await flight.over()

    async def _read(self, flight: Flight) -> None:
        """To its end, and then the next of those that have not begun."""
        try:
            while True:
                num_open = flight.num_sequences
                while num_open:
                    deltas = await flight.deltas()
                    num_open -= sum(delta.finish is not None for delta in deltas)
                    self._arrived += deltas
                    self._moved.set()
                if not self._later:
                    return
                submit = self._later.popleft()
                flight = self._flights[submit.request_id] = self._send(submit, flight)
        except GatewayError as error:
            self._error = error
            self._moved.set()
