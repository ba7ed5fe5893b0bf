"""Lists for people: a table as wide as the terminal, where all fits in, or whole where it is read by something else."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

if TYPE_CHECKING:
    from rich.text import Text

# What others wrote must not move the cursor, retitle the window or paste into it: control characters other than tab and
# newline, those of C1 among them, are left out.
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])
WIDE = 1 << 14
"""Characters in a line that no terminal has to show."""
WHOLE = 36
"""Characters of a request's id, the longest that is copied or read in one piece."""
GAP = 2
"""Characters between columns."""


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return text.translate(_CONTROLS)


@dataclass(frozen=True, slots=True)
class Column:
    """One of a table's, and how it comes from an object of the API."""

    title: str
    cell: Callable[[Any], object]
    justify: Literal["left", "right"] = "left"


def text(title: str, name: str) -> Column:
    return Column(title, lambda thing: thing[name])


def count(title: str, name: str) -> Column:
    return Column(title, lambda thing: _count(thing[name]), "right")


def instant(title: str, name: str) -> Column:
    """Unix seconds, in UTC."""
    return Column(title, lambda thing: when(thing[name]))


def milliseconds(title: str, name: str) -> Column:
    return Column(title, lambda thing: None if thing[name] is None else f"{thing[name]:,.0f} ms", "right")


def money(title: str, name: str) -> Column:
    """Millionths of the object's currency."""
    return Column(title, lambda thing: amount(thing[name], thing["currency"]), "right")


def when(unix_s: int | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def amount(micros: int, currency: str) -> str:
    """At least two digits after the point, and no more than it needs."""
    whole = f"{Decimal(micros) / 1_000_000:,.6f}"
    return f"{whole[:-4]}{whole[-4:].rstrip('0')} {currency}"


def shown(things: Iterable[Any], columns: Iterable[Column], nothing: str) -> None:
    """A table on standard output; ``nothing`` where there are no rows. What is longer than ids and times are is folded
    where a terminal is narrow, and nothing else: lines may be longer than it is wide."""
    # Imported where something is drawn: as JSON, and for help alone, nothing is.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = list(columns)
    rows = [[_cell(column.cell(thing)) for column in columns] for thing in things]
    if not rows:
        Console(stderr=True).print(nothing, markup=False, highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    widths = []
    for number, column in enumerate(columns):
        longest = max(len(column.title), *(row[number].cell_len for row in rows))
        widths.append(longest if longest <= WHOLE else WHOLE // 2)
        table.add_column(column.title, justify=column.justify, overflow="fold", no_wrap=longest <= WHOLE)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if console.is_terminal:
        console.width = max(console.width, sum(widths) + GAP * (len(widths) - 1))
    else:
        console, table.box = Console(highlight=False, width=WIDE), None
    console.print(table)


def facts(thing: Any, columns: Iterable[Column]) -> None:
    """One object, a line for each thing about it."""
    from rich.console import Console
    from rich.text import Text

    columns = list(columns)
    width = max(len(column.title) for column in columns)
    console = Console(highlight=False)
    for column in columns:
        line = Text.assemble((column.title.ljust(width), "dim"), "  ", _cell(column.cell(thing)))
        console.print(line, soft_wrap=True)


def leave_unread(error: OSError) -> NoReturn:
    """Standard output takes nothing more: whoever read it has enough, or there is no room where it goes."""
    if not isinstance(error, BrokenPipeError):
        click.echo(f"penstock: standard output cannot be written: {error.strerror}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _cell(value: object) -> Text:
    from rich.text import Text

    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return Text(printable(str(value)))
