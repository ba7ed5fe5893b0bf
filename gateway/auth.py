"""Bearer key to whoever asks with it: one keyed hash and one look-up in memory; no database on the way of a request."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web
from multidict import istr

from gateway import keys
from gateway.directory import Directory
from gateway.errors import InvalidApiKey, ModelNotFound, PermissionDenied
from gateway.head import HEAD
from gateway.holders import Key
from gateway.restrictions import EVERYTHING, Network, Scopes
from policies.policy import Policy

OWNER, OPERATOR, BILLING_READER = "owner", "operator", "billing_reader"
API_KEY = istr("x-api-key")
NOT_LOCAL = (hdrs.AUTHORIZATION, API_KEY, hdrs.ORIGIN, hdrs.FORWARDED, hdrs.X_FORWARDED_FOR)
ORGANIZATION = "openai-organization"
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
TENANT = "tenant"
"""No role of the administration: a tenant's own key, where it may read what is the tenant's."""

USAGE = "usage"
"""What a tenant's key must be good for, to read what the tenant has used and spent."""


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks, with which key, and what they may do: as it was when they came, whatever changes meanwhile."""

    organization_id: str
    tenant_id: str
    tenant_name: str
    key_id: str
    policy: Policy
    """The tenant's, narrowed by the key."""
    policy_name: str
    policy_version: int
    scopes: Scopes = EVERYTHING
    purse_id: str = ""
    """Of the key's budget, as ``admission.Running`` has it; empty: the key's id."""

    def may(self, endpoint: str) -> bool:
        """``endpoint`` such as "chat.completions"."""
        return self.scopes.endpoints is None or endpoint in self.scopes.endpoints

    def check_endpoint(self, endpoint: str) -> None:
        """Raises PermissionDenied."""
        if not self.may(endpoint):
            raise PermissionDenied(
                f"You have insufficient permissions for this operation. Missing scopes: {endpoint}.",
                code="missing_scope",
            )

    def check(self, model: str, endpoint: str) -> None:
        """Raises PermissionDenied, and ModelNotFound just as for a model that nobody serves."""
        self.check_endpoint(endpoint)
        if not self.policy.may_use(model):
            raise ModelNotFound.named(model)


class AdminCaller(msgspec.Struct, frozen=True, gc=False):
    """Who administers, and in which role."""

    key_id: str
    name: str
    role: str
    tenant_id: str | None = None
    """Of a tenant's own key, to which nothing else is shown; None: of the administration."""


