"""Who there is, in memory: every key, tenant and policy of the store, and the price list, so that a request asks no
database.

A change of the store has a revision, and each row that it touched carries it: ``refresh`` reads the rows that are newer
than what is known here. ``watched`` does so twice a second and whenever ``notice`` says that there is something; while
the database is away, what was known last goes on to count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import rotations, store
from gateway.adapters import Adapter
from gateway.background import alongside
from gateway.clock import Clock
from gateway.holders import Key, Tenant, Version
from gateway.restrictions import MAX_KNOWN, Restrictions
from gateway.sealing import unsealed
from gateway.store import Store
from policies.policy import Budget, Narrowing, Policy, narrowed
from policies.pricelist import Listed, PriceList, Terms
from policies.upstreams.terms import Upstream

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two looks. What was revoked through another gateway ends here so much later, if no notice comes before."""
LOOK_S = 10.0
"""How long the database may take to answer one of them."""
SEEK_S = 0.1
"""Between two looks for keys that are unknown here: whoever guesses keys has the database asked no more often."""
PATIENCE_S = 2.0
"""How long whoever brought one waits for that."""
AHEAD_S = 86_400.0
"""So much a clock may be ahead and then be set back: prices that are over stay known for so long, as they are in force
again then."""
CHUNK = 1000
"""Rows that are read at once."""
READ = (
    "revision",
    "_server",
    "prices",
    "adapters",
    "upstreams",
    "_keys",
    "_budgeted",
    "_lines",
    "_tenants",
    "_policies",
)
"""Attributes that are what the store says."""


