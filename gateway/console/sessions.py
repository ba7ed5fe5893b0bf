"""A browser that signed in with an admin key: it has a cookie, and the key's rights at /admin/v1 for as long as the
session and the key last.

The cookie is random and known here by its hash alone, in the store, so every gateway knows it and none after sign-out.
What changes something must bring a token besides, which pages of other sites cannot read.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import sqlalchemy as sa
from aiohttp import hdrs, web
from multidict import istr
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import keys, store
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.errors import InvalidApiKey, PermissionDenied, ServiceUnavailable
from gateway.proxies import Proxies
from gateway.store import Store, new_id
from policies.settings import Settings

COOKIE = "penstock_session"
HOST_COOKIE = f"__Host-{COOKIE}"
"""Under TLS: browsers take it from this very host alone, and for no other (RFC 6265bis, section 4.1.3)."""
CSRF_HEADER = istr("x-csrf-token")
NUM_CHARS = 43
API_KEY, FETCH_SITE = istr("x-api-key"), istr("sec-fetch-site")
SAFE = (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
OWN_SITE = ("same-origin", "none")
MAX_SESSIONS = 1000
MAX_OF_A_KEY = 20
"""Past it the oldest end."""
MAX_FAILURES = 10
"""Sign-ins that failed from one address within the window; then it has to wait."""
WINDOW_S = 60.0
MAX_ADDRESSES = 4096


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Times in Unix seconds."""

    id: str
    key_id: str
    created_at: int
    expires_at: int


class Bearer(msgspec.Struct, frozen=True):
    """A request of a session."""

    session: Session
    key_hash: bytes
    csrf_token: str


class TooManySignIns(ServiceUnavailable):
    """So many sign-ins have failed from this address that the next one has to wait."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class Sessions:
    """All of them."""

    def __init__(
        self, config: Settings, rooms: Store, directory: Directory, clock: Clock, wall: Callable[[], float] = time.time
    ) -> None:
        self.is_enabled = config.console.enabled
        self._lasts_s = int(3600 * config.console.session_hours)
        self._proxies = Proxies(config.server)
        self._rooms = rooms
        self._directory = directory
        self._clock = clock
        self._wall = wall
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By address: since when they are counted, and how many there were."""

    async def bearer_of(self, request: web.Request) -> Bearer | None:
        """Whose session it is; None for a request that brings a key, or neither. Raises InvalidApiKey for a session
        that is none or is over, and PermissionDenied for what another site's page may have sent."""
        if not self.is_enabled or names_a_key(request) or not (token := self._token_of(request)):
            return None
        found = await self._found(token) if len(token) == NUM_CHARS and token.isalnum() else None
        if found is None:
            raise InvalidApiKey("This session is over. Please sign in again.")
        if request.headers.get(FETCH_SITE, "none") not in OWN_SITE:
            raise PermissionDenied("A session is good for the console's own pages alone.", code="foreign_page")
        csrf_token = self.csrf_token_of(token)
        if request.method not in SAFE:
            said = request.headers.get(CSRF_HEADER, "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(said, csrf_token.encode()):
                raise PermissionDenied("A session changes nothing without its x-csrf-token.", code="csrf_token")
        session = Session(id=found.id, key_id=found.key_id, created_at=found.created_at, expires_at=found.expires_at)
        return Bearer(session, found.key_hash, csrf_token)

    async def began(self, connection: AsyncConnection, key_id: str, presented: str) -> tuple[Session, str]:
        """A new session for whoever has this key, and its cookie's value."""
        token, now = _random(), int(self._wall())
        columns = store.sessions.c
        session = Session(id=new_id("ses"), key_id=key_id, created_at=now, expires_at=now + self._lasts_s)
        await connection.execute(sa.delete(store.sessions).where(columns.expires_at <= now))
        newest = sa.select(columns.hash).order_by(columns.created_at.desc(), columns.id.desc())
        for some, most in ((newest.where(columns.key_id == key_id), MAX_OF_A_KEY), (newest, MAX_SESSIONS)):
            hashes = (await connection.execute(some)).scalars().all()
            await connection.execute(sa.delete(store.sessions).where(columns.hash.in_(hashes[most - 1 :])))
        row = msgspec.structs.asdict(session) | {
            "hash": self._hash(token),
            "key_hash": keys.hash_of(self._directory.secret, presented),
        }
        await connection.execute(sa.insert(store.sessions), row)
        return session, token

    async def ended(self, connection: AsyncConnection, session: Session) -> None:
        """It opens nothing from now on."""
        await connection.execute(sa.delete(store.sessions).where(store.sessions.c.id == session.id))

    def cookie(self, request: web.Request, token: str) -> str:
        """As a header has it; an empty ``token`` takes it away."""
        is_secure = self._proxies.is_secure(request)
        name, lasts_s = HOST_COOKIE if is_secure else COOKIE, self._lasts_s if token else 0
        secure = "; Secure" if is_secure else ""
        return f"{name}={token}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}"

    def csrf_token_of(self, token: str) -> str:
        return hashlib.blake2b(token.encode(), key=self._directory.secret, person=b"penstock csrf").hexdigest()[:64]

    def check_may_try(self, address: str | None) -> None:
        """Raises TooManySignIns."""
        since, num = self._failures.get(address or "", (0.0, 0))
        left_s = since + WINDOW_S - self._clock.now()
        if num >= MAX_FAILURES and left_s > 0:
            raise TooManySignIns(
                f"{num} sign-ins have failed from this address. Please wait {left_s:.0f} s.", retry_after_s=left_s
            )

    def failed(self, address: str | None) -> None:
        """To sign in."""
        now, failures = self._clock.now(), self._failures
        since, num = failures.pop(address or "", (now, 0))
        failures[address or ""] = (since, num + 1) if since + WINDOW_S > now else (now, 1)
        if len(failures) > MAX_ADDRESSES:
            failures.popitem(last=False)

    def _token_of(self, request: web.Request) -> str:
        return request.cookies.get(HOST_COOKIE if self._proxies.is_secure(request) else COOKIE, "")

    async def _found(self, token: str) -> sa.Row[tuple[object, ...]] | None:
        columns = store.sessions.c
        query = sa.select(store.sessions).where(columns.hash == self._hash(token), columns.expires_at > self._wall())
        async with self._rooms.engine.connect() as connection:
            return (await connection.execute(query)).first()

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(
            token.encode(), key=self._directory.secret, person=b"penstock session", digest_size=32
        ).digest()


def names_a_key(request: web.Request) -> bool:
    """By a header; what that says counts, whatever cookies there are."""
    return hdrs.AUTHORIZATION in request.headers or API_KEY in request.headers


def credentials_of(request: web.Request) -> bytes:
    """What nobody but whoever asks can know: a key, or a session's cookie."""
    said = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")[2].strip() or request.headers.get(API_KEY, "")
    said = said or request.cookies.get(HOST_COOKIE, "") or request.cookies.get(COOKIE, "")
    return said.encode("utf-8", "surrogateescape")


def _random() -> str:
    return keys.new_key().removeprefix(keys.PREFIX)
