"""One turn of a conversation in items: what is asked of a model, and what is kept of it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from gateway import errors, openai, reply
from gateway.api.chat import prepared
from gateway.auth import Caller
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.responses import requests
from gateway.responses.conversation import Message, turns, without_oldest
from gateway.responses.events import Events
from gateway.responses.items import AnyItem
from gateway.responses.nearby import Context, Near
from gateway.responses.requests import ResponseRequest
from gateway.responses.running import EndedElsewhere
from gateway.responses.shelf import Kept
from gateway.shelving import ShelfAway
from gateway.telemetry import about
from policies.priority import Order

log = logging.getLogger(__name__)

A = TypeVar("A", bound=reply.Answer)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    gw: Gateway
    request: web.Request
    caller: Caller
    call: ResponseRequest
    chat: openai.ChatRequest
    messages: list[Message]

    async def prepared(self, shaped: Callable[..., A]) -> tuple[A, Order]:
        """As for a chat. With ``truncation`` the fewest of the oldest turns are left out with which it fits."""
        try:
            return await self._without(0, shaped)
        except errors.ContextLengthExceeded:
            least, most = 1, len(turns(self.messages)) - 1
            if self.call.truncation != "auto" or most < least:
                raise
        found = await self._without(most, shaped)
        while least < most:
            middle = (least + most) // 2
            try:
                found = await self._without(middle, shaped)
            except errors.ContextLengthExceeded:
                least = middle + 1
            else:
                most = middle
        return found

    async def _without(self, num_turns: int, shaped: Callable[..., A]) -> tuple[A, Order]:
        chat = self.chat
        if num_turns:
            shorter = requests.chat_of(self.call, without_oldest(self.messages, num_turns))
            chat = msgspec.structs.replace(shorter, stream=chat.stream)
        try:
            return await prepared(self.gw, self.request, self.caller, chat, shaped)
        except openai.Malformed as error:
            raise requests.said_of_a_chat(self.call, error) from None
        except errors.GatewayError as error:
            if error.param == "messages":
                error.param = "input"
            raise


@dataclass(frozen=True, slots=True)
class Turn:
    """A response: what is asked, in which items, and what comes of it."""

    asked: Question
    given: list[AnyItem]
    events: Events
    near: Near | None = None
    """Of one that is asked for over a WebSocket."""
    remembered: Context | None = None
    """What it goes on from, where that is remembered."""

    def kept(self) -> Kept:
        """It, as it is now."""
        return Kept.of(self.asked.caller.tenant_id, self.events.body, self.given)

    async def end(self, last: bytes) -> bytes:
        """Keeps what has ended, before its client hears of it, and gives its ``last`` events as they are then. What
        cannot be kept is given all the same, as it is paid for; and says so."""
        events, gw = self.events, self.asked.gw
        body = events.body
        stores = body.store and not body.background
        try:
            if body.conversation is not None and body.status not in ("completed", "incomplete"):
                await gw.conversations.release(body.id)
            elif body.conversation is not None and await self._is_added(body.conversation.id, stores, last):
                stores = False  # it is by now
            elif body.conversation is not None:
                last = events.amended(last, conversation=None)
            if stores:
                await gw.responses.shelf.put(self.kept())
        except ShelfAway:
            self._warn("response %s is not stored")
            last = events.amended(last, conversation=None, **({"store": False} if stores else {}))
        self._remember()
        return last

    def _remember(self) -> None:
        """What the store cannot give to whoever goes on from it."""
        body, near = self.events.body, self.near
        if near is None or body.conversation is not None or body.status not in ("completed", "incomplete"):
            return
        if self.remembered is not None or not body.store:
            near.put(body.id, self.remembered, [*self.given, *body.output])

    async def _is_added(self, conversation_id: str, stores: bool, last: bytes) -> bool:
        """It is a turn of its conversation, and in the same transaction stored, if it is to be, or ended, if it was
        before; False: there is no such conversation any more, or it had ended otherwise, and nothing is done. Raises
        ShelfAway."""
        gw, body, tenant_id = self.asked.gw, self.events.body, self.asked.caller.tenant_id
        add = partial(gw.conversations.add, tenant_id, conversation_id, [*self.given, *body.output], body.id)
        background = gw.responses.background
        running = background.find(tenant_id, body.id) if body.background else None
        try:
            if running is not None:
                await background.end_with(running, last, add)
            else:
                await add(partial(gw.responses.shelf.insert, self.kept()) if stores else None)
        except (errors.NotFound, EndedElsewhere):
            self._warn("response %s is not added to its conversation")
            return False
        return True

    def _warn(self, what: str) -> None:
        noted = self.asked.request[HEAD]
        log.warning(what, self.events.body.id, extra=about(noted.request_id, noted.trace_id))
