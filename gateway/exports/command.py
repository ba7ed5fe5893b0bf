"""``penstock export``."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from gateway.exports import DAY_S, EPOCH, FORMATS, BadOrder, Format, Order, What, check
from gateway.settings_file import config_option, data_dir_option, fail, load
from policies import settings


def _day(context: click.Context, parameter: click.Parameter, text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no day, such as 2026-11-01.") from None


@click.command(short_help="Write a period's usage or costs as files for billing.")
@click.argument("what", type=click.Choice(["usage", "costs"]))
@click.option("--from", "from_", required=True, callback=_day, help="The first day, in UTC.", metavar="DAY")
@click.option("--to", required=True, callback=_day, help="The day after the last one.", metavar="DAY")
@click.option("--tenant", multiple=True, help="Of this tenant alone, by its id or name; more than once for more.")
@click.option("--format", "format_", type=click.Choice(FORMATS), default="csv", show_default=True)
@click.option("--json", "is_json", is_flag=True, help="The same as --format jsonl.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file, which is not there yet. Interrupted, the same command goes on [standard output].",
)
@config_option
@data_dir_option
def export(
    what: What,
    from_: datetime.date,
    to: datetime.date,
    tenant: tuple[str, ...],
    format_: Format,
    is_json: bool,
    output: Path | None,
    config: Path | None,
    data_dir: str | None,
) -> None:
    """Write a row for each request (usage), or what each kind of token cost (costs).

    A period whose days are closed is written to the same bytes each time. focus is FOCUS 1.2, of costs, as CSV.
    The gateway may be running or not.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.exports.files import InTheWay
    from gateway.store import StoreError, cause_of

    loaded = load(config, {} if data_dir is None else {"store.data_dir": data_dir})
    format_ = "jsonl" if is_json else format_
    order = Order(what=what, format=format_, from_=from_, to=to, currency=loaded.billing.currency)
    if output is None and format_ == "parquet" and sys.stdout.isatty():
        fail("parquet is nothing for a terminal; name a file with --output")
    if output is not None and not output.parent.is_dir():
        fail(f"there is no directory {output.parent}")
    try:
        check(order, today())
        asyncio.run(_export(loaded.store, order, tenant, output))
    except BadOrder as error:
        fail(f"--{error}")
    except (StoreError, InTheWay) as error:
        fail(str(error))
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (SQLAlchemyError, OSError) as error:
        fail(f"the export broke off: {cause_of(error)}{'' if output is None else '; the same command goes on'}")
    except KeyboardInterrupt:
        again = "" if output is None else "; the same command goes on where it was"
        click.echo(f"penstock: interrupted{again}", err=True)
        sys.exit(130)


def today() -> datetime.date:
    """In UTC."""
    return EPOCH + datetime.timedelta(days=int(time.time()) // DAY_S)


async def _export(config: settings.Store, order: Order, tenants: tuple[str, ...], output: Path | None) -> None:
    from gateway import store
    from gateway.exports.files import write_file, write_stream
    from gateway.exports.pieces import Export

    async with store.beside(config) as rooms:
        begun = await Export.begin(rooms, order, tenants)
        with _Progress(begun.period.num_rows, is_shown=output is not None and sys.stderr.isatty()) as progress:
            if output is not None:
                num_read = await write_file(begun, output, progress.add)
            else:
                num_read = await write_stream(begun, _standard_output(), progress.add)
                sys.stdout.flush()
        kept = "closed, so this is final" if begun.period.digest is not None else "not closed yet, so more may come"
        click.echo(f"{num_read} rows of the ledger; the period is {kept}.", err=True)


def _standard_output() -> BinaryIO:
    return sys.stdout.buffer


class _Progress:
    """A bar on standard error."""

    def __init__(self, num_rows: int, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("rows", total=num_rows)

    def add(self, num_rows: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, num_rows)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
