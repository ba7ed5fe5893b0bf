"""Trying a policy before it counts: arrivals of the ledger, or posted ones, through the real policy code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import rotations, store, trials
from gateway.admin import policies
from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.admin.problems import Invalid, NotThere
from gateway.admin.words import Id, Instant, Written
from gateway.house import Gateway
from policies import faults, simulation
from policies.policy import Narrowing, Policy
from policies.simulation import MAX_ARRIVALS, Arrival, NarrowedKey, Outcome, Trial, WorkerModel

MAX_BODY_BYTES = 16 << 20
NUM_WEIGHTS = 7
AT_ONCE = 500
"""Keys named in one query."""


class Recorded(Written, frozen=True, kw_only=True):
    """Arrivals of the ledger: requests that were answered by computing, from an instant until before another."""

    since: Instant
    until: Instant
    tenant_id: Id | None = None
    """None: of all tenants, for they compete with each other."""


class Question(Written, frozen=True, kw_only=True):
    """What to try, and with which arrivals; ``recorded`` or ``arrivals``, not both."""

    document: Policy | None = None
    """What the policy would say; null: what the version below says."""
    version: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    """Null: the current one."""
    recorded: Recorded | None = None
    arrivals: Annotated[tuple[Arrival, ...], Meta(min_length=1, max_length=MAX_ARRIVALS)] | None = None
    """Their tenants by id or name. The policy is tried on those that have it, and on those that do not exist; the
    others keep theirs. Keys that are named by their ids are narrowed as they are now."""
    workers: Annotated[dict[str, WorkerModel], Meta(min_length=1, max_length=64)] | None = None
    """By model; null: the workers that are ready now, at the speed that they report."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What would have happened; costs are in millionths of ``currency``, at the prices that are in force now."""

    policy: str
    version: int | None
    """Null: a document that was posted."""
    currency: str
    workers: dict[str, WorkerModel]
    outcome: Outcome


async def run(ask: Ask[Nothing, Question]) -> Answer:
    """Try a policy: what would have become of these requests under it."""
    body, gw, name = ask.body, ask.gw, ask.named("name")
    if (body.recorded is None) == (body.arrivals is None):
        raise Invalid.of(
            [("arrivals", "give either these or 'recorded'"), ("recorded", "give either this or 'arrivals'")]
        )
    if body.document is not None and body.version is not None:
        raise Invalid.of([("version", "is not for a document that is posted; leave one of them out")])
    async with ask.reading() as connection:
        tried = await _version(connection, name, body.version)
        arrivals = body.arrivals or await _recorded(connection, body.recorded)
        keys = await _keys(connection, {arrival.key for arrival in arrivals})
    candidate = tried.document if body.document is None else body.document
    if found := faults.of_policy(candidate, gw.settings.classes):
        raise Invalid.of((f"document.{path}", what) for path, what in found)
    workers = body.workers or _workers(gw)
    trial = Trial(
        arrivals=tuple(arrivals),
        policies=_policies(gw, name, candidate, {arrival.tenant for arrival in arrivals}),
        keys=keys,
        workers=workers,
        classes=gw.settings.classes,
        prices=tuple(gw.directory.prices.in_force(time.time())),
        completion_estimate=gw.settings.limits.completion_estimate,
        starts_at=0 if body.recorded is None else body.recorded.since,
    )
    if wrong := simulation.check(trial):
        raise Invalid.of((path, "keeps the trial from being run") for path in wrong)
    try:
        outcome = await gw.trials.run(trial)
    except trials.TooMuch as error:
        raise Invalid.of([("arrivals" if body.arrivals else "recorded", str(error))]) from None
    version = tried.version if body.document is None else None
    return Answer(policy=name, version=version, currency=gw.settings.billing.currency, workers=workers, outcome=outcome)


async def _version(connection: AsyncConnection, name: str, number: int | None) -> policies.PolicyVersion:
    current = await policies.found(connection, name)
    if number is None:
        return current
    try:
        return await policies.found(connection, name, number)
    except NotThere:
        raise Invalid.of([("version", f"the policy {name} has no version {number}")]) from None


