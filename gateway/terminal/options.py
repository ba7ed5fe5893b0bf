"""What all commands of the administration have in common: where the gateway is, who asks, how it is told."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from gateway.client import DEFAULT_URL, CallFailed, Unreachable, checked_url, find_admin_key
from gateway.terminal.administration import Administration, Refused, Thing
from gateway.terminal.tables import leave_unread

_SPAN = re.compile(r"(\d{1,6})([smhdw])")
_UNIX_S = re.compile(r"0|[0-9]{9,11}")
"""Since 1973: fewer digits are a day (20261101), or a span that lacks its unit."""
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def administers(command: Callable[..., None]) -> Callable[..., None]:
    """A command that gets an ``Administration`` as ``admin``. What goes wrong is said on standard error; the status is
    2 where no gateway answers, and 1 where it refuses."""

    @click.option(
        "--url",
        envvar="PENSTOCK_URL",
        default=DEFAULT_URL,
        show_default=True,
        callback=checked_url,
        help="The gateway [PENSTOCK_URL].",
    )
    @click.option("--admin-key", help="[PENSTOCK_ADMIN_KEY, or what the local gateway's bootstrap.env has].")
    @functools.wraps(command)
    def run(url: str, admin_key: str | None, **others: Any) -> None:
        with Administration(url, find_admin_key(admin_key, url)) as admin:
            try:
                command(admin=admin, **others)
                sys.stdout.flush()
            except Unreachable as error:
                hint = "start it with `penstock serve`, or name another one with --url"
                click.echo(f"penstock: {error}: there is no gateway at {admin.root}; {hint}", err=True)
                sys.exit(2)
            except CallFailed as error:
                hint = ""
                if isinstance(error, Refused) and error.status == 401:
                    hint = " Give an admin key with --admin-key, or in PENSTOCK_ADMIN_KEY."
                click.echo(f"penstock: {error}{hint}", err=True)
                sys.exit(1)
            except OSError as error:  # of standard output: what calls meet are CallFailed
                leave_unread(error)
            except KeyboardInterrupt:
                sys.exit(130)

    return run


json_option = click.option("--json", "as_json", is_flag=True, help="As JSON, the way the API has it.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask whether it is meant.")


def unix_s(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """For an option that is an instant: "2026-11-01", "20261101", "2026-11-01T12:00", "36h" before now, or Unix
    seconds."""
    return None if text is None else _instant(text, -1, "so long ago as 36h")


def later_unix_s(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """As ``unix_s``, for an instant to come: "36h" is from now on."""
    return None if text is None else _instant(text, 1, "so long from now as 36h")


def _instant(text: str, direction: int, as_span: str) -> int:
    """``direction``: 1 where a span of time ends it, -1 where it began so long ago."""
    if span := _SPAN.fullmatch(text):
        return int(time.time()) + direction * int(span[1]) * _UNIT_S[span[2]]
    if _UNIX_S.fullmatch(text):
        return int(text)
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a time such as 2026-11-01T12:00 nor {as_span}.") from None
    return int((at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp())


def told(answer: object) -> None:
    """Whatever the API answered, as JSON that people can read too."""
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Something that turns on standard error while the caller waits; nothing where nobody looks."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def pairs(given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=TEXT`` each."""
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{one!r} is not NAME=TEXT.")
        found[name] = value
    return found


def tenant_names(admin: Administration) -> dict[str, str]:
    """By their ids. Raises CallFailed."""
    return {found["id"]: found["name"] for found in admin.every("tenants")}


def by_name(admin: Administration, things: list[Thing]) -> list[Thing]:
    """The same, with tenants called by their names, for people. Raises CallFailed."""
    names = tenant_names(admin) if things else {}
    return [{**each, "tenant_id": names.get(each["tenant_id"], each["tenant_id"])} for each in things]


def tenant_named(admin: Administration, tenant: str) -> Thing:
    """By its name, or by its id. Raises CallFailed."""
    for found in admin.every("tenants", name=tenant):
        return found
    return admin.get("tenants", tenant)
