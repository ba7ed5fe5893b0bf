"""`penstock tenants`: the teams that share the gateway."""

from __future__ import annotations

import click

from gateway.terminal import tables
from gateway.terminal.administration import Administration, Thing
from gateway.terminal.options import administers, json_option, pairs, tenant_named, told

COLUMNS = [
    tables.text("name", "name"),
    tables.text("id", "id"),
    tables.text("policy", "policy"),
    tables.instant("made", "created_at"),
    tables.instant("disabled", "disabled_at"),
]
STANDING = [
    tables.text("of", "scope"),
    tables.text("model", "model"),
    tables.text("limit", "limit"),
    tables.count("used", "used"),
    tables.count("ceiling", "ceiling"),
    tables.Column("left", lambda one: f"{one['remaining'] / one['ceiling']:.0%}", "right"),
    tables.Column(
        "unused in", lambda one: None if one["reset_ms"] is None else f"{one['reset_ms'] / 1e3:,.0f} s", "right"
    ),
]


@click.group()
def tenants() -> None:
    """List, make and change tenants; TENANT is a name or an id."""


@tenants.command(name="list")
@click.option("--policy", help="Those with this policy.")
@click.option("--disabled/--enabled", default=None, help="Those alone.")
@json_option
@administers
def list_(admin: Administration, policy: str | None, disabled: bool | None, as_json: bool) -> None:
    """List tenants."""
    found = list(admin.every("tenants", policy=policy, disabled=disabled))
    told(found) if as_json else tables.shown(found, COLUMNS, "There are no tenants like that.")


@tenants.command()
@click.argument("tenant")
@json_option
@administers
def show(admin: Administration, tenant: str, as_json: bool) -> None:
    """Show a tenant."""
    _tell(tenant_named(admin, tenant), as_json)


@tenants.command()
@click.argument("name")
@click.option("--policy", default="default", show_default=True)
@click.option("--metadata", multiple=True, metavar="NAME=TEXT", help="For people; more than once for more.")
@json_option
@administers
def create(admin: Administration, name: str, policy: str, metadata: tuple[str, ...], as_json: bool) -> None:
    """Make a tenant. `penstock keys create` makes it a key."""
    _tell(admin.post("tenants", body={"name": name, "policy": policy, "metadata": pairs(metadata)}), as_json)


@tenants.command()
@click.argument("tenant")
@click.option("--name", help="What it is called from now on.")
@click.option("--policy", help="What it goes by from now on.")
@click.option("--metadata", multiple=True, metavar="NAME=TEXT", help="In place of what there is.")
@json_option
@administers
def update(
    admin: Administration, tenant: str, name: str | None, policy: str | None, metadata: tuple[str, ...], as_json: bool
) -> None:
    """Change a tenant."""
    changes = {"name": name, "policy": policy, "metadata": pairs(metadata) or None}
    changes = {what: value for what, value in changes.items() if value is not None}
    if not changes:
        raise click.UsageError("nothing is to change: give --name, --policy or --metadata.")
    _change(admin, tenant, changes, as_json)


@tenants.command()
@click.argument("tenant")
@json_option
@administers
def disable(admin: Administration, tenant: str, as_json: bool) -> None:
    """Have none of a tenant's keys open anything, until it is enabled again."""
    _change(admin, tenant, {"disabled": True}, as_json)


@tenants.command()
@click.argument("tenant")
@json_option
@administers
def enable(admin: Administration, tenant: str, as_json: bool) -> None:
    """Have a tenant's keys work again."""
    _change(admin, tenant, {"disabled": False}, as_json)


@tenants.command()
@click.argument("tenant")
@json_option
@administers
def limits(admin: Administration, tenant: str, as_json: bool) -> None:
    """Show what a tenant has used of its limits and its budget."""
    stand(admin.get("tenants", tenant_named(admin, tenant)["id"], "limits"), as_json)


def stand(standing: Thing, as_json: bool) -> None:
    """How limits stand, of a tenant or of a key."""
    if as_json:
        told(standing)
        return
    click.echo(f"Policy {standing['policy']}, version {standing['policy_version']}.", err=True)
    tables.shown(standing["ceilings"], STANDING, "No limit counts anything.")
    for name, whose in (("budget", "Budget"), ("key_budget", "The key's budget")):
        if (budget := standing.get(name)) is not None:
            used, whole = (tables.amount(budget[name], budget["currency"]) for name in ("used_micros", "amount_micros"))
            soft = "" if budget["hard"] else " (soft)"
            click.echo(f"{whose} of the {budget['period']}: {used} of {whole} used{soft}.")


def _change(admin: Administration, tenant: str, changes: Thing, as_json: bool) -> None:
    before = tenant_named(admin, tenant)
    _tell(admin.patch("tenants", before["id"], body=changes, version=before["version"]), as_json)


def _tell(tenant: Thing, as_json: bool) -> None:
    told(tenant) if as_json else tables.facts(tenant, COLUMNS)
