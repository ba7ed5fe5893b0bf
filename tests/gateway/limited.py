"""Callers with limits, and what they use."""

from __future__ import annotations

import contextlib
import itertools
from decimal import Decimal

from gateway.clock import Clock
from gateway.ledger import writer_for
from gateway.limits import Limits
from gateway.redis import Redis
from policies import settings
from policies.policy import Budget, Policy, Price
from policies.policy import Limits as Ceilings
from policies.terms import Usage
from tests.builders import a_caller, an_entry

ESTIMATE = 100
DEMO = "demo"

_numbers = itertools.count()


def limits_of(clock):
    """Of one gateway, with nothing used yet; no period ends meanwhile."""
    config = settings.Settings(limits=settings.Limits(completion_estimate=ESTIMATE))
    return Limits(config, clock, wall=lambda: 1_795_000_000.0)


@contextlib.asynccontextmanager
async def a_gateway(redis_settings, clock=None, **options):
    """Its limits, which it shares with others by this Redis."""
    clock = clock or Clock()
    redis = Redis(redis_settings, clock)
    config = settings.Settings(limits=settings.Limits(completion_estimate=100), redis=redis_settings)
    limits = Limits(config, clock, redis, **options)
    async with limits.watched():
        yield limits
    await redis.close()


def a_policy(budget=None, price=None, key_limits=None, model_limits=None, **ceilings):
    return Policy(
        limits=Ceilings(**ceilings),
        key_limits=key_limits or Ceilings(),
        model_limits=model_limits or {},
        budget=budget,
        prices={"*": price} if price else {},
    )


def used(limits, caller, model=DEMO):
    """By ceiling: what its gauge has."""
    plan = limits.plans.find(caller, model)
    readings = limits.local.readings(plan.rules)
    return {f"{rule.scope} {rule.limit}": readings[2 * index] for index, rule in enumerate(plan.rules)}


async def ask(limits, caller, num_prompt_tokens=10, max_completion_tokens=50, request_id="r", delivered=20):
    """A request from its beginning to its end."""
    async with limits.admit(caller, DEMO, num_prompt_tokens, max_completion_tokens, request_id) as ticket:
        ticket.settle(Usage(num_prompt_tokens, 0, delivered))


DOLLAR = Price(prompt=Decimal(1), cached_prompt=Decimal("0.5"), completion=Decimal(2), request=Decimal("0.00001"))
"""A micro-unit a prompt token, two a completion token, ten a request."""


def a_spender(amount, hard=True, **budget):
    return a_caller(a_policy(budget=Budget(Decimal(amount), "day", hard, **budget), price=DOLLAR))


async def spend(rooms, tenant_id, micros, at, kind="req", named_at=None, key_id="key_1"):
    """A row of the ledger, as of a request that came at that time, and had its id then or before."""
    row = an_entry(
        request_id=f"{kind}_{(1000 * (at if named_at is None else named_at) << 80) + next(_numbers):032x}",
        tenant_id=tenant_id,
        key_id=key_id,
        created_at=at,
        cost_micros=micros,
    )
    writer = writer_for(rooms)
    await writer.write([row])
    await writer.close()
