"""Responses in the background: written to their end whether or not anybody reads along, and stored while they are.

What one says is in this gateway's memory, and twice a second in the store, from which other gateways tell it. There is
room for so many as the settings say, of one tenant and of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import errors, failures
from gateway.clock import Clock
from gateway.head import Head
from gateway.places import Places
from gateway.responses.events import Events, split
from gateway.responses.outlets import Log
from gateway.responses.shapes import OPEN, ResponseBody
from gateway.responses.shelf import Shelf
from gateway.shelving import ShelfAway, Step
from gateway.telemetry import about
from policies import settings

log = logging.getLogger(__name__)

FLUSH_S = 0.5
RENEW_S = 3.0
"""After so long the store is told that it is still being written, even if there is nothing to add."""
KEEP_TRYING_S = 60.0
"""How long the end of one waits for a store that is away."""


class EndedElsewhere(Exception):
    """It was cancelled or deleted at another gateway, or given up there."""


class Running:
    """One of them."""

    def __init__(self, tenant_id: str, events: Events, noted: Head) -> None:
        """``noted`` of the request that asked for it."""
        self.tenant_id = tenant_id
        self.events = events
        self.noted = noted
        self.log = Log()
        self.num_stored = 0
        """Events that are in the store."""
        self.is_stored = False
        """To its end."""
        self.place = contextlib.ExitStack()
        self.is_unwanted = False
        """Somebody has cancelled or deleted it."""
        self.storing = asyncio.Lock()
        """Held while some of it is being stored."""
        self.work: asyncio.Future[object] | None = None
        """Until all is said."""
        self.task: asyncio.Task[None] | None = None
        """Until all is stored."""
        self._is_broken_off = False

    @property
    def id(self) -> str:
        return self.events.body.id

    @property
    def about(self) -> dict[str, str | None]:
        """For what the log says of it."""
        return about(self.noted.request_id, self.noted.trace_id)

    def break_off(self) -> None:
        """Its work, once: what that gives back on its way out is not to be broken off as well; nor is an answer that
        is whole, and owed, and about to be kept."""
        assert self.work is not None
        if not (self._is_broken_off or self.events.is_whole):
            self._is_broken_off = True
            self.work.cancel()


class Background:
    """All that this gateway writes."""

    def __init__(
        self,
        config: settings.Responses,
        shelf: Shelf,
        clock: Clock,
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``inside``: what is answered without a client is inside all the same, so that nothing closes around it."""
        self._places = Places(
            config.max_background,
            config.max_background_per_tenant,
            "Too many responses are being written in the background.",
            "This project has {} responses in the background already; wait for one to end.",
            retry_after_s=5.0,
        )
        self._shelf = shelf
        self._clock = clock
        self._inside = inside
        self._running: dict[str, Running] = {}
        self._is_closing = False

    @contextlib.contextmanager
    def room(self, tenant_id: str) -> Iterator[contextlib.ExitStack]:
        """A place for one more, which goes to ``start`` or is free again when this is left. Raises as ``Places.one``
        does."""
        with contextlib.ExitStack() as place:
            place.enter_context(self._places.one(tenant_id))
            yield place

    def start(
        self, running: Running, place: contextlib.ExitStack, work: Callable[[Log], Coroutine[Any, Any, object]]
    ) -> None:
        """It is stored by now, and its ``place`` is free again when it has ended. ``work`` writes it to the log, or
        raises what it fails with."""
        running.place = place
        self._running[running.id] = running
        running.work = asyncio.create_task(work(running.log))
        running.task = asyncio.create_task(self._run(running, running.work))
        running.task.add_done_callback(_tell)

    def find(self, tenant_id: str, response_id: str) -> Running | None:
        """One that is being written here."""
        running = self._running.get(response_id)
        return None if running is None or running.tenant_id != tenant_id else running

    def writes(self, response_id: str) -> bool:
        """It has begun, and not ended."""
        return response_id in self._running

    async def cancel(self, running: Running) -> ResponseBody:
        """It is over when this returns, and stored as it is then; unless it had ended before."""
        running.is_unwanted = True
        assert running.task is not None
        running.break_off()
        await asyncio.wait([running.task])
        return running.events.body

    async def end_with(self, running: Running, last: bytes, keep: Callable[[Step], Coroutine[Any, Any, None]]) -> None:
        """Stores the end of one, whose ``last`` events these are, in the transaction in which ``keep`` keeps something
        else: a gateway that dies leaves both or neither. Raises EndedElsewhere, and what ``keep`` raises."""
        async with running.storing:
            said = running.log.said[running.num_stored :] + split(last)

            async def end(connection: AsyncConnection) -> None:
                if not await self._shelf.move(connection, running.events.body, running.num_stored, said):
                    raise EndedElsewhere

            await keep(end)
            running.is_stored = True

    async def close(self) -> None:
        """Breaks off what is still being written; it is said to have failed."""
        self._is_closing = True
        tasks = []
        for running in self._running.values():
            assert running.work is not None
            assert running.task is not None
            running.work.cancel()
            tasks.append(running.task)
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, running: Running, work: asyncio.Future[object]) -> None:
        with self._inside():
            flushing = asyncio.create_task(self._flush_on(running))
            await asyncio.wait([work])
            events = running.events
            if work.cancelled():
                closing = errors.Draining("This server is shutting down.")
                await running.log.end(events.cancelled() if running.is_unwanted else events.failed(closing))
            elif (error := work.exception()) is not None:
                failure = failures.described(error, running.noted.request_id, running.noted.trace_if_it_fails)
                await running.log.end(events.failed(failure))
            async with running.storing:
                flushing.cancel()
            await self._finish(running)

    async def _flush_on(self, running: Running) -> None:
        """What is said is stored, until this is cancelled."""
        renewed_at = self._clock.now()
        while True:
            await self._clock.sleep(FLUSH_S)
            said = running.log.said[running.num_stored :]
            if not said and self._clock.now() < renewed_at + RENEW_S:
                continue
            async with running.storing:
                if running.is_stored or running.events.body.status not in OPEN:
                    return  # what has ended is stored with its last events alone, by whoever has them
                try:
                    is_wanted = await self._shelf.advance(running.events.body, running.num_stored, said)
                except ShelfAway:
                    continue
                except Exception:
                    log.exception("response %s cannot be stored", running.id, extra=running.about)
                    continue
                running.num_stored += len(said)
            renewed_at = self._clock.now()
            if not is_wanted:
                running.is_unwanted = True
                running.break_off()

    async def _finish(self, running: Running) -> None:
        """Stores the end, and then tells it; first, if the store is away, and goes on trying."""
        said = running.log.said[running.num_stored :] + running.log.take_last()
        give_up_at = self._clock.now() + KEEP_TRYING_S
        try:
            while not running.is_stored:
                try:
                    await self._shelf.advance(running.events.body, running.num_stored, said)
                    return
                except ShelfAway:
                    running.log.close()
                    if self._is_closing or self._clock.now() >= give_up_at:
                        log.error("the end of response %s is not stored", running.id, extra=running.about)
                        return
                    await self._clock.sleep(1.0)
        except Exception:
            log.exception("the end of response %s is not stored", running.id, extra=running.about)
        finally:
            if not running.log.is_over:
                running.log.close()
            del self._running[running.id]
            running.place.close()


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a response in the background was left as it is", exc_info=error)
