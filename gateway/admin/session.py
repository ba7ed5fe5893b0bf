"""The console's session: signing in with an admin key makes one, whose cookie is good for all of the administration."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import head
from gateway.admin.change import Change
from gateway.admin.endpoint import Ask, Endpoint, Nothing
from gateway.admin.problems import NotThere
from gateway.auth import AdminCaller, presented
from gateway.console.sessions import Session, names_a_key
from gateway.errors import GatewayError, InvalidApiKey
from gateway.house import Gateway

PATH = "/admin/v1/session"
EVERYBODY = ("operator", "billing_reader")


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Who has signed in, and what the browser has to send along."""

    session: Session
    name: str
    """Of the admin key."""
    role: str
    csrf_token: str
    """``x-csrf-token`` of whatever changes something."""
    currency: str


class SignIn(Endpoint):
    """Attempts are counted by address."""

    __slots__ = ()

    async def _caller_of(self, gw: Gateway, request: web.Request) -> AdminCaller:
        address = request[head.HEAD].address
        if not gw.sessions.is_enabled:
            raise NotThere("There is no console here: the settings switch it off.")
        gw.sessions.check_may_try(address)
        try:
            if not names_a_key(request):
                raise InvalidApiKey("Sign in with an admin key, in the Authorization header: 'Bearer YOUR_KEY'.")
            return gw.auth.admin_of(request, *self.roles)
        except GatewayError:
            gw.sessions.failed(address)
            raise


async def begin(ask: Ask[Nothing, Nothing], change: Change) -> SignedIn:
    """Sign in with an admin key: the answer sets the session's cookie."""
    sessions = ask.gw.sessions
    session, token = await sessions.began(change.connection, ask.caller.key_id, presented(ask.request))
    await change.record("session.began", "session", session.id, None, session)
    head.also(ask.request, {"set-cookie": sessions.cookie(ask.request, token)})
    return _shown(ask, session, sessions.csrf_token_of(token))


async def one(ask: Ask[Nothing, Nothing]) -> SignedIn:
    """Read whose session it is."""
    bearer = await ask.gw.sessions.bearer_of(ask.request)
    if bearer is None:
        raise NotThere("This request has no session: it brings a key.")
    return _shown(ask, bearer.session, bearer.csrf_token)


async def end(ask: Ask[Nothing, Nothing], change: Change) -> Session:
    """Sign out: the session opens nothing any more, at any gateway."""
    sessions = ask.gw.sessions
    bearer = await sessions.bearer_of(ask.request)
    if bearer is None:
        raise NotThere("This request has no session: it brings a key.")
    await sessions.ended(change.connection, bearer.session)
    await change.record("session.ended", "session", bearer.session.id, bearer.session, None)
    head.also(ask.request, {"set-cookie": sessions.cookie(ask.request, "")})
    return bearer.session


def _shown(ask: Ask[Nothing, Nothing], session: Session, csrf_token: str) -> SignedIn:
    caller = ask.caller
    currency = ask.gw.settings.billing.currency
    return SignedIn(session=session, name=caller.name, role=caller.role, csrf_token=csrf_token, currency=currency)


ENDPOINTS: list[Endpoint] = [
    SignIn("POST", PATH, begin, SignedIn, EVERYBODY, status=201, changes=True),
    Endpoint("GET", PATH, one, SignedIn, EVERYBODY),
    Endpoint("DELETE", PATH, end, Session, EVERYBODY, changes=True),
]
