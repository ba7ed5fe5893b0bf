"""One call answered by an upstream, or by one after another.

A request that got no answer at all is sent again, after a pause and within a budget; once its first word is out it ends
where its upstream does. Where an upstream is slow to begin, another one may be asked as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from gateway import telemetry
from gateway.clock import Clock
from gateway.pieces import Counted, Piece
from gateway.upstreams import failures
from gateway.upstreams.billing import counted_of
from gateway.upstreams.call import Asking, Call
from gateway.upstreams.client import Client
from gateway.upstreams.failures import Trouble
from gateway.upstreams.reading import Reader, vectors_of
from gateway.upstreams.server import LOOK_S, Server
from gateway.upstreams.servers import Servers
from policies import wire
from policies.answers import Word
from policies.terms import FinishReason
from policies.upstreams.retries import pause_s

if TYPE_CHECKING:
    from gateway.text import Text

log = logging.getLogger(__name__)

LONG_BYTES = 64 << 10
"""Of vectors as JSON, which are read beside the event loop."""


class Answering:
    """The first upstream is asked as soon as this exists."""

    def __init__(
        self, call: Call, server: Server, servers: Servers, client: Client, clock: Clock, text: Text | None
    ) -> None:
        """``servers``: those that may be asked after ``server``. ``text``: the model's tokenizer, where it is known."""
        self._call = call
        self._servers = servers
        self._client = client
        self._clock = clock
        self._text = text
        self._tried = [server]
        call.asking = self._ask(server, is_first=True)

    async def trouble(self) -> Trouble | None:
        """Sees it through. None: the call is answered, or will be by nobody else; else what the last upstream that was
        asked had."""
        call = self._call
        while True:
            assert call.asking is not None
            try:
                await self._hear(call.asking)
            except Trouble as trouble:
                server = call.asking.server
                following = await self._following(server, trouble)
                if following is None:
                    log.info("upstream %s: %s", server.name, trouble, extra=telemetry.about_sent(call.request))
                    return trouble
                self._tried.append(following)
                call.asking = self._ask(following, is_first=False)
            else:
                return None

    def _ask(self, server: Server, is_first: bool) -> Asking:
        return Asking(self._client, server, self._call, self._clock, is_first)

    async def _following(self, server: Server, trouble: Trouble) -> Server | None:
        """Who is asked next; None: nobody."""
        call, num_retries = self._call, len(self._tried) - 1
        terms = server.known.terms
        if call.first_token_at is not None or not trouble.elsewhere or num_retries >= terms.max_retries:
            return None
        is_other = self._servers.pick(call.asked, self._tried) is not None
        if not is_other and not trouble.again:
            return None
        pause = pause_s(num_retries, random.random(), None if is_other else trouble.retry_after_s)
        if pause is None or not server.may_send_again():
            return None
        server.num_retries += 1
        with server.kept():  # it has had its turn in the line
            await self._clock.sleep(pause)
            while True:
                following = self._servers.pick(call.asked, self._tried)
                if following is not None or not trouble.again or not server.admits:
                    return following
                if server.has_place:
                    return server
                await self._clock.sleep(LOOK_S)

    async def _hear(self, asking: Asking) -> None:
        """Raises Trouble."""
        both = [asking]
        try:
            hedge_s = asking.server.hedge_s(self._call.asked.streams)
            if hedge_s is not None:
                asking = self._call.asking = await self._sooner(asking, hedge_s, both)
            await self._read(asking)
        finally:
            for each in both:  # before any is waited for, since that may be broken off
                each.drop()
            for each in both:
                await each.close()

    async def _sooner(self, asking: Asking, hedge_s: float, both: list[Asking]) -> Asking:
        """After so long without a word another one is asked as well; who begins to answer first. The other one is hung
        up on."""
        timer = asyncio.create_task(self._clock.sleep(hedge_s))
        try:
            await asyncio.wait([asking.first, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        server = asking.server
        rival_at = None if asking.first.done() else self._servers.pick(self._call.asked, self._tried)
        if rival_at is None or not server.may_send_again():
            return asking
        server.num_hedges += 1
        self._tried.append(rival_at)
        rival = self._ask(rival_at, is_first=False)
        both.append(rival)
        await asyncio.wait([asking.first, rival.first], return_when=asyncio.FIRST_COMPLETED)
        for one, other in ((asking, rival), (rival, asking)):
            if one.first.done():
                winner = one if one.first.exception() is None else other
                break
        # Also one that has begun, or failed, by now: else it would keep its place for as long as the answer takes.
        await (rival if winner is asking else asking).close()
        return winner

    async def _read(self, asking: Asking) -> None:
        """Raises Trouble."""
        try:
            if self._call.asked.num_vectors:
                await self._read_vectors(asking)
            else:
                await self._read_words(asking)
            asking.succeeded()
        except Trouble as trouble:
            asking.failed(trouble)
            raise

    async def _read_vectors(self, asking: Asking) -> None:
        call = self._call
        async for text in asking.texts():
            if len(text) > LONG_BYTES:
                vectors, usage = await asyncio.to_thread(vectors_of, call.asked, text)
            else:
                vectors, usage = vectors_of(call.asked, text)
            counted = await counted_of(call, asking.server, self._text, usage, [])
            for index, vector in enumerate(vectors):
                end(call, index, "stop", self._clock.now(), asking, counted, vector)
            return
        raise failures.garbage("nothing")

    async def _read_words(self, asking: Asking) -> None:
        call = self._call
        reader = Reader(call.asked)
        try:
            async for text in asking.texts():
                for index, words in reader.read(text):
                    self._bring(index, words, asking.server.name)
        except Trouble:  # behind its last word it is the upstream's alone
            if not reader.is_whole:
                raise
        if not reader.is_whole:
            raise (failures.cut("the answer ended in the middle") if any(reader.said) else failures.garbage("nothing"))
        counted = await counted_of(call, asking.server, self._text, reader.usage, reader.said)
        for index in call.open_indices:
            end(call, index, reader.end_of(index), self._clock.now(), asking, counted)

    def _bring(self, index: int, words: list[Word], upstream: str) -> None:
        call = self._call
        if call.is_open(index):
            piece = Piece(call.request.request_id, index, [0] * len(words), words=words, upstream=upstream)
            call.arrive(piece, self._clock.now())


def end(
    call: Call,
    index: int,
    reason: FinishReason,
    now: float,
    asking: Asking | None = None,
    counted: Counted | None = None,
    vector: bytes = b"",
) -> None:
    """One sequence's."""
    usage = None if counted is None else counted.usage
    began_at = now if asking is None else asking.began_at
    first_at = call.first_token_at or now
    prefill_s, decode_s = max(0.0, first_at - began_at), max(0.0, now - max(first_at, began_at))
    finish = wire.Finish(reason, 0 if usage is None else usage.num_cached_tokens, 0, 0.0, prefill_s, decode_s)
    upstream = "" if asking is None else asking.server.name
    is_last = call.num_open == 1
    piece = Piece(
        call.request.request_id,
        index,
        [],
        finish=finish,
        vector=vector,
        upstream=upstream,
        counted=counted if is_last else None,
    )
    call.arrive(piece, now)
