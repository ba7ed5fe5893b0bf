"""`penstock usage` and `penstock requests`: the ledger, added up or row by row."""

from __future__ import annotations

from typing import Any

import click

from gateway.client import CallFailed
from gateway.terminal import tables
from gateway.terminal.administration import Administration, Thing
from gateway.terminal.options import administers, busy, by_name, json_option, tenant_named, tenant_names, told, unix_s

WORDS = {
    "tenant": "tenant_id",
    "key": "key_id",
    "model": "model",
    "endpoint": "endpoint",
    "class": "sla_class",
    "tier": "service_tier",
    "cache": "cache",
    "prices": "price_version",
}
"""What people say, and what the API says."""
BUCKETS = ("minute", "hour", "day")
COUNTS = ("num_requests", "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "engine_us", "cost_micros")
NUMBERS = [
    tables.count("requests", "num_requests"),
    tables.count("prompt", "num_prompt_tokens"),
    tables.count("of it cached", "num_cached_tokens"),
    tables.count("completion", "num_completion_tokens"),
    tables.Column("engine", lambda line: f"{line['engine_us'] / 1e6:,.2f} s", "right"),
    tables.money("cost", "cost_micros"),
]
ROWS = [
    tables.instant("began", "created_at"),
    tables.text("request", "request_id"),
    tables.text("tenant", "tenant_id"),
    tables.text("model", "model"),
    tables.text("class", "sla_class"),
    tables.text("status", "status"),
    tables.text("cache", "cache"),
    tables.count("prompt", "num_prompt_tokens"),
    tables.count("completion", "num_completion_tokens"),
    tables.milliseconds("TTFT", "ttft_ms"),
    tables.milliseconds("whole", "duration_ms"),
    tables.money("cost", "cost_micros"),
]


def _words(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    """The words after --by, in the API's terms and with the length of spans among them."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in WORDS and word not in BUCKETS:
            raise click.BadParameter(f"there is no {word!r}; it knows {', '.join([*WORDS, *BUCKETS])}.")
    if len(set(words)) < len(words) or len(set(words) & set(BUCKETS)) > 1:
        raise click.BadParameter("each word once, and at most one of minute, hour and day.")
    return words


@click.command()
@click.option("--since", callback=unix_s, default="30d", show_default=True, help='From then on: a day, or "12h" ago.')
@click.option("--until", callback=unix_s, help="Until then [now].")
@click.option(
    "--by", callback=_words, default="tenant,model", show_default=True, help=", ".join([*WORDS, *BUCKETS]) + "."
)
@click.option("--tenant", help="Of this one alone, by name or id.")
@click.option("--model", help="Of this one alone.")
@json_option
@administers
def usage(
    admin: Administration,
    since: int,
    until: int | None,
    by: list[str],
    tenant: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Add up what was used and what it cost. `penstock export` writes files for those who pay."""
    spans = [word for word in by if word in BUCKETS]
    words = [word for word in by if word in WORDS]
    asked: Thing = {
        "since": since,
        "until": until,
        "bucket": spans[0] if spans else "day",
        "group_by": ",".join(WORDS[word] for word in words) or None,
        "tenant_id": None if tenant is None else tenant_named(admin, tenant)["id"],
        "model": model,
    }
    with busy("Adding up"):
        lines = _added_up(admin, asked, bool(spans))
        names = tenant_names(admin) if "tenant" in words else {}
    for line in lines:
        if "tenant" in words:
            line["tenant_name"] = names.get(line["group"]["tenant_id"])
    if as_json:
        told(lines)
        return
    columns = [tables.instant(spans[0], "starts_at")] if spans else []
    columns += [_word(word) for word in words]
    tables.shown(lines, [*columns, *NUMBERS], "Nothing was used in that time.")


def _word(word: str) -> tables.Column:
    if word == "tenant":
        return tables.Column(word, lambda line: line["tenant_name"] or line["group"]["tenant_id"])
    return tables.Column(word, lambda line: line["group"][WORDS[word]])


def _added_up(admin: Administration, asked: Thing, by_span: bool) -> list[Thing]:
    """Usage and costs of one question, line by line; over all spans unless they are asked for."""
    lines: dict[Any, Thing] = {}
    currency = admin.get("costs", **{**asked, "limit": 1})["currency"]
    for part in ("usage", "costs"):
        for line in _every(admin, part, asked):
            starts_at = line["starts_at"] if by_span else None
            added = lines.setdefault((starts_at, *line["group"].values()), dict.fromkeys(COUNTS, 0))
            added |= {"starts_at": starts_at, "group": line["group"], "currency": currency}
            for name in COUNTS:
                added[name] += line.get(name, 0)
    if by_span:
        return list(lines.values())
    return sorted(lines.values(), key=lambda line: (-line["cost_micros"], -line["num_requests"]))


def _every(admin: Administration, part: str, asked: Thing) -> list[Thing]:
    return list(admin.every(part, **asked))


@click.command(short_help="List what the ledger has of requests, or of one.")
@click.argument("request_id", required=False)
@click.option("--tenant", help="Of this one, by name or id.")
@click.option("--key", help="Of this one, by its id.")
@click.option("--model", help="Of this one.")
@click.option("--since", callback=unix_s, help='Settled from then on: a day, or "12h" ago.')
@click.option("--until", callback=unix_s, help="Settled before then.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="The newest so many.")
@json_option
@administers
def requests(
    admin: Administration,
    request_id: str | None,
    tenant: str | None,
    key: str | None,
    model: str | None,
    since: int | None,
    until: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """List what the ledger has of requests, the newest first; or all it has of REQUEST_ID."""
    found = list(
        admin.every(
            "ledger",
            "rows",
            most=limit,
            order="desc",
            request_id=request_id,
            tenant_id=None if tenant is None else tenant_named(admin, tenant)["id"],
            key_id=key,
            model=model,
            since=since,
            until=until,
        )
    )
    if request_id is not None and not found:
        raise CallFailed(f"The ledger has no request {request_id}.")
    if as_json:
        told(found)
    elif request_id is None:
        tables.shown(by_name(admin, found), ROWS, "The ledger has no such request.")
    else:
        for row in found:
            tables.facts(row, [tables.text(name, name) for name in row])
