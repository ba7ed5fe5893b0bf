"""Tokens of the last day, from the ledger: for a gateway that counts alone, after a restart, and for a Redis that has
lost them.

Windows of a minute begin empty: a restart takes about as long as they need to be so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.directory import Directory
from gateway.limits import Limits
from gateway.store import Store
from policies import admission
from policies.admission import Rule
from policies.policy import Limits as Ceilings
from policies.policy import Narrowing, Policy
from policies.pricing import FROM_CACHE
from policies.rate import DAY_MS, NUM_SLOTS

SLOT_S = DAY_MS // NUM_SLOTS // 1000
LIMIT = "tokens_per_day"
AT_ONCE = 500
"""Gauges told at once, tenants named in one query, and keys looked at without a pause."""
ID_MARGIN_S = 3600
"""How much older than its row a request's id may be."""


async def restore(rooms: Store, directory: Directory, limits: Limits, wall: Callable[[], float] = time.time) -> None:
    """Counts what the ledger has of the last day: in memory once, before the first request, and as of the end of each
    slot, so that if anything tokens leave late, and never early; in Redis no slot has less after it, however often it
    is done. Raises what the database raises, and RedisAway.
    """
    policies = _limited(directory)
    tenant_ids = sorted({tenant_id for tenant_id, _ in policies})
    now = wall()
    for start in range(0, len(tenant_ids), AT_ONCE):
        query = _used_since(int(now) - DAY_MS // 1000 - SLOT_S, tenant_ids[start : start + AT_ONCE])
        found: dict[str, tuple[Rule, dict[int, int]]] = {}
        async with rooms.engine.connect() as connection:
            rows = await connection.stream(query)
            async for portion in rows.partitions(AT_ONCE):
                for tenant_id, key_id, model, slot, num_tokens in portion:
                    policy = policies.get((tenant_id, key_id)) or policies[tenant_id, ""]
                    for rule in admission.rules_for(policy, tenant_id, key_id, model):
                        if rule.limit == LIMIT:
                            _, slots = found.setdefault(rule.name, (rule, {}))
                            slots[slot] = slots.get(slot, 0) + int(num_tokens)
        for rule, slots in found.values():
            if limits.shared is not None:
                await limits.shared.restore_window(rule, slots.items())
                continue
            for slot, num_tokens in slots.items():
                limits.local.used(rule, num_tokens, max(0, int(1e3 * (now - (slot + 1) * SLOT_S))))


def _limited(directory: Directory) -> dict[tuple[str, str], Policy]:
    """By tenant and key, the policies of those whose tokens of a day are limited; under the key "" a tenant's own."""
    found: dict[tuple[str, str], Policy] = {}
    for tenant in directory.tenants():
        version = directory.policy(tenant.policy_name)
        if version is not None and any(_limits_days(each) for each in _ceilings(version.policy)):
            found[tenant.id, ""] = version.policy
    for key in directory.every_key():
        if key.tenant_id is None or key.restriction is None or not key.restriction.narrowing:
            continue
        version = directory.policy(directory.tenant(key.tenant_id).policy_name)
        if version is None or not _limits_days(msgspec.json.decode(key.restriction.narrowing, type=Narrowing).limits):
            continue
        found[key.tenant_id, key.id] = directory.policy_for(key, version)
        found.setdefault((key.tenant_id, ""), version.policy)
    return found


def _ceilings(policy: Policy) -> Iterator[Ceilings]:
    yield policy.limits
    yield policy.key_limits
    yield from policy.model_limits.values()


def _limits_days(limits: Ceilings) -> bool:
    return limits.tokens_per_day is not None


def is_since(unix_s: int) -> sa.ColumnElement[bool]:
    """Of rows of the ledger. Their request ids are in the order of time and have an index, which the column of the time
    itself has not. Corrections have ids before all of them: they change what is billed, and no gauge."""
    rows = store.ledger.c
    first = f"req_{1000 * (unix_s - ID_MARGIN_S) << 80:032x}"
    return sa.and_(rows.request_id >= first, rows.created_at >= unix_s)


def _used_since(unix_s: int, tenant_ids: list[str]) -> sa.Select[str, str, str, int, int]:
    """Slots oldest first, as a window takes them."""
    rows = store.ledger.c
    slot = (rows.created_at // SLOT_S).label("slot")
    num_tokens = sa.func.sum(rows.num_prompt_tokens + rows.num_completion_tokens)
    return (
        sa.select(rows.tenant_id, rows.key_id, rows.model, slot, num_tokens)
        .where(is_since(unix_s), rows.tenant_id.in_(tenant_ids), rows.cache.not_in(FROM_CACHE))
        .group_by(rows.tenant_id, rows.key_id, rows.model, slot)
        .order_by(slot)
    )