class Auth:
    """Opens the door, or not. A key that opens nothing is refused in the same words whatever is wrong with it."""

    def __init__(self, directory: Directory, wall: Callable[[], float] = time.time, local_key: str = "") -> None:
        """``wall``: Unix seconds; keys expire by them. ``local_key``: as for ``local_caller_of``; empty: none."""
        self._directory = directory
        self._wall = wall
        self._local_key = local_key

    def caller_of(self, request: web.Request) -> Caller:
        """The answer names the organization. Raises InvalidApiKey, and PermissionDenied when the key may not be used
        from there."""
        noted = request[HEAD]
        if noted.caller is not None:
            return noted.caller
        caller = self.caller(presented(request), noted.address)
        if caller is None:
            raise InvalidApiKey("Incorrect API key provided.")
        noted.also[ORGANIZATION] = caller.organization_id
        noted.caller = caller
        return caller

    def caller_for(self, endpoint: str, request: web.Request) -> Caller:
        """As ``caller_of``, whose key is good for ``endpoint``. Raises PermissionDenied also where it is not."""
        caller = self.caller_of(request)
        caller.check_endpoint(endpoint)
        return caller

    def local_caller_of(self, request: web.Request) -> Caller:
        """As ``caller_of``; a program on this machine that brings no key is taken for the owner of the local one.

        It must not be a page in a browser, which any site may have brought there, nor somebody whom a proxy on this
        machine speaks for without being trusted: then the address would be the proxy's own.
        """
        if self._local_key and self.is_local(request):
            noted = request[HEAD]
            noted.caller = self.caller(self._local_key, noted.address)
        return self.caller_of(request)

    def is_local(self, request: web.Request) -> bool:
        """A program on this machine asks, without a key, and neither for a page nor for somebody else."""
        return not any(name in request.headers for name in NOT_LOCAL) and _is_within(request[HEAD].address, LOOPBACK)

    def admin_of(self, request: web.Request, *roles: str) -> AdminCaller:
        """``roles``: those that may do it besides the owner; none given: everybody who administers.

        Raises InvalidApiKey, and PermissionDenied.
        """
        return self.admin_by(keys.hash_of(self._directory.secret, presented(request)), request, *roles)

    def admin_by(self, key_hash: bytes, request: web.Request, *roles: str) -> AdminCaller:
        """As ``admin_of``, by what is kept of the key."""
        key = self._unexpired(key_hash)
        if key is None or key.role is None:
            raise InvalidApiKey("Incorrect API key provided.")
        _check_address(key, request[HEAD].address)
        if roles and key.role not in (OWNER, *roles):
            raise PermissionDenied("The role of this key does not allow this.", code="insufficient_role")
        return AdminCaller(key.id, key.name, key.role)

    def reader_of(self, request: web.Request, endpoint: str, *roles: str) -> AdminCaller:
        """As ``admin_of``; also a tenant's key that is good for ``endpoint``, by which the tenant reads what is its
        own."""
        caller = self.caller(presented(request), request[HEAD].address)
        if caller is None:
            return self.admin_of(request, *roles)
        caller.check_endpoint(endpoint)
        return AdminCaller(caller.key_id, caller.tenant_name, TENANT, caller.tenant_id)

    async def knows_by_now(self, request: web.Request) -> bool:
        """Whether it brings a key that was unknown here and is known now: it was made through another gateway."""
        try:
            key_hash = keys.hash_of(self._directory.secret, presented(request))
        except InvalidApiKey:
            return False
        if self._directory.key(key_hash) is not None:
            return False
        await self._directory.seek()
        return self._directory.key(key_hash) is not None

    def caller(self, presented: str, address: str | None = None) -> Caller | None:
        """None when the key opens nothing here. Raises PermissionDenied when it may not be used from ``address``."""
        key = self._valid(presented)
        caller = self._caller(key)
        if key is not None and caller is not None:
            _check_address(key, address)
        return caller

    def caller_again(self, key_hash: bytes) -> Caller | None:
        """As ``caller``, for one who was let in with this key before; from where is not asked again."""
        return self._caller(self._unexpired(key_hash))

    def _caller(self, key: Key | None) -> Caller | None:
        if key is None or key.tenant_id is None:
            return None
        tenant = self._directory.tenant(key.tenant_id)
        version = self._directory.policy(tenant.policy_name)
        if tenant.is_disabled or version is None:
            return None
        return Caller(
            tenant.organization_id,
            tenant.id,
            tenant.name,
            key.id,
            self._directory.policy_for(key, version),
            version.name,
            version.version,
            key.restriction.scopes if key.restriction else EVERYTHING,
            self._directory.purse_id_of(key),
        )

    def _valid(self, presented: str) -> Key | None:
        return self._unexpired(keys.hash_of(self._directory.secret, presented))

    def _unexpired(self, key_hash: bytes) -> Key | None:
        key = self._directory.key(key_hash)
        if key is None or (key.expires_at is not None and key.expires_at <= self._wall()):
            return None
        return key


def presented(request: web.Request) -> str:
    """The key, as most clients send it, or as Anthropic's do. Raises InvalidApiKey."""
    header = request.headers.get(hdrs.AUTHORIZATION, "")
    if not header and (key := request.headers.get(API_KEY, "").strip()):
        return key
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not (key := key.strip()):
        raise InvalidApiKey(
            "You didn't provide an API key. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'."
        )
    return key


def _check_address(key: Key, address: str | None) -> None:
    if key.restriction is not None and key.restriction.networks and not _is_within(address, key.restriction.networks):
        raise PermissionDenied("This key may not be used from this address.", code="ip_not_authorized")


def _is_within(address: str | None, networks: tuple[Network, ...]) -> bool:
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:  # a Unix socket has none
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)
