"""`penstock keys`: what tenants call the gateway with."""

from __future__ import annotations

import json

import click

from gateway.terminal import tables
from gateway.terminal.administration import Administration, Thing
from gateway.terminal.options import administers, by_name, json_option, later_unix_s, tenant_named, told, yes_option
from gateway.terminal.tenants import stand

COLUMNS = [
    tables.text("id", "id"),
    tables.text("name", "name"),
    tables.text("tenant", "tenant_id"),
    tables.Column("key", lambda key: f"{key['prefix']}…{key['last_four']}"),
    tables.Column("good for", lambda key: ", ".join((key["scopes"] or {}).get("endpoints") or ()) or "everything"),
    tables.instant("made", "created_at"),
    tables.instant("expires", "expires_at"),
    tables.instant("revoked", "revoked_at"),
]


@click.group(short_help="List, make, rotate and revoke keys of tenants.")
def keys() -> None:
    """List, make, rotate and revoke keys of tenants; KEY is an id, such as key_..."""


@keys.command(name="list")
@click.option("--tenant", help="Of this one, by name or id.")
@click.option("--revoked/--valid", default=None, help="Those alone.")
@json_option
@administers
def list_(admin: Administration, tenant: str | None, revoked: bool | None, as_json: bool) -> None:
    """List keys."""
    owner = None if tenant is None else tenant_named(admin, tenant)["id"]
    found = list(admin.every("keys", tenant_id=owner, revoked=revoked))
    told(found) if as_json else tables.shown(by_name(admin, found), COLUMNS, "There are no keys like that.")


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
@click.option("--narrowing", help="What it may do less than its tenant, a JSON document.")
@json_option
@administers
def create(
    admin: Administration,
    tenant: str,
    name: str,
    endpoints: tuple[str, ...],
    networks: tuple[str, ...],
    expires: int | None,
    narrowing: str | None,
    as_json: bool,
) -> None:
    """Make a key. It is printed here, and can never be read again."""
    body: Thing = {"tenant_id": tenant_named(admin, tenant)["id"], "name": name, "networks": networks}
    if endpoints:
        body["scopes"] = {"endpoints": endpoints}
    if narrowing is not None:
        try:
            body["narrowing"] = json.loads(narrowing)
        except ValueError as error:
            raise click.BadParameter(f"is no JSON: {error}", param_hint="--narrowing") from None
    _hand_over(admin.post("keys", body={**body, "expires_at": expires}), as_json)


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