async def _recorded(connection: AsyncConnection, asked: Recorded | None) -> Sequence[Arrival]:
    """Raises Invalid when there are none, or too many."""
    assert asked is not None
    columns = store.ledger.c
    query = sa.select(store.ledger).where(
        columns.created_at >= asked.since,
        columns.created_at < asked.until,
        columns.corrects.is_(None),
        columns.num_prompt_tokens > 0,
        columns.num_completion_tokens > 0,
        columns.cache.not_in(("hit", "shared")),
    )
    if asked.tenant_id is not None:
        query = query.where(columns.tenant_id == asked.tenant_id)
    rows = (await connection.execute(query.order_by(columns.request_id).limit(MAX_ARRIVALS + 1))).all()
    if not rows:
        raise Invalid.of([("recorded", "the ledger has no such request")])
    if len(rows) > MAX_ARRIVALS:
        raise Invalid.of([("recorded", f"these are more than {MAX_ARRIVALS} requests; ask about a shorter time")])
    return [_arrival(row, asked.since) for row in rows]


def _arrival(row: sa.Row[Any], since: int) -> Arrival:
    return Arrival(
        at_s=max(0.0, _at(row) - since),
        tenant=row.tenant_id,
        key=row.key_id,
        model=row.model,
        num_prompt_tokens=row.num_prompt_tokens,
        num_cached_tokens=row.num_cached_tokens,
        num_completion_tokens=row.num_completion_tokens,
        service_tier=row.service_tier if row.service_tier in ("default", "flex", "priority") else "auto",
    )


def _at(row: sa.Row[Any]) -> float:
    """Unix seconds, to the millisecond that a request's id begins with."""
    kind, _, number = row.request_id.partition("_")
    if kind == "req" and len(number) >= 32:
        return float(int(number[:32], 16) >> 80) / 1e3
    return float(row.created_at)


def _policies(gw: Gateway, name: str, candidate: Policy, tenants: set[str]) -> dict[str, Policy]:
    """By the names in the arrivals."""
    theirs = {known: tenant.policy_name for tenant in gw.directory.tenants() for known in (tenant.name, tenant.id)}
    kept = {tenant: gw.directory.policy(theirs[tenant]) for tenant in tenants if theirs.get(tenant, name) != name}
    return {tenant: candidate if (version := kept.get(tenant)) is None else version.policy for tenant in tenants}


async def _keys(connection: AsyncConnection, ids: set[str]) -> dict[str, NarrowedKey]:
    """Those of them that are narrowed, or that others were rotated into."""
    columns, named = store.keys.c, sorted(ids)
    found: list[tuple[str, str, str | None]] = []
    for start in range(0, len(named), AT_ONCE):
        query = sa.select(columns.id, columns.tenant_id, columns.narrowing).where(
            columns.id.in_(named[start : start + AT_ONCE]),
            sa.or_(columns.narrowing.is_not(None), columns.rotated_from.is_not(None)),
        )
        found += [(id, tenant_id, words) for id, tenant_id, words in await connection.execute(query)]
    known = await rotations.predecessors(connection, {tenant_id for _, tenant_id, _ in found})
    return {
        id: NarrowedKey(
            narrowing=msgspec.json.decode(words or "{}", type=Narrowing), purse_id=rotations.first(id, known)
        )
        for id, _, words in found
    }


def _workers(gw: Gateway) -> dict[str, WorkerModel]:
    """Those that are ready. Raises Invalid when there are none."""
    found = {}
    for model in gw.dispatch.models():
        ready = [worker for worker in gw.dispatch.workers_of(model.name) if worker.facts is not None]
        if not ready:
            continue
        facts, engine = ready[0].facts, gw.settings.models[model.name].engine
        assert facts is not None
        known = [worker.stats.cost_weights for worker in ready if worker.stats is not None]
        weights = next((tuple(one) for one in known if len(one) == NUM_WEIGHTS), None)
        values = {
            "replicas": len(ready),
            "block_size": facts.block_size,
            "num_blocks": facts.num_blocks,
            "max_sequences": facts.max_sequences,
            "max_step_tokens": engine.max_step_tokens,
            "max_prefill_tokens_beside_decodes": engine.max_prefill_tokens_beside_decodes,
            "max_slowdown": engine.max_slowdown,
            "max_preemptions": engine.max_preemptions,
            **({} if weights is None else {"weights": weights}),
        }
        try:
            found[model.name] = msgspec.convert(values, WorkerModel)
        except msgspec.ValidationError as error:
            raise Invalid.of([("workers", f"is required, as those of {model.name} cannot be tried: {error}")]) from None
    if not found:
        raise Invalid.of([("workers", "is required while no worker is ready")])
    return found


ENDPOINTS = [
    Endpoint(
        "POST",
        policies.PATH + "/{name}/trial",
        run,
        Answer,
        OPERATORS,
        body=Question,
        max_body_bytes=MAX_BODY_BYTES,
        limit_s=2 * trials.LIMIT_S,
    )
]
