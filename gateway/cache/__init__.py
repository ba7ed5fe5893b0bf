"""Answers that are given twice: those that are kept, and those that are on their way to somebody who asked the same.

Which requests take part is said by ``policies.answers``. Whatever a tenant finds here was its own, or of the group that
its policy names.
"""

from __future__ import annotations

import time
from types import TracebackType

from gateway.cache.memory import Held, Keeper, Memory
from gateway.cache.runs import Reader, Replay, Run
from gateway.cache.shared import Shared
from gateway.clock import Clock
from gateway.flights import Send, Source, launched
from policies import answers, policy, prefix, settings
from policies.answers import Asked, Outcome

__all__ = ["Cache", "Found", "Held", "Keeper", "Memory", "Shared"]

Key = tuple[bytes, bytes]
"""An answer's scope, and its name in it."""


class Cache:
    """All exact answers of this gateway."""

    def __init__(self, config: settings.Cache, secret: bytes, keeper: Keeper, clock: Clock) -> None:
        """``secret`` is the install's; ``keeper`` may be shared with others."""
        self._max_entry_bytes = config.max_entry_bytes
        self._secret = secret
        self._keeper = keeper
        self._clock = clock
        self._runs: dict[Key, Run] = {}

    def look(self, tenant_id: str, cache: policy.Cache, asked: Asked, control: str = "", rank: int = 0) -> Found:
        """What there is for a request: ``async with cache.look(...) as found``.

        ``cache`` is its policy's word, ``control`` its own Cache-Control, ``rank`` its importance in the queue
        (``Run``).
        """
        rules = answers.rules(cache, asked, control)
        key = None
        if rules.keeps:
            key = (answers.scope_of(self._secret, tenant_id, cache.sharing_group), answers.name_of(asked))
        return Found(self, key, asked, rules.reads, cache.ttl_s, rank)

    def salt_of(self, tenant_id: str, cache: policy.Cache, own: str | None) -> bytes:
        """Under which the engine keeps this tenant's prefixes, or those of the group that its policy names; ``own``: of
        its requests with that ``cache_salt`` alone."""
        salt = prefix.salt_of(self._secret, tenant_id, cache.prefix_group)
        return salt if own is None else prefix.narrowed(salt, own)

    def told_salt_of(self, tenant_id: str, cache: policy.Cache, own: str | None) -> str:
        """The same for engines elsewhere, as their ``cache_salt``."""
        return prefix.told(self.salt_of(tenant_id, cache, own))

    async def flush(self, tenant_id: str, cache: policy.Cache) -> int:
        """Forgets what is kept for this tenant, and for the group that its policy names; how many answers there were.
        Those that are being computed are not kept when they are ready."""
        num = 0
        for scope in self._scopes(tenant_id, cache):
            for key in [key for key in self._runs if key[0] == scope]:
                del self._runs[key]
            num += await self._keeper.flush(scope)
        return num

    async def held(self, tenant_id: str, cache: policy.Cache) -> Held:
        """What is kept for this tenant, and for the group that its policy names."""
        held = [await self._keeper.held(scope) for scope in self._scopes(tenant_id, cache)]
        return Held(sum(each.num_entries for each in held), sum(each.num_bytes for each in held))

    async def held_in_all(self) -> Held:
        return await self._keeper.held()

    def _scopes(self, tenant_id: str, cache: policy.Cache) -> set[bytes]:
        return {answers.scope_of(self._secret, tenant_id, group) for group in ("", cache.sharing_group)}

    # For Found

    async def replay(self, key: Key, asked: Asked, ttl_s: float) -> Replay | None:
        """A kept answer that is no older than the policy of today allows."""
        value = await self._keeper.get(*key)
        kept = None if value is None else answers.unpacked(value)
        if kept is None or time.time() - kept.made_at >= ttl_s:
            return None
        return Replay(kept, asked.submits, self._clock)

    def join(self, key: Key, asked: Asked, rank: int) -> Reader | None:
        """Reads along, where one is being computed."""
        run = self._runs.get(key)
        return Reader(run, asked.submits) if run is not None and run.suits(rank) else None

    def launch(self, key: Key, asked: Asked, rank: int, ttl_s: float, source: Source) -> Reader:
        """Reads, and lets others read along; a whole answer is kept."""

        def ended(run: Run) -> None:
            if self._runs.get(key) is run:
                del self._runs[key]
                kept = run.kept(int(time.time()))
                value = b"" if kept is None else answers.packed(kept)
                if 0 < len(value) <= self._max_entry_bytes:
                    self._keeper.put(*key, value, ttl_s)

        run = self._runs[key] = Run(source, asked.submits, rank, self._clock, ended)
        return Reader(run, asked.submits)


class Found:
    """What the cache has for one request. An async context manager: entering looks, leaving lets go of the answer that
    ``launch`` gave."""

    def __init__(self, cache: Cache, key: Key | None, asked: Asked, reads: bool, ttl_s: float, rank: int) -> None:
        """``key``: None where the request takes no part."""
        self._cache = cache
        self._key = key
        self._asked = asked
        self._reads = reads
        self._ttl_s = ttl_s
        self._rank = rank
        self._source: Source | None = None
        self.followed = ""
        """W3C trace context of the request whose computation it reads along with; empty: of none, or that has no
        trace."""

    async def __aenter__(self) -> Found:
        if self._key is not None and self._reads:
            self._join(self._key)
            if self._source is None:
                self._source = await self._cache.replay(self._key, self._asked, self._ttl_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._source is not None:
            self._source.close()

    @property
    def outcome(self) -> Outcome:
        """What was found: "hit", "shared", or "miss", so that a worker has to compute it."""
        return "miss" if self._source is None else self._source.outcome

    @property
    def max_completion_tokens(self) -> int:
        """Of all sequences together. A kept answer has exactly so many."""
        if isinstance(self._source, Replay):
            return self._source.num_tokens
        submits = self._asked.submits
        return sum([each.sampling.max_tokens * each.num_sequences for each in submits if each.pooling is None])

    def launch(self, send: Send) -> Source:
        """What was found; else what ``send`` sends on its way, and others may read along with that. Raises what it
        raises."""
        key, cache = self._key, self._cache
        if self._source is None and key is not None and self._reads:
            # Somebody else may have come while this one was being admitted.
            self._join(key)
        if self._source is None:
            self._source = launched(send, self._asked.submits)
            if key is not None:
                self._source = cache.launch(key, self._asked, self._rank, self._ttl_s, self._source)
        return self._source

    def _join(self, key: Key) -> None:
        reader = self._cache.join(key, self._asked, self._rank)
        if reader is not None:
            self._source, self.followed = reader, reader.followed
