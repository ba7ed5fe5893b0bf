"""`penstock policies`: what tenants may do, as documents of which every version is kept."""

from __future__ import annotations

import difflib
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from gateway.terminal import tables
from gateway.terminal.administration import Administration, Refused, Thing
from gateway.terminal.options import administers, busy, json_option, told, unix_s, yes_option

BY = tables.Column("by", lambda thing: thing["created_by_name"] or thing["created_by"])
COLUMNS = [
    tables.text("name", "name"),
    tables.count("version", "version"),
    tables.text("class", "sla_class"),
    tables.instant("since", "created_at"),
    BY,
    tables.text("note", "note"),
]
VERSIONS = [
    tables.count("version", "version"),
    tables.text("current", "current"),
    tables.instant("since", "created_at"),
    BY,
    tables.text("note", "note"),
]
file_argument = click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
note_option = click.option("--note", default="", help="Why, for whoever reads the versions.")


@click.group()
def policies() -> None:
    """List, edit, compare, try and roll back policies. FILE is JSON or TOML, or - for JSON on standard input."""


@policies.command(name="list")
@json_option
@administers
def list_(admin: Administration, as_json: bool) -> None:
    """List policies, each by its current version."""
    found = list(admin.every("policies"))
    rows = [{**one, "sla_class": one["document"].get("sla_class")} for one in found]
    told(found) if as_json else tables.shown(rows, COLUMNS, "There are no policies.")


@policies.command()
@click.argument("name")
@click.option("--version", type=click.IntRange(1), help="[the current one]")
@administers
def show(admin: Administration, name: str, version: int | None) -> None:
    """Print a policy's document, as `edit` and `create` take it."""
    told(_version(admin, name, version)["document"])


@policies.command()
@click.argument("name")
@json_option
@administers
def versions(admin: Administration, name: str, as_json: bool) -> None:
    """List all versions of a policy."""
    found = list(admin.every("policies", name, "versions"))
    told(found) if as_json else tables.shown(found, VERSIONS, "")


@policies.command()
@click.argument("name")
@file_argument
@note_option
@administers
def create(admin: Administration, name: str, file: Path, note: str) -> None:
    """Make a policy of a document."""
    _written(admin.post("policies", body={"name": name, "document": _read(file), "note": note}))


@policies.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@note_option
@administers
def edit(admin: Administration, name: str, file: Path | None, note: str) -> None:
    """Make a new version, of FILE or in your editor; it counts at once. `try` shows before what it would do."""
    before = _version(admin, name, None)
    if file is not None:
        _written(_put(admin, before, _read(file), note))
        return
    old = _pretty(before["document"])
    text = old
    while True:
        edited = click.edit(text, extension=".json")
        if edited is None or edited.strip() == old.strip():
            click.echo("Nothing was changed.", err=True)
            return
        try:
            _written(_put(admin, before, _decoded(edited), note))
            return
        except (click.ClickException, Refused) as error:
            said = error.message if isinstance(error, click.ClickException) else str(error)
            click.echo(said, err=True)
            if isinstance(error, Refused) and error.status != 400:
                raise
            click.confirm("Edit it again?", default=True, abort=True, err=True)
            text = edited


@policies.command()
@click.argument("name")
@click.argument("older", type=click.IntRange(1), required=False)
@click.argument("newer", type=click.IntRange(1), required=False)
@click.option("--file", type=click.Path(path_type=Path, allow_dash=True), help="Compare with this document instead.")
@administers
def diff(admin: Administration, name: str, older: int | None, newer: int | None, file: Path | None) -> None:
    """Compare two versions of a policy [the one before the current one, and the current one]."""
    second: Thing = {"version": str(file), "document": _read(file)} if file else _version(admin, name, newer)
    if older is None and file is None:
        older = max(1, second["version"] - 1)
    first = _version(admin, name, older)
    lines = difflib.unified_diff(
        _pretty(first["document"]).splitlines(),
        _pretty(second["document"]).splitlines(),
        f"{name} {first['version']}",
        f"{name} {second['version']}",
        lineterm="",
    )
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        click.secho(tables.printable(line), fg=colours.get(line[0]))


