"""`penstock keys`: what tenants call the gateway with."""

from __future__ import annotations

import json

import click

from gateway.terminal import tables
from gateway.terminal.administration import Administration, Refused, Thing
from gateway.terminal.options import administers, by_name, json_option, later_unix_s, tenant_named, told, yes_option
from gateway.terminal.tenants import stand


def _budget(key: Thing) -> str | None:
    """What is used of it as well, where that was asked."""
    if (standing := key.get("standing")) is None:
        own = (key["narrowing"] or {}).get("budget")
        return own and f"{own['amount']} a {own.get('period', 'month')}"
    used, whole = (tables.amount(standing[name], standing["currency"]) for name in ("used_micros", "amount_micros"))
    return f"{used} of {whole} a {standing['period']}"


COLUMNS = [
    tables.text("id", "id"),
    tables.text("name", "name"),
    tables.text("tenant", "tenant_id"),
    tables.Column("key", lambda key: f"{key['prefix']}…{key['last_four']}"),
    tables.Column("good for", lambda key: ", ".join((key["scopes"] or {}).get("endpoints") or ()) or "everything"),
    tables.Column("budget", _budget),
    tables.instant("made", "created_at"),
    tables.instant("expires", "expires_at"),
    tables.instant("revoked", "revoked_at"),
]


def _document(context: click.Context, parameter: click.Parameter, text: str | None) -> object:
    """For an option that is a JSON document."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}") from None


def _end(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """As ``later_unix_s``; 0: never."""
    return 0 if text == "never" else later_unix_s(context, parameter, text)


@click.group(short_help="List, make, change, rotate and revoke keys of tenants.")
def keys() -> None:
    """List, make, change, rotate and revoke keys of tenants; KEY is an id, such as key_..."""


@keys.command(name="list")
@click.option("--tenant", help="Of this one, by name or id.")
@click.option("--revoked/--valid", default=None, help="Those alone.")
@json_option
@administers
def list_(admin: Administration, tenant: str | None, revoked: bool | None, as_json: bool) -> None:
    """List keys."""
    owner = None if tenant is None else tenant_named(admin, tenant)["id"]
    found = list(admin.every("keys", tenant_id=owner, revoked=revoked))
    if as_json:
        told(found)
        return
    spent: dict[str, Thing] = {}
    try:
        budgets = admin.every("key_budgets", tenant_id=owner, revoked=revoked)
        spent = {each["key_id"]: each["budget"] for each in budgets}
    except Refused as error:
        if error.status != 503:  # while limits cannot be reached, the keys can
            raise
    named = [{**key, "standing": spent.get(key["id"])} for key in by_name(admin, found)]
    tables.shown(named, COLUMNS, "There are no keys like that.")


@keys.command()
@click.argument("key")
@json_option
@administers
def show(admin: Administration, key: str, as_json: bool) -> None:
    """Show what is kept of a key, which is not the key itself."""
    _tell(admin.get("keys", key), as_json)


@keys.command()
@click.option("--tenant", required=True, help="Whose it is, by name or id.")
@click.option("--name", required=True, help="What it is for.")
@click.option("--endpoint", "endpoints", multiple=True, help="What it is good for, such as chat.completions [all].")
@click.option("--network", "networks", multiple=True, metavar="CIDR", help="Where it may be used from [anywhere].")
@click.option("--expires", callback=later_unix_s, help='When it ends: a day, or in "90d" [never].')
@click.option("--narrowing", callback=_document, help="What it may do less than its tenant, a JSON document.")
@json_option
@administers
def create(
    admin: Administration,
    tenant: str,
    name: str,
    endpoints: tuple[str, ...],
    networks: tuple[str, ...],
    expires: int | None,
    narrowing: object,
    as_json: bool,
) -> None:
    """Make a key. It is printed here, and can never be read again."""
    body: Thing = {"tenant_id": tenant_named(admin, tenant)["id"], "name": name, "networks": networks}
    if endpoints:
        body["scopes"] = {"endpoints": endpoints}
    if narrowing is not None:
        body["narrowing"] = narrowing
    _hand_over(admin.post("keys", body={**body, "expires_at": expires}), as_json)


@keys.command()
@click.argument("key")
@click.option("--name", help="What it is for from now on.")
@click.option("--endpoint", "endpoints", multiple=True, help='What it is good for, in place of what it was; "all".')
@click.option("--network", "networks", multiple=True, metavar="CIDR", help='Where it may be used from; "anywhere".')
@click.option("--expires", callback=_end, help='When it ends: a day, or in "90d", or "never".')
@click.option("--narrowing", callback=_document, help="In place of what there is, a JSON document; {} takes it away.")
@json_option
@administers
def update(
    admin: Administration,
    key: str,
    name: str | None,
    endpoints: tuple[str, ...],
    networks: tuple[str, ...],
    expires: int | None,
    narrowing: object,
    as_json: bool,
) -> None:
    """Change what a key may do, or when it ends."""
    changes: Thing = {} if name is None else {"name": name}
    if endpoints:
        changes["scopes"] = None if endpoints == ("all",) else {"endpoints": endpoints}
    if networks:
        changes["networks"] = () if networks == ("anywhere",) else networks
    if expires is not None:
        changes["expires_at"] = expires or None
    if narrowing is not None:
        changes["narrowing"] = None if narrowing == {} else narrowing
    if not changes:
        raise click.UsageError("nothing is to change: give --name, --endpoint, --network, --expires or --narrowing.")
    before = admin.get("keys", key)
    _tell(admin.patch("keys", key, body=changes, version=before["version"]), as_json)


@keys.command()
@click.argument("key")
@click.option("--overlap", "overlap_s", type=click.IntRange(0), default=86_400, show_default=True, help="Seconds.")
@json_option
@administers
def rotate(admin: Administration, key: str, overlap_s: int, as_json: bool) -> None:
    """Make a key that may do what KEY may, which ends after an overlap."""
    _hand_over(admin.post("keys", key, "rotate", body={"overlap_s": overlap_s}), as_json)


@keys.command()
@click.argument("key")
@yes_option
@json_option
@administers
def revoke(admin: Administration, key: str, yes: bool, as_json: bool) -> None:
    """End a key at once."""
    if not yes:
        named = admin.get("keys", key)
        click.confirm(f"Revoke {tables.printable(named['name'])} ({key}) for ever?", abort=True, err=True)
    _tell(admin.delete("keys", key), as_json)


@keys.command()
@click.argument("key")
@json_option
@administers
def limits(admin: Administration, key: str, as_json: bool) -> None:
    """Show what is used of every limit that holds for a key."""
    stand(admin.get("keys", key, "limits"), as_json)


def _hand_over(made: Thing, as_json: bool) -> None:
    """A new key: itself alone on standard output, so that a script can keep it."""
    if as_json:
        told(made)
        return
    click.echo(f"{made['id']}, {tables.printable(made['name'])}. The key is shown this once:", err=True)
    click.echo(made["key"])


def _tell(key: Thing, as_json: bool) -> None:
    told(key) if as_json else tables.facts(key, COLUMNS)
