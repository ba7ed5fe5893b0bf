"""How limits and budgets stand at the moment, by this gateway or by all that share its Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway import rotations
from gateway.admin import keys, policies, tenants
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page
from gateway.house import Gateway
from gateway.limits import Reading
from policies.admission import Scope
from policies.policy import ANY, Budget, Policy, narrowed


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One ceiling and what counts against it now, requests that are still open included."""

    scope: Scope
    """Whose it is: the tenant's, the key's, or the tenant's on ``model``."""
    model: str | None
    limit: str
    """The policy's word for it, such as "tokens_per_minute"."""
    ceiling: int
    used: int
    remaining: int
    reset_ms: int | None
    """Until nothing would be used any more, if nothing more came; null where nobody can know."""


class BudgetStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of the running period, in millionths of ``currency``."""

    period: str
    hard: bool
    currency: str
    amount_micros: int
    used_micros: int
    """Spent, or set aside for requests that are still open; without those where it is soft."""
    remaining_micros: int
    reset_ms: int
    """Until the next period begins."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is counted under the version of the policy that is current."""

    tenant_id: str
    policy: str
    policy_version: int
    ceilings: list[Standing]
    budget: BudgetStanding | None
    """The tenant's."""


class KeyLimits(TenantLimits, frozen=True, kw_only=True):
    """Everything that a request of this key is held against."""

    key_id: str
    key_budget: BudgetStanding | None
    """The key's: its own, by its narrowing, or what the policy has for each key."""


class KeyBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one key: its own, or what its tenant's policy has for each key."""

    key_id: str
    budget: BudgetStanding | None
    """Null where it has none, or is revoked."""


class LimitsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Of the ceilings on models those on this one; null: on each that is served or that the policy names."""


async def of_tenant(ask: Ask[LimitsQuery, Nothing]) -> TenantLimits:
    """Read how the limits and the budget of a tenant stand."""
    async with ask.reading() as connection:
        tenant = await tenants.found(connection, ask.named("tenant_id"))
        version = await policies.found(connection, tenant.policy)
    ceilings, budgets = await _read(ask.gw, version.document, _models(ask, version.document), tenant.id)
    return TenantLimits(
        tenant_id=tenant.id,
        policy=version.name,
        policy_version=version.version,
        ceilings=ceilings,
        budget=budgets.get("tenant"),
    )


async def of_key(ask: Ask[LimitsQuery, Nothing]) -> KeyLimits:
    """Read how everything stands that a request of a key is held against."""
    async with ask.reading() as connection:
        key = await keys.found(connection, ask.named("key_id"))
        tenant = await tenants.found(connection, key.tenant_id)
        version = await policies.found(connection, tenant.policy)
        policy = version.document if key.narrowing is None else narrowed(version.document, key.narrowing)
        purse_id = ""
        if policy.key_budget is not None:
            purse_id = rotations.first(key.id, await rotations.predecessors(connection, [tenant.id]))
    ceilings, budgets = await _read(ask.gw, policy, _models(ask, policy), tenant.id, key.id, purse_id)
    return KeyLimits(
        key_id=key.id,
        tenant_id=tenant.id,
        policy=version.name,
        policy_version=version.version,
        ceilings=ceilings,
        budget=budgets.get("tenant"),
        key_budget=budgets.get("key"),
    )


async def of_keys(ask: Ask[keys.KeyQuery, Nothing]) -> Page[KeyBudget]:
    """Read how the budgets of keys stand: of every key of the list of keys, in its pages."""
    async with ask.reading() as connection:
        page = await keys.page(connection, ask.query)
        by_tenant = await policies.of_tenants(connection, {each.tenant_id for each in page.data})
        found = {each.id: _budget_of(each, by_tenant[each.tenant_id]) for each in page.data}
        owners = {each.tenant_id for each in page.data if found[each.id] is not None}
        known = await rotations.predecessors(connection, owners)

    async def stands(key: keys.Key) -> KeyBudget:
        if (budget := found[key.id]) is None:
            return KeyBudget(key_id=key.id, budget=None)
        policy = Policy(key_budget=budget)
        _, budgets = await _read(ask.gw, policy, (), key.tenant_id, key.id, rotations.first(key.id, known))
        return KeyBudget(key_id=key.id, budget=budgets["key"])

    return Page([*await asyncio.gather(*map(stands, page.data))], page.has_more, page.next_cursor)


def _budget_of(key: keys.Key, policy: Policy) -> Budget | None:
    if key.revoked_at is not None:
        return None
    return policy.key_budget if key.narrowing is None else narrowed(policy, key.narrowing).key_budget


async def _read(
    gw: Gateway, policy: Policy, models: Sequence[str], tenant_id: str, key_id: str = "", purse_id: str = ""
) -> tuple[list[Standing], dict[Scope, BudgetStanding]]:
    readings = await gw.limits.peek(policy, tenant_id, key_id, models, purse_id)
    ceilings, budgets = [], {}
    for reading in readings:
        if (budget := reading.budget) is None:
            ceilings.append(_standing(reading))
        else:
            budgets[reading.scope] = BudgetStanding(
                period=budget.period,
                hard=budget.hard,
                currency=gw.settings.billing.currency,
                amount_micros=reading.ceiling,
                used_micros=reading.used,
                remaining_micros=max(0, reading.ceiling - reading.used),
                reset_ms=reading.reset_ms,
            )
    return ceilings, budgets


def _standing(reading: Reading) -> Standing:
    return Standing(
        scope=reading.scope,
        model=reading.model or None,
        limit=reading.limit,
        ceiling=reading.ceiling,
        used=reading.used,
        remaining=max(0, reading.ceiling - reading.used),
        reset_ms=None if reading.limit == "concurrent_requests" and reading.used else reading.reset_ms,
    )


def _models(ask: Ask[LimitsQuery, Nothing], policy: Policy) -> Sequence[str]:
    if ask.query.model is not None:
        return [ask.query.model]
    return sorted({*ask.gw.settings.models, *policy.model_limits} - {ANY})


ENDPOINTS = [
    Endpoint("GET", tenants.PATH + "/{tenant_id}/limits", of_tenant, TenantLimits, READERS, query=LimitsQuery),
    Endpoint("GET", "/admin/v1/key_budgets", of_keys, Page[KeyBudget], OPERATORS, query=keys.KeyQuery),
    Endpoint("GET", keys.PATH + "/{key_id}/limits", of_key, KeyLimits, OPERATORS, query=LimitsQuery),
]
