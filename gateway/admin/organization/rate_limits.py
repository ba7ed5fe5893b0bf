"""The rate limits of a project, one for each model: its policy's ``model_limits``, in OpenAI's words.

Other projects may have the same policy, so the first limit that is set here gives the project a policy of its own, a
copy of the one that it had, named "project:" and its id; each further one makes a new version of that.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin import policies, tenants
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Nothing
from gateway.admin.organization import projects
from gateway.admin.organization.shapes import Listing, OpenAIEndpoint, check_belongs, ours
from gateway.admin.problems import Conflict, NotThere
from gateway.admin.words import Written
from gateway.openai.pages import ends_of
from policies.policy import ANY, Ceiling, Policy

PATH = projects.ONE + "/rate_limits"
PREFIX = "rl-"
NO_CEILING = 1_000_000_000_000
"""Where there is no limit: OpenAI's shape wants a number, and no request comes near this one."""
NOTE = "rate limit of {model}"
RateLimitId = Annotated[str, Meta(min_length=1, max_length=512)]
"""``PREFIX`` and a model, which may be called anything."""


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of the project on one model."""

    id: str
    model: str
    max_requests_per_1_minute: int
    max_tokens_per_1_minute: int
    object: str = "project.rate_limit"


class RateLimitQuery(Written, frozen=True, kw_only=True):
    """As of every list."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    after: RateLimitId | None = None
    before: RateLimitId | None = None


class RateLimitChange(Written, frozen=True, kw_only=True):
    """What is to change. What is null is not limited here."""

    max_requests_per_1_minute: Ceiling | None = None
    max_tokens_per_1_minute: Ceiling | None = None
    max_requests_per_1_day: None = None
    max_images_per_1_minute: None = None
    max_audio_megabytes_per_1_minute: None = None
    batch_1_day_max_input_tokens: None = None


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit log says of it."""

    tenant_id: str
    model: str
    max_requests_per_1_minute: int
    max_tokens_per_1_minute: int


async def every(ask: Ask[RateLimitQuery, Nothing]) -> Listing[RateLimit]:
    """List the rate limits of a project, one for each model that it may use."""
    async with ask.reading() as connection:
        tenant = await tenants.found(connection, ask.named("project_id"))
        policy = (await policies.found(connection, tenant.policy)).document
    query = ask.query
    models = [
        model
        for model in _models(ask, policy)
        if (query.after is None or model > query.after.removeprefix(PREFIX))
        and (query.before is None or model < query.before.removeprefix(PREFIX))
    ]
    shown = models[: query.limit] if query.before is None else models[-query.limit :]
    limits = [shaped(policy, model) for model in shown]
    first_id, last_id = ends_of(limits)
    return Listing(limits, first_id, last_id, len(models) > len(limits))


async def update(ask: Ask[Nothing, RateLimitChange], change: Change) -> RateLimit:
    """Set the rate limit of a project on one model."""
    tenant = await projects.active(change, ask.named("project_id"))
    policy = (await policies.found(change.connection, tenant.policy)).document
    rate_limit_id = ask.named("rate_limit_id")
    model = rate_limit_id.removeprefix(PREFIX)
    check_belongs(rate_limit_id.startswith(PREFIX) and model in _models(ask, policy), "rate limit")
    limits = policy.limits_on(model)
    if (requests := ask.body.max_requests_per_1_minute) is not None:
        limits = msgspec.structs.replace(limits, requests_per_minute=requests)
    if (tokens := ask.body.max_tokens_per_1_minute) is not None:
        limits = msgspec.structs.replace(limits, tokens_per_minute=tokens)
    document = msgspec.structs.replace(policy, model_limits={**policy.model_limits, model: limits})
    await _give(ask, change, tenant, document, NOTE.format(model=model))
    before, after = (_recorded(tenant, shaped(each, model)) for each in (policy, document))
    await change.record("rate_limit.updated", "rate_limit", rate_limit_id, before, after)
    return shaped(document, model)


def shaped(policy: Policy, model: str) -> RateLimit:
    limits = policy.limits_on(model)
    return RateLimit(
        id=PREFIX + model,
        model=model,
        max_requests_per_1_minute=limits.requests_per_minute or NO_CEILING,
        max_tokens_per_1_minute=limits.tokens_per_minute or NO_CEILING,
    )


async def _give(ask: Ask[Any, Any], change: Change, tenant: tenants.Tenant, document: Policy, note: str) -> None:
    """The document, to this project and to no other. Raises Conflict."""
    name = f"project:{tenant.id}"
    columns = store.tenants.c
    others = sa.select(columns.id).where(columns.policy == name, columns.id != tenant.id).limit(1)
    if (other := (await change.connection.execute(others)).scalar()) is not None:
        raise Conflict(
            f"The policy {name} is that of the project {other} as well; give that one another policy first, or change"
            " the policy itself by PUT /admin/v1/policies."
        )
    try:
        await policies.update(ours(ask, policies.NewDocument(document=document, note=note), name=name), change)
    except NotThere:
        await policies.create(ours(ask, policies.NewPolicy(name=name, document=document, note=note)), change)
    if tenant.policy != name:
        await tenants.update(ours(ask, tenants.TenantChange(policy=name), tenant_id=tenant.id), change)


def _models(ask: Ask[Any, Any], policy: Policy) -> list[str]:
    """Those that are served and those that the policy names, without those that it forbids; sorted."""
    return sorted(model for model in {*ask.gw.settings.models, *policy.model_limits} - {ANY} if policy.may_use(model))


def _recorded(tenant: tenants.Tenant, limit: RateLimit) -> Recorded:
    return Recorded(
        tenant_id=tenant.id,
        model=limit.model,
        max_requests_per_1_minute=limit.max_requests_per_1_minute,
        max_tokens_per_1_minute=limit.max_tokens_per_1_minute,
    )


ENDPOINTS = [
    OpenAIEndpoint("GET", PATH, every, Listing[RateLimit], READERS, query=RateLimitQuery),
    OpenAIEndpoint("POST", PATH + "/{rate_limit_id}", update, RateLimit, OPERATORS, body=RateLimitChange, changes=True),
]