@policies.command(name="try")
@click.argument("name")
@file_argument
@click.option("--since", callback=unix_s, default="24h", show_default=True, help="Recorded requests from then on.")
@click.option("--until", callback=unix_s, help="Until then [now].")
@json_option
@administers
def try_(admin: Administration, name: str, file: Path, since: int, until: int | None, as_json: bool) -> None:
    """Show what recorded requests would have met under a document, beside what they would have met under the current
    version. Nothing is changed."""
    now = int(time.time()) + 1  # this second counts too
    document, recorded = _read(file), {"since": since, "until": until or now}
    with busy("Trying the current version"):
        before = admin.post("policies", name, "trial", body={"recorded": recorded})
    with busy("Trying the document"):
        after = admin.post("policies", name, "trial", body={"recorded": recorded, "document": document})
    if as_json:
        told({"before": before, "after": after})
        return
    tables.shown(_compared(before, after), COMPARED, "")


COMPARED = [
    tables.Column("", lambda row: row[0]),
    tables.Column("now", lambda row: row[1], "right"),
    tables.Column("then", lambda row: row[2], "right"),
]


def _compared(before: Thing, after: Thing) -> list[tuple[str, str, str]]:
    """What a person looks at, for everything and for each class."""
    currency = before["currency"]
    numbers: list[tuple[str, Callable[[Thing], str]]] = [
        ("requests", lambda part: f"{part['num_requests']:,}"),
        ("answered", lambda part: f"{part['num_admitted']:,}"),
        ("refused", lambda part: f"{sum(part['refused'].values()):,}"),
        ("TTFT, median", lambda part: f"{part['ttft_ms']['p50']:,.0f} ms"),
        ("TTFT, 99 of 100", lambda part: f"{part['ttft_ms']['p99']:,.0f} ms"),
        ("TPOT, median", lambda part: f"{part['tpot_ms']['p50']:,.1f} ms"),
        ("cost", lambda part: tables.amount(part["cost_micros"], currency)),
    ]
    promises: list[tuple[str, Callable[[Thing], str]]] = [
        ("TTFT as promised", lambda part: f"{part['ttft_attainment']:.1%}"),
        ("TPOT as promised", lambda part: f"{part['tpot_attainment']:.1%}"),
    ]
    now, then = before["outcome"], after["outcome"]
    rows = [(title, number(now["total"]), number(then["total"])) for title, number in numbers]
    for name in sorted({*now["classes"], *then["classes"]}):
        parts = now["classes"].get(name), then["classes"].get(name)
        if not any(part is not None and part["num_requests"] for part in parts):
            continue
        for title, number in (*numbers, *promises):
            values = ["-" if part is None else number(part) for part in parts]
            rows.append((f"{name}: {title}", values[0], values[1]))
    return rows


@policies.command()
@click.argument("name")
@click.argument("version", type=click.IntRange(1))
@note_option
@administers
def rollback(admin: Administration, name: str, version: int, note: str) -> None:
    """Let an older version count again, as a new one."""
    _written(admin.post("policies", name, "rollback", body={"version": version, "note": note}))


@policies.command()
@click.argument("name")
@yes_option
@administers
def delete(admin: Administration, name: str, yes: bool) -> None:
    """Delete a policy that no tenant has."""
    if not yes:
        click.confirm(f"Delete the policy {name}?", abort=True, err=True)
    admin.delete("policies", name)
    click.echo(f"Deleted {name}.", err=True)


def _version(admin: Administration, name: str, version: int | None) -> Thing:
    return admin.get("policies", name) if version is None else admin.get("policies", name, "versions", version)


def _put(admin: Administration, before: Thing, document: Thing, note: str) -> Thing:
    body = {"document": document, "note": note}
    return admin.put("policies", before["name"], body=body, version=before["version"])


def _written(policy: Thing) -> None:
    click.echo(f"{policy['name']} is at version {policy['version']}.", err=True)


def _read(file: Path) -> Thing:
    """The document of a file. Raises click.ClickException."""
    try:
        text = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _decoded(text, is_toml=file.suffix == ".toml")


def _decoded(text: str, is_toml: bool = False) -> Thing:
    try:
        if is_toml:
            return tomllib.loads(text)
        return msgspec.json.decode(text, type=Thing)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise click.BadParameter(f"the document cannot be read as {'TOML' if is_toml else 'JSON'}: {error}") from None


def _pretty(document: Thing) -> str:
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2).decode() + "\n"
