"""The flights of one request, read as one: a request with several prompts has one flight for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.dispatch import Dispatch
from gateway.errors import GatewayError
from gateway.flight import Flight
from policies import wire


class Flights:
    """An async context manager: entering submits, leaving cancels every sequence that has not finished."""

    def __init__(self, dispatch: Dispatch, model: str, submits: Sequence[wire.Submit]) -> None:
        self._dispatch = dispatch
        self._model = model
        self._submits = submits
        self._readers: list[asyncio.Task[None]] = []
        self._flights: dict[str, Flight] = {}
        self._only: Flight | None = None
        self._arrived: list[wire.Delta] = []
        self._error: GatewayError | None = None
        self._moved = asyncio.Event()

    async def __aenter__(self) -> Flights:
        """Raises what ``Dispatch.submit`` raises; nothing is left behind then."""
        try:
            for submit in self._submits:
                self._flights[submit.request_id] = self._dispatch.submit(self._model, submit)
        except BaseException:
            await self.close()
            raise
        if len(self._flights) == 1:
            (self._only,) = self._flights.values()
        else:
            self._readers = [asyncio.create_task(self._read(flight)) for flight in self._flights.values()]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what has not finished; a second time does nothing."""
        for reader in self._readers:
            reader.cancel()
        for flight in self._flights.values():
            await flight.__aexit__(None, None, None)

    async def deltas(self) -> list[wire.Delta]:
        """As ``Flight.deltas``."""
        if self._only is not None:
            return await self._only.deltas()
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._moved.clear()
            await self._moved.wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, delta: wire.Delta) -> None:
        """Nobody needs the rest of the sequence that this delta belongs to."""
        self._flights[delta.request_id].cancel(delta.index)

    @property
    def were_sent(self) -> bool:
        """A worker has begun with one of them."""
        return any(flight.sent_at is not None for flight in self._flights.values())

    @property
    def queue_s(self) -> float:
        """How long the request waited for a worker with room; of several flights the longest wait."""
        longest_s = 0.0
        for flight in self._flights.values():
            if flight.sent_at is not None:
                longest_s = max(longest_s, flight.sent_at - flight.submitted_at)
        return longest_s

    @property
    def first_token_at(self) -> float | None:
        """When the first token arrived, in monotonic seconds."""
        first: float | None = None
        for flight in self._flights.values():
            at = flight.first_token_at
            if at is not None and (first is None or at < first):
                first = at
        return first

    async def _read(self, flight: Flight) -> None:
        num_open = flight.num_sequences
        try:
            while num_open:
                deltas = await flight.deltas()
                num_open -= sum(delta.finish is not None for delta in deltas)
                self._arrived += deltas
                self._moved.set()
        except GatewayError as error:
            self._error = error
            self._moved.set()
