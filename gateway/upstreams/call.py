"""One request on its way to an upstream and back: the flight of it, and each time that it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, cast

from gateway.clock import Clock, Timer
from gateway.flight import Flight, Keeper
from gateway.flights import Source
from gateway.spent import Spent
from gateway.stays import Stay
from gateway.traceparent import below
from gateway.upstreams.asking import PATHS, Asked
from gateway.upstreams.client import Client
from gateway.upstreams.failures import Trouble
from gateway.upstreams.server import Server
from policies import wire
from policies.priority import Order

if TYPE_CHECKING:
    from gateway.upstreams.here import Here


class CallKeeper(Keeper, Protocol):
    """Whoever launched a call."""

    def stopped(self, call: Call, index: int) -> None:
        """Nobody needs the rest of this sequence."""


class Call(Flight):
    """A flight whose answer comes from an upstream."""

    __slots__ = ("asked", "asking", "here", "is_leaving", "source", "task", "timer")

    def __init__(
        self,
        keeper: CallKeeper,
        request: wire.Submit,
        order: Order,
        now: float,
        asked: Asked,
        here: Here | None = None,
    ) -> None:
        super().__init__(keeper, request, order, now)
        self.asked = asked
        self.task: asyncio.Task[None] | None = None
        """While an upstream is asked, or workers here are."""
        self.asking: Asking | None = None
        """The one time that counts, or the last one of several."""

        self.here = here
        """How workers of this gateway would answer it, if they may."""
        self.source: Source | None = None
        """While they do."""
        self.is_leaving = False
        """It has waited for them as long as it could, and goes to an upstream."""
        self.timer: Timer | None = None
        """At whose end it leaves."""

    @property
    def were_sent(self) -> bool:
        return super().were_sent or (self.source is not None and self.source.were_sent)

    @property
    def queue_s(self) -> float:
        return super().queue_s + (0.0 if self.source is None else self.source.queue_s)

    @property
    def spent(self) -> Spent:
        return super().spent if self.source is None else self.source.spent

    @property
    def upstream(self) -> str | None:
        """The one that is asked, where one is."""
        return None if self.asking is None or self.source is not None else self.asking.server.name

    def cancel(self, request_id: str, index: int) -> None:
        if index in self._open:
            cast(CallKeeper, self.keeper).stopped(self, index)

    def stay(self, upstream: str, now: float) -> Stay:
        """For its trace: this one is asked."""
        stays = self.stays = self.stays or []
        if stays and not stays[-1].left_at:
            stays[-1].left_at, stays[-1].left = now, "moved"
        stay = Stay(upstream, now, now, self.num_tokens, span_id=f"{random.getrandbits(64) or 1:016x}")
        stays.append(stay)
        return stay

    def is_open(self, index: int) -> bool:
        """The sequence has not ended."""
        return index in self._open

    @property
    def open_indices(self) -> list[int]:
        return list(self._open)


class Asking:
    """One request to one upstream, from now on. ``close`` it."""

    def __init__(self, client: Client, server: Server, call: Call, clock: Clock, is_first: bool) -> None:
        """``is_first``: the call is not asked for a second time."""
        asked = call.asked
        self.server = server
        self.is_closed = False
        self.first_at: float | None = None
        """When it began to answer."""
        self.began_at = clock.now()
        self._clock = clock
        self._streams = asked.streams
        self._is_judged = False
        """It was said of the server whether it succeeds."""
        server.asked(is_first)
        terms = server.known.terms
        body = asked.body(terms.upstream_model or terms.model, terms.cache_salt)
        context, self._stay = asked.context, None
        if context:
            self._stay = call.stay(server.name, self.began_at)
            context = {**context, "traceparent": below(context["traceparent"], self._stay.span_id)}
        self._texts = client.ask(server.known, PATHS[asked.kind], body, asked.streams, context, asked.num_vectors)
        self.first: asyncio.Task[bytes | None] = asyncio.create_task(self._first())

    async def texts(self) -> AsyncIterator[bytes]:
        """All that it says. Raises Trouble."""
        first = await self.first
        if first is None:
            return
        yield first
        try:
            async for text in self._texts:
                yield text
        except Trouble as trouble:
            self.failed(trouble)
            raise

    def failed(self, trouble: Trouble) -> None:
        """It is of no use, by what it says or does not say."""
        if not self._is_judged:
            self._is_judged = True
            self.server.failed(trouble)
            stay = self._stay
            if stay is not None:
                stay.failure = trouble.error.code or trouble.error.type
                if not stay.left_at:  # else another one is asked already
                    stay.left_at, stay.left = self._clock.now(), "failed"

    def succeeded(self) -> None:
        """All of the answer is there."""
        self._is_judged = True
        self.server.succeeded()

    async def close(self) -> None:
        """Hangs up, if it is not over, and waits until that is done."""
        self.drop()
        await asyncio.wait([self.first])
        with contextlib.suppress(Trouble, RuntimeError):
            await self._texts.aclose()  # type: ignore[attr-defined]

    def drop(self) -> None:
        """The same, where nothing can wait for it."""
        if self.is_closed:
            return
        self.is_closed = True
        self.first.cancel()
        self.first.add_done_callback(_ignore)
        self.server.left()
        if not self._is_judged:
            self.server.given_up()

    async def _first(self) -> bytes | None:
        """None: there is nothing at all."""
        try:
            async for text in self._texts:
                self.first_at = self._clock.now()
                self.server.began(self.first_at - self.began_at, self._streams)
                return text
        except Trouble as trouble:
            self.failed(trouble)
            raise
        return None


def _ignore(task: asyncio.Task[bytes | None]) -> None:
    """It has been told to whoever it concerns."""
    if not task.cancelled():
        task.exception()