class Directory:
    """What the store says of keys, tenants, policies and prices, as of ``revision``."""

    def __init__(self, rooms: Store, clock: Clock, secret: bytes) -> None:
        """Empty; ``load`` makes a full one."""
        self.secret = secret
        """Under which keys are hashed."""
        self.revision = 0
        self.changed: Callable[[], None] = lambda: None
        """Is called when that is another one."""
        self.prices = PriceList()
        """Another one whenever it has changed."""
        self.adapters: dict[str, Adapter] = {}
        """Those that are served, by name; another one whenever it has changed."""
        self.bases: dict[str, str] = {}
        """The model of each name that an adapter has, or had."""
        self.adapters_changed: Callable[[], None] = lambda: None
        """Is called then."""
        self.upstreams: dict[str, tuple[Upstream, str]] = {}
        """Those that administrators have made, with their keys, by name; another one whenever it has changed."""
        self.upstreams_changed: Callable[[], None] = lambda: None
        self._rooms = rooms
        self._clock = clock
        self._keys: dict[bytes, Key] = {}
        self._budgeted: dict[str, Key] = {}
        """By id, the keys with a budget of their own."""
        self._lines: dict[str, tuple[str, ...]] = {}
        """By id, of the keys that others were rotated into (``rotations``)."""
        self._tenants: dict[str, Tenant] = {}
        self._policies: dict[str, Version] = {}
        self._restrictions = Restrictions()
        self._narrowed: dict[tuple[str, int, str], Policy] = {}
        self._server: Hashable = None
        """As ``Edition`` has it."""
        self._noticed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._looked = asyncio.Event()
        """The next look is over."""
        self._sought: asyncio.Event | None = None
        """Of the look that was last asked for by ``seek``."""
        self._seek_at = -math.inf
        """When that one is due, or was."""
        self._failure: Exception | None = None

    @classmethod
    async def load(cls, rooms: Store, clock: Clock) -> Directory:
        """All that ``rooms`` holds."""
        async with rooms.engine.connect() as connection:
            secret = (await connection.execute(sa.select(store.install.c.key_secret))).scalar_one()
        directory = cls(rooms, clock, secret)
        await directory.refresh()
        return directory

    def key(self, hash: bytes) -> Key | None:
        return self._keys.get(hash)

    def every_key(self) -> Iterable[Key]:
        """Of tenants and of the administration."""
        return self._keys.values()

    def budgeted_keys(self) -> Iterable[Key]:
        """Those that may have a budget: every key, where a policy has one for its keys."""
        has_default = any(version.policy.key_budget is not None for version in self._policies.values())
        return self._keys.values() if has_default else self._budgeted.values()

    def budget_of(self, key: Key) -> Budget | None:
        """Its own, or else what its tenant's policy has for each key."""
        if key.restriction is not None and key.restriction.budget is not None:
            return key.restriction.budget
        version = None if key.tenant_id is None else self.policy(self.tenant(key.tenant_id).policy_name)
        return None if version is None else version.policy.key_budget

    def line_of(self, key: Key) -> tuple[str, ...]:
        """Its own id and those of all that were rotated into it, the first one last."""
        return self._lines.get(key.id) or (key.id,)

    def purse_id_of(self, key: Key) -> str:
        """That of its budget."""
        return self.line_of(key)[-1]

    def tenant(self, tenant_id: str) -> Tenant:
        return self._tenants[tenant_id]

    def tenants(self) -> Iterable[Tenant]:
        return self._tenants.values()

    def policy(self, name: str) -> Version | None:
        """None when a newer Penstock has written it in words that are unknown here."""
        return self._policies.get(name)

    def policy_for(self, key: Key, version: Version) -> Policy:
        """``version`` as the key has it."""
        if key.restriction is None or not (narrowing := key.restriction.narrowing):
            return version.policy
        known = (version.name, version.version, narrowing)
        policy = self._narrowed.get(known)
        if policy is None:
            if len(self._narrowed) >= MAX_KNOWN:
                self._narrowed.clear()
            policy = narrowed(version.policy, msgspec.json.decode(narrowing, type=Narrowing))
            self._narrowed[known] = policy
        return policy

    def notice(self) -> None:
        """Something has changed: look now."""
        self._noticed.set()

    async def refresh(self) -> None:
        """Reads what has changed since the last time. Raises what the database raises; what was known before is known
        then as well.

        A row in words that are unknown here, as a newer Penstock may write them, must not keep others from being
        revoked: a policy stays as it was, a key opens nothing, and the log says so.
        """
        async with self._refreshing:
            edition = await self._rooms.edition()
            if edition.server == self._server and edition.revision == self.revision:
                return
            if edition.server != self._server and self.revision:
                await self._begin_anew()
                return
            async with self._rooms.engine.connect() as connection:
                if self._rooms.database is None:  # SQLite has nothing but snapshots
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                revision = (await connection.execute(sa.select(store.changes.c.revision))).scalar_one()
                policies = await self._new_policies(connection)
                tenants = await self._new_tenants(connection)
                entries = await self._new_prices(connection)
                adapters = await self._new_adapters(connection)
                upstreams = await self._new_upstreams(connection)
                self._policies.update(policies)
                self._tenants.update(tenants)
                if entries:
                    self.prices = self.prices.extended(entries, time.time() - AHEAD_S)
                await self._take_new_keys(connection)
                self.revision, self._server = revision, edition.server
        if adapters:
            known = self.adapters | adapters
            self.adapters = {name: adapter for name, adapter in known.items() if adapter is not None}
            self.adapters_changed()
        if upstreams:
            self.upstreams = {n: each for n, each in (self.upstreams | upstreams).items() if each is not None}
            self.upstreams_changed()
        self.changed()

    async def _begin_anew(self) -> None:
        """Another server may lack what was changed last: what is not there counts no more. Raises what the database
        raises."""
        fresh = Directory(self._rooms, self._clock, self.secret)
        await fresh.refresh()
        are_other_adapters = fresh.adapters != self.adapters
        are_other_upstreams = fresh.upstreams != self.upstreams
        for name in READ:
            setattr(self, name, getattr(fresh, name))
        self.bases |= fresh.bases  # in place: others know it
        self._narrowed.clear()  # the number of a version that is lost may be given again
        if are_other_adapters:
            self.adapters_changed()
        if are_other_upstreams:
            self.upstreams_changed()
        self.changed()

    async def seek(self) -> None:
        """Until it was looked once more, or for as long as anybody may wait for that: what is unknown here may have
        been made through another gateway a moment ago. However many ask, it is looked for them once in ``SEEK_S``."""
        looked = self._looked
        if self._sought is not looked:
            self._sought, now = looked, self._clock.now()
            self._seek_at = max(now, self._seek_at + SEEK_S)
            if self._seek_at > now:
                self._clock.call_later(self._seek_at - now, self.notice)
            else:
                self.notice()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await looked.wait()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, changes are found by themselves."""
        async with alongside(self._watch()):
            yield

    async def _watch(self) -> None:
        while True:
            timer = self._clock.call_later(POLL_S, self._noticed.set)
            try:
                await self._noticed.wait()
            finally:
                timer.cancel()
            self._noticed.clear()
            looked, self._looked = self._looked, asyncio.Event()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.refresh()
            except Exception as error:  # a driver has some of its own
                self._say(error)
            else:
                self._say(None)
            looked.set()

    def _say(self, failure: Exception | None) -> None:
        """Once when it begins, and once when it is over."""
        if failure is not None and self._failure is None:
            words = store.cause_of(failure)
            is_strange = not isinstance(failure, (SQLAlchemyError, OSError))  # TimeoutError is an OSError
            log.error("the store cannot be read, keys and policies stay as they were: %s", words, exc_info=is_strange)
        if failure is None and self._failure is not None:
            log.info("the store can be read again")
        self._failure = failure

    async def _new_policies(self, connection: AsyncConnection) -> dict[str, Version]:
        heads, versions = store.policy_heads, store.policies
        query = (
            sa.select(versions.c.name, versions.c.version, versions.c.document)
            .join(heads, (heads.c.name == versions.c.name) & (heads.c.current_version == versions.c.version))
            .where(heads.c.revision > self.revision)
        )
        found = {}
        for row in await connection.execute(query):
            try:
                policy = msgspec.json.decode(row.document, type=Policy)
            except msgspec.DecodeError as error:
                log.error("version %d of policy %s cannot be read and has no effect: %s", row.version, row.name, error)
            else:
                found[row.name] = Version(row.name, row.version, policy)
        return found

    async def _new_prices(self, connection: AsyncConnection) -> list[Listed]:
        columns = store.prices.c
        query = sa.select(store.prices).where(columns.revision > self.revision).order_by(columns.version)
        found = []
        for row in await connection.execute(query):
            try:
                terms = msgspec.json.decode(row.document, type=Terms)
            except msgspec.DecodeError as error:
                log.error("version %d of the price list cannot be read and has no effect: %s", row.version, error)
            else:
                found.append(Listed(row.version, row.model, row.sla_class, row.effective_from, terms.price))
        return found

    async def _new_adapters(self, connection: AsyncConnection) -> dict[str, Adapter | None]:
        """None: it is not served any more."""
        columns = store.adapters.c
        found: dict[str, Adapter | None] = {}
        for row in await connection.execute(sa.select(store.adapters).where(columns.revision > self.revision)):
            adapter = Adapter(row.name, row.model, row.adapter_id, row.source, row.digest, row.loaded_at)
            found[row.name] = adapter if row.unloaded_at is None else None
            self.bases[row.name] = row.model
        return found

    async def _new_upstreams(self, connection: AsyncConnection) -> dict[str, tuple[Upstream, str] | None]:
        """None: it is not asked any more, or it is in words that are unknown here."""
        columns = store.upstreams.c
        found: dict[str, tuple[Upstream, str] | None] = {}
        for row in await connection.execute(sa.select(store.upstreams).where(columns.revision > self.revision)):
            found[row.name] = None
            if row.deleted_at is not None:
                continue
            try:
                terms = msgspec.json.decode(row.document, type=Upstream)
                key = "" if row.sealed_key is None else unsealed(self.secret, "upstream", row.name, row.sealed_key)
            except ValueError as error:  # msgspec's are among them
                log.error("upstream %s cannot be read and is not asked: %s", row.name, error)
            else:
                found[row.name] = terms, key
        return found

    async def _new_tenants(self, connection: AsyncConnection) -> dict[str, Tenant]:
        columns = store.tenants.c
        query = sa.select(columns.id, columns.organization_id, columns.name, columns.policy, columns.disabled_at).where(
            columns.revision > self.revision
        )
        return {
            id: Tenant(id, organization_id, name, policy, disabled_at is not None)
            for id, organization_id, name, policy, disabled_at in await connection.execute(query)
        }

    async def _take_new_keys(self, connection: AsyncConnection) -> None:
        columns = store.keys.c
        query = sa.select(
            columns.hash,
            columns.id,
            columns.tenant_id,
            columns.role,
            columns.name,
            columns.expires_at,
            columns.revoked_at,
            columns.scopes,
            columns.networks,
            columns.narrowing,
            columns.rotated_from,
        ).where(columns.revision > self.revision)
        if not self.revision:
            query = query.where(columns.revoked_at.is_(None))
        rotated: dict[bytes, Key] = {}
        rows = await connection.stream(query)
        async for chunk in rows.partitions(CHUNK):
            for hash, id, tenant_id, role, name, expires_at, revoked_at, scopes, networks, narrowing, before in chunk:
                if revoked_at is not None:
                    self._drop(hash, id)
                    continue
                restriction = None
                if scopes or networks or narrowing:
                    try:
                        restriction = self._restrictions.of(scopes, networks, narrowing)
                    except ValueError as error:
                        log.error("key %s opens nothing, since its restrictions cannot be read: %s", id, error)
                        self._drop(hash, id)
                        continue
                if tenant_id is not None:
                    tenant_id, name = self._tenants[tenant_id].id, ""  # the one string for all of them
                key = Key(id, tenant_id, role, name, expires_at, restriction)
                if restriction is not None and restriction.budget is not None:
                    self._budgeted[id] = key
                else:
                    self._budgeted.pop(id, None)
                if before is not None and tenant_id is not None and id not in self._lines:
                    rotated[hash] = key
                else:
                    self._keys[hash] = key
        if rotated:
            known = await rotations.predecessors(
                connection, {key.tenant_id for key in rotated.values() if key.tenant_id}
            )
            self._lines.update((key.id, tuple(rotations.line(key.id, known))) for key in rotated.values())
            self._keys.update(rotated)

    def _drop(self, hash: bytes, id: str) -> None:
        """This key opens nothing any more."""
        self._keys.pop(hash, None)
        self._budgeted.pop(id, None)
        self._lines.pop(id, None)
