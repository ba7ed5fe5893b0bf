"""`penstock ledger`: ``close`` closes days, ``verify`` reads rows and digests again, ``give-up`` ends the waiting for
rows that are lost. Each may run beside a gateway. The ledger and its store are loaded by what reads them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from gateway.settings_file import config_option, data_dir_option, fail, load
from policies import settings

if TYPE_CHECKING:
    from gateway.ledger import closing, losses
    from gateway.ledger.verify import Verdict

T = TypeVar("T")

DAY = click.DateTime(["%Y-%m-%d"])
FOUND = 1
"""Exit status when something is not as it was."""


@click.group(short_help="Close the ledger's days, and check its rows.")
def ledger() -> None:
    """Close the days of the ledger, and check that nothing in it was changed or is missing."""


@ledger.command()
@click.option("--day", type=DAY, required=True, help="The last day to close, in UTC; all before it are closed too.")
@config_option
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="The days that were closed, as JSON.")
def close(day: datetime, config: Path | None, data_dir: str | None, as_json: bool) -> None:
    """Close every open day up to one, without waiting for rows that may still come: those fall to a later day."""
    from gateway.ledger import closing

    now, last = time.time(), closing.number_of(day.date())
    if last >= closing.day_of(now):
        fail(f"{day.date()} is not over yet (days are in UTC)")
    closed = run(_closed(store_of(config, data_dir), last + 1, now))
    if as_json:
        click.echo(msgspec.json.encode(closed))
        return
    for one in closed:
        click.echo(f"{one.day}: {one.num_rows:,} rows, digest {one.digest}")
    if not closed:
        click.echo(f"Nothing to do: {day.date()} and all days before it are closed, or have no ledger.")


@ledger.command(name="verify")
@click.option("--from", "from_", type=DAY, help="The first day to read, in UTC [the first that there is].")
@click.option("--to", type=DAY, help="Read the days before this one [all, and what is not closed yet].")
@config_option
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="What was found, and the digest of each day, as JSON.")
def verify_command(
    from_: datetime | None, to: datetime | None, config: Path | None, data_dir: str | None, as_json: bool
) -> None:
    """Read the ledger row by row. Exit status 1 when a row was changed, is missing or does not fit its digest.

    Keep the digests somewhere else: whoever can write everything in the store can write other digests too.
    """
    from gateway.ledger import closing

    if from_ is not None and to is not None and to <= from_:
        fail(f"the period ends at {to.date()}, before it begins: --to is the first day that is not read")
    days = [None if day is None else closing.number_of(day.date()) for day in (from_, to)]
    verdict = run(_verified(store_of(config, data_dir), *days))
    if as_json:
        click.echo(msgspec.json.encode(verdict))
    else:
        _show(verdict)
    sys.exit(FOUND if verdict.num_findings else 0)


@ledger.command(name="give-up")
@click.option("--chain", type=click.IntRange(1), required=True)
@click.option("--from-position", "first", type=click.IntRange(1), required=True)
@click.option("--to-position", "last", type=click.IntRange(1), help="The last one [--from-position].")
@click.option("--reason", required=True, help="For the audit log.")
@config_option
@data_dir_option
def give_up(chain: int, first: int, last: int | None, reason: str, config: Path | None, data_dir: str | None) -> None:
    """Give up rows that will never come, since the spool that kept them is lost.

    What stands behind them in their chain is then counted, billed and closed; `verify` goes on finding them missing.
    """
    from gateway.ledger import losses

    loss = losses.Loss(chain, first, last or first, reason)
    try:
        run(_given_up(store_of(config, data_dir), loss))
    except losses.Refused as refused:
        fail(str(refused))
    click.echo(f"Given up: positions {loss.first_position} to {loss.last_position} of chain {chain}.")


async def _given_up(config: settings.Store, loss: losses.Loss) -> None:
    from gateway import store
    from gateway.ledger import losses

    async with store.beside(config) as rooms:
        await losses.give_up(rooms, loss)


async def _closed(config: settings.Store, before: int, now: float) -> list[closing.Day]:
    from gateway import store
    from gateway.ledger import closing

    closed = []
    async with store.beside(config) as rooms:
        while (one := await closing.close_next(rooms, before, now)) is not None:
            closed.append(one)
    return closed


async def _verified(config: settings.Store, from_day: int | None, to_day: int | None) -> Verdict:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gateway import store
    from gateway.ledger.verify import verify

    console = Console(stderr=True)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)
        async with store.beside(config) as rooms:
            return await verify(
                rooms, from_day, to_day, lambda done, total: progress.update(bar, completed=done, total=total)
            )


def _show(verdict: Verdict) -> None:
    for finding in verdict.findings:
        where = [finding.day, f"chain {finding.chain}" if finding.chain is not None else None]
        where.append(f"position {finding.position}" if finding.position is not None else None)
        named = ", ".join(part for part in where if part)
        click.echo(f"{finding.kind}: {finding.what}" + (f" ({named})" if named else ""))
    if (num_more := verdict.num_findings - len(verdict.findings)) > 0:
        click.echo(f"and {num_more:,} more of the kind")
    click.echo(
        f"Rows read: {verdict.num_rows:,}, chains: {verdict.num_chains:,}, closed days: {len(verdict.days):,}; "
        + (f"findings: {verdict.num_findings:,}." if verdict.num_findings else "all is as it was written.")
    )
    if verdict.num_before_chains:
        click.echo(f"{verdict.num_before_chains:,} rows are older than the chains, and nothing can be said of them.")
    if verdict.days:
        click.echo(f"The digest of {verdict.days[-1].day} is {verdict.days[-1].digest}.")


def store_of(config: Path | None, data_dir: str | None) -> settings.Store:
    return load(config, {} if data_dir is None else {"store.data_dir": data_dir}).store


def run(work: Coroutine[Any, Any, T]) -> T:
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.store import StoreError

    try:
        return asyncio.run(work)
    except StoreError as error:
        fail(str(error))
    except (SQLAlchemyError, OSError) as error:
        fail(f"the store cannot be read: {' '.join(str(getattr(error, 'orig', None) or error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)
