"""Where the ledger's rows are sent as events that others bill by, as the settings say it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from policies.pricing import quantities
from policies.terms import Usage

Kind = Literal["stripe", "cloudevents", "lago", "webhook"]
Measure = Literal[
    "prompt", "cached_prompt", "completion", "reasoning", "cache_hit", "request", "engine_us", "cost_micros"
]
"""What one event counts: what is priced (``pricing.Kind``), or the row's whole cost."""
MEASURES: tuple[Measure, ...] = get_args(Measure)

MAX_SINKS = 8
"""Each may hold two connections to the database at once."""
BY_METADATA = "metadata."
BY_TENANT = ("tenant_id", "tenant_name")
NAME = re.compile(r"[a-z0-9_-]{1,63}")
VARIABLE_PATTERN = r"^([A-Za-z_][A-Za-z0-9_]*)?$(?!\n)"


class Sink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One receiver."""

    kind: Kind
    url: Annotated[str, Meta(max_length=2048)] = ""
    """The whole address that events are posted to; empty: the one of Stripe or Lago."""
    key_variable: Annotated[str, Meta(max_length=256, pattern=VARIABLE_PATTERN)] = ""
    """The environment variable that holds the API key, or the secret of a webhook's signatures."""
    customer: Annotated[str, Meta(max_length=128)] = "tenant_id"
    """Whose usage it is, in the receiver's words: tenant_id, tenant_name, or metadata.NAME, an entry of the tenant's
    metadata. Rows of a tenant without one are passed over."""
    meters: dict[Measure, Annotated[str, Meta(min_length=1, max_length=100)]] = {}
    """The event's name (Stripe), type (CloudEvents) or code (Lago) for each measure that is sent; a webhook is sent the
    whole row."""
    since: datetime.date | None = None
    """Rows settled before that day (UTC) are passed over; None: all rows of the ledger are sent."""
    source: Annotated[str, Meta(min_length=1, max_length=100)] = "penstock"
    """Of CloudEvents."""
    timeout_s: Annotated[float, Meta(gt=0, le=300)] = 15.0
    """Of one post."""


def faults_of(sinks: Mapping[str, Sink]) -> Iterator[tuple[str, str]]:
    """The path of what cannot be, and what is wrong with it."""
    if len(sinks) > MAX_SINKS:
        yield "sinks", f"there are {len(sinks)}, and there may be {MAX_SINKS}"
    seen: dict[tuple[str, str, str], str] = {}
    for name, sink in sinks.items():
        where = f"sinks.{name}"
        if not NAME.fullmatch(name):
            yield where, "a sink's name has small letters, digits, - and _, and 63 of them at most"
        entry = sink.customer.removeprefix(BY_METADATA)
        if sink.customer not in BY_TENANT and (entry == sink.customer or not 1 <= len(entry) <= 64):
            yield f"{where}.customer", "must be tenant_id, tenant_name or metadata.NAME"
        if not sink.url and sink.kind in ("cloudevents", "webhook"):
            yield f"{where}.url", f"is required for {sink.kind}"
        if not sink.key_variable and sink.kind != "cloudevents":
            yield f"{where}.key_variable", f"is required for {sink.kind}"
        if sink.kind == "webhook" and sink.meters:
            yield f"{where}.meters", "a webhook is sent the whole row"
        if sink.kind != "webhook" and not sink.meters:
            yield f"{where}.meters", f"is required for {sink.kind}; there are the measures {', '.join(MEASURES)}"
        # They would have the same ids, and the receiver would take the second for a repetition of the first.
        for measure in sink.meters or ("row",):
            other = seen.setdefault((sink.kind, sink.url, measure), name)
            if other != name and sink.kind != "webhook":
                yield where, f"sends {measure} to where sinks.{other} does"


def amounts(
    usage: Usage, cache_outcome: str, engine_us: int, num_requests: int, cost_micros: int
) -> dict[Measure, int]:
    """What a row has of each measure, without what it has none of."""
    found: dict[Measure, int] = {}
    for kind, amount in quantities(usage, cache_outcome, engine_us, num_requests).items():
        found["engine_us" if kind == "engine_second" else kind] = amount
    if cost_micros:
        found["cost_micros"] = cost_micros
    return found
