"""What a tenant may do, as a document: limits, budget, SLA class, caches, models, prices; and how a key narrows it.

A policy has a name; changing it makes a new version, and a request keeps the version that admitted it. A key's
narrowing is a document of the same words: each of them can only take away, and a request is judged by both
(``narrowed``). Every number here is a ceiling on one thing that a tenant does; None means no ceiling.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Ceiling = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$(?!\n)")]
Money = Annotated[Decimal, Meta()]
"""In units of the currency of [billing], with at most six digits after the point; ``pricing`` checks and converts."""
ANY = "*"
"""Every model, where a model is named."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of everything that operators write."""


class Limits(Document, frozen=True):
    """Ceilings over windows that slide: at no moment have the last 60 s (the last day) held more than this."""

    requests_per_minute: Ceiling | None = None
    tokens_per_minute: Ceiling | None = None
    """Prompt and completion together; tokens found in a cache count like any other prompt token."""
    tokens_per_day: Ceiling | None = None
    concurrent_requests: Ceiling | None = None


class Budget(Document, frozen=True):
    """Money for a calendar period in UTC."""

    amount: Money
    period: Literal["day", "week", "month"] = "month"
    hard: bool = True
    """Spent means refused, and a stream ends with what is left; soft: only alerts."""
    alerts_at: Annotated[tuple[Annotated[float, Meta(gt=0, le=10)], ...], Meta(max_length=16)] = (0.8, 1.0)
    """Shares of the amount; each is told once a period."""


class Cache(Document, frozen=True):
    """Which answers may be given twice, and who shares them."""

    exact: Literal["off", "deterministic", "all"] = "deterministic"
    """Deterministic: temperature 0 or a seed."""
    ttl_s: Annotated[int, Meta(ge=1, le=31_536_000)] = 3600
    sharing_group: Annotated[str, Meta(max_length=64)] = ""
    """Tenants that name the same group share exact answers; empty: nobody but the tenant itself."""
    prefix_group: Annotated[str, Meta(max_length=64)] = ""
    """The same for the KV of common prefixes."""


class Price(Document, frozen=True):
    """Of one model, in the currency: a million tokens of each kind, a request, and a second of the engine."""

    prompt: Money = Decimal(0)
    cached_prompt: Money | None = None
    """None: as ``prompt``."""
    completion: Money = Decimal(0)
    reasoning: Money | None = None
    """None: as ``completion``."""
    cache_hit: Money = Decimal(0)
    """A million tokens, prompt and completion together, of an answer from the exact cache."""
    request: Money = Decimal(0)
    """One request, answered from a cache or not."""
    engine_second: Money = Decimal(0)
    """A request's share of the steps that it was in. It is known when the request ends, so by the seconds of those that
    are open a hard budget can be overspent."""


class Policy(Document, frozen=True):
    """One version of a policy; which one is said by whoever holds it."""

    limits: Limits = Limits()
    """Of the tenant as a whole."""
    key_limits: Limits = Limits()
    """Of each of its keys."""
    model_limits: dict[str, Limits] = {}
    """Of the tenant on one model; "*" for each that is not named."""
    budget: Budget | None = None
    key_budget: Budget | None = None
    """Of each of its keys that has none of its own, beside the tenant's."""
    sla_class: Name = "standard"
    """The class of a request that asks for none."""
    sla_classes: tuple[Name, ...] = ("interactive", "standard", "batch")
    """The classes it may ask for by ``service_tier``; ``sla_class`` is always among them."""
    models: tuple[str, ...] = (ANY,)
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Share among the tenants of one class."""
    cache: Cache = Cache()
    prices: dict[str, Price] = {}
    """By model; "*" for each that is not named. They go before the price list."""
    discount: Money = Decimal(0)
    """Share of every price that this policy's tenants do not pay: 0.1 is 10 % less; at most four digits."""
    batch_discount: Money = Decimal("0.5")
    """Share of what is left of each price that the lines of a batch do not pay."""
    store_responses: bool = True
    """Responses and chats are kept as they ask; false: none is, so no response can be gone on from or be written in the
    background, and there are no conversations."""
    trace_content: bool = False
    """Prompts and answers are in traces, where ``tracing.content`` says so, too."""
    without_redis: Literal["refuse", "divide"] = "divide"
    """While shared limits cannot be reached: refuse, or hold to the limits divided by the number of gateways."""

    def may_use(self, model: str) -> bool:
        return ANY in self.models or model in self.models

    def limits_on(self, model: str) -> Limits:
        """The tenant's on this model."""
        return self.model_limits.get(model) or self.model_limits.get(ANY) or NO_LIMITS


class Narrowing(Document, frozen=True):
    """What a key takes away from its tenant's policy; None leaves a word as it is."""

    limits: Limits = Limits()
    """Of this key alone."""
    budget: Budget | None = None
    """Money of this key and of those that it is rotated into, beside the tenant's own budget and instead of the
    policy's for its keys."""
    sla_class: Name | None = None
    sla_classes: tuple[Name, ...] | None = None
    models: tuple[str, ...] | None = None
    exact_cache: Literal["off"] | None = None


NO_LIMITS = Limits()
FREE = Price()


def narrowed(policy: Policy, narrowing: Narrowing) -> Policy:
    """The policy as a key with this narrowing has it. Whatever would widen it has no effect, so a policy that became
    stricter after the key was made holds for that key too."""
    key_limits = tightest(policy.key_limits, narrowing.limits)
    classes = policy.sla_classes
    if narrowing.sla_classes is not None:
        classes = tuple(name for name in classes if name in narrowing.sla_classes)
    sla_class = policy.sla_class
    if narrowing.sla_class is not None and narrowing.sla_class in (*policy.sla_classes, policy.sla_class):
        sla_class = narrowing.sla_class
    models = policy.models
    if narrowing.models is not None:
        models = narrowing.models if ANY in models else tuple(name for name in narrowing.models if name in models)
        if ANY in narrowing.models:
            models = policy.models
    cache = policy.cache
    if narrowing.exact_cache is not None:
        cache = msgspec.structs.replace(cache, exact="off")
    return msgspec.structs.replace(
        policy,
        key_limits=key_limits,
        key_budget=narrowing.budget or policy.key_budget,
        sla_classes=classes,
        sla_class=sla_class,
        models=models,
        cache=cache,
    )


def widened(policy: Policy, narrowing: Narrowing) -> list[str]:
    """The fields of ``narrowing`` that ask for more than ``policy`` gives, by their path; empty when it only takes
    away."""
    fields = [
        f"limits.{name}"
        for name in Limits.__struct_fields__
        if (asked := getattr(narrowing.limits, name)) is not None
        and (given := getattr(policy.key_limits, name)) is not None
        and asked > given
    ]
    allowed = {*policy.sla_classes, policy.sla_class}
    if narrowing.sla_class is not None and narrowing.sla_class not in allowed:
        fields.append("sla_class")
    if narrowing.sla_classes is not None and not allowed.issuperset(narrowing.sla_classes):
        fields.append("sla_classes")
    if narrowing.models is not None and not all(policy.may_use(model) for model in narrowing.models):
        fields.append("models")
    return fields


def tightest(one: Limits, other: Limits) -> Limits:
    """Both at once."""
    return Limits(
        **{
            name: min(both)
            for name in Limits.__struct_fields__
            if (both := [value for value in (getattr(one, name), getattr(other, name)) if value is not None])
        }
    )
