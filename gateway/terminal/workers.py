"""`penstock workers` and `penstock models`: what computes, and what is in memory."""

from __future__ import annotations

from typing import Any

import click

from gateway.terminal import tables
from gateway.terminal.administration import Administration, Thing
from gateway.terminal.options import administers, json_option, told


def _load(title: str, cell: Any) -> tables.Column:
    return tables.Column(title, lambda worker: None if worker["load"] is None else cell(worker["load"]), "right")


def state(worker: Thing) -> str:
    return f"{worker['state']}, drained" if worker["resting"] else str(worker["state"])


def kv_share(load: Thing) -> float:
    """Of its blocks, how many requests hold."""
    num_blocks = load["num_used_blocks"] + load["num_cached_blocks"] + load["num_free_blocks"]
    return load["num_used_blocks"] / num_blocks if num_blocks else 0.0


WORKERS = [
    tables.text("name", "name"),
    tables.text("model", "model"),
    tables.Column("state", state),
    tables.Column("device", lambda worker: None if worker["facts"] is None else worker["facts"]["device"]),
    _load("running", lambda load: load["num_running"]),
    _load("waiting", lambda load: load["num_waiting"]),
    _load("KV in use", lambda load: f"{kv_share(load):.0%}"),
    _load("step", lambda load: f"{load['step_ms']:,.1f} ms"),
    _load("preempted", lambda load: f"{load['num_preemptions']:,}"),
    _load("guessed right", lambda load: _share(load["num_accepted_tokens"], load["num_drafted_tokens"])),
    tables.count("lives", "num_lives"),
]
MODELS = [
    tables.text("name", "name"),
    tables.text("state", "state"),
    tables.text("ready", "ready"),
    tables.text("pinned", "pinned"),
    tables.Column("workers", lambda model: model["replicas"] + len(model["addresses"]), "right"),
    tables.Column("planned", lambda model: f"{model['planned_bytes'] / 2**30:,.2f} GiB", "right"),
    tables.text("source", "source"),
]


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.0%}" if whole else None


@click.group()
def workers() -> None:
    """List workers, and have one rest."""


@workers.command(name="list")
@json_option
@administers
def list_workers(admin: Administration, as_json: bool) -> None:
    """List workers and what they have to do."""
    found = admin.get("workers")["data"]
    told(found) if as_json else tables.shown(found, WORKERS, "There are no workers.")


@workers.command()
@click.argument("name")
@json_option
@administers
def show(admin: Administration, name: str, as_json: bool) -> None:
    """Show a worker."""
    _tell(admin.get("workers", name), as_json, WORKERS)


@workers.command()
@click.argument("name")
@json_option
@administers
def drain(admin: Administration, name: str, as_json: bool) -> None:
    """Give a worker nothing new; its answers go on elsewhere as there is room, or end where they are."""
    _tell(admin.post("workers", name, "drain"), as_json, WORKERS)


@workers.command()
@click.argument("name")
@json_option
@administers
def resume(admin: Administration, name: str, as_json: bool) -> None:
    """Give a drained worker requests again."""
    _tell(admin.post("workers", name, "resume"), as_json, WORKERS)


@click.group()
def models() -> None:
    """List models, and say which of them are in memory."""


@models.command(name="list")
@json_option
@administers
def list_models(admin: Administration, as_json: bool) -> None:
    """List the models that are served."""
    found = admin.get("models")["data"]
    told(found) if as_json else tables.shown(found, MODELS, "There are no models.")


def _verb(verb: str, help_: str) -> None:
    @models.command(name=verb, help=help_)
    @click.argument("name")
    @json_option
    @administers
    def run(admin: Administration, name: str, as_json: bool) -> None:
        _tell(admin.post("models", name, verb), as_json, MODELS)


_verb("load", "Load a model as soon as there is room for it; idle ones leave for it.")
_verb("unload", "Unload a model that answers nobody, until somebody asks for it.")
_verb("pin", "Keep a model loaded, whatever the others need.")
_verb("unpin", "Let a model leave when others need its room, or nobody uses it.")


def _tell(thing: Thing, as_json: bool, columns: list[tables.Column]) -> None:
    told(thing) if as_json else tables.facts(thing, columns)
