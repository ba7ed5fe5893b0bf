"""`penstock top`: what a gateway does at the moment, told anew each second."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import click
import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.client import CallFailed
from gateway.terminal.administration import Administration, Thing
from gateway.terminal.options import administers
from gateway.terminal.tables import WIDE, printable

AGAIN_S = 1.0
"""Between two attempts to find a gateway that was there before."""
HISTORY = 60
BARS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 16
HEAD_ROWS = 5
TITLE_ROWS = 4
"""Of a table: its title, its columns' names, a line, and the line before it."""
MAX_TENANTS = 8
ROOMY = 125
"""Characters in a line that all columns need."""
KEPT = 0.99
"""Of a class's requests: less than this is worth a look."""


@click.command()
@click.option("--once", is_flag=True, help="One second of it, as text; so it is where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON each second, the way the API has it.")
@administers
def top(admin: Administration, once: bool, as_json: bool) -> None:
    """Watch streams, tenants, classes and workers. q leaves."""
    if as_json:
        admin.follow("live", show=lambda payload: _printed(payload, once))
    elif once or not sys.stdout.isatty():
        admin.follow("live", show=_shown)
    else:
        _watch(admin)


class View:
    """The last snapshot, and how fast it was before."""

    def __init__(self) -> None:
        self._now: Thing | None = None
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self.trouble = ""
        """Why nothing new comes."""

    @property
    def is_blank(self) -> bool:
        """Nothing has come yet."""
        return self._now is None

    def take(self, payload: bytes) -> None:
        self._now = msgspec.json.decode(payload, type=Thing)
        self._rates.append(self._now["decode_tokens_per_s"])
        self.trouble = ""

    def drawn(self, width: int, max_rows: int | None = None) -> RenderableType:
        """Everything, ``max_rows`` lines high at most: the oldest streams have what the others leave. Where ``width``
        is small, what matters less is left out."""
        if self._now is None:
            return Text("Waiting for the first second.")
        now, is_narrow = self._now, width < ROOMY
        classes, tenants, workers = _classes(now), _tenants(now), _workers(now, is_narrow)
        num_used = HEAD_ROWS + workers.row_count + 3 * TITLE_ROWS
        if is_narrow:
            first: list[RenderableType] = [classes, Text(), tenants]
            num_used += classes.row_count + tenants.row_count + TITLE_ROWS
        else:
            beside = Table.grid(padding=(0, 6))
            beside.add_row(classes, tenants)
            first = [beside]
            num_used += max(classes.row_count, tenants.row_count)
        left = len(now["streams"]) if max_rows is None else max(0, max_rows - num_used)
        return Group(self._head(now), *first, Text(), workers, Text(), _streams(now, left, is_narrow))

    def _head(self, now: Thing) -> RenderableType:
        at = time.strftime("%H:%M:%S", time.gmtime(now["at"]))
        gateways = "1 gateway" if now["num_gateways"] == 1 else f"{now['num_gateways']} gateways"
        first = Text.assemble(
            ("penstock", "bold"),
            f"  {at} UTC  {gateways}  {now['num_open']:,} open  {now['requests_per_s']:,.0f} requests/s  ",
            (f"{now['failures_per_s']:,.0f} failed/s", "red" if now["failures_per_s"] else "dim"),
        )
        rates = f"prefill {now['prefill_tokens_per_s']:,.0f}  decode {now['decode_tokens_per_s']:,.0f} tokens/s  "
        second = Text.assemble(rates, (sparkline(self._rates), "cyan"))
        third = Text(f"TTFT {_percentiles(now['ttft_ms'])}    TPOT {_percentiles(now['tpot_ms'])}")
        lines = [first, second, third]
        if self.trouble:
            lines.append(Text(self.trouble, style="red"))
        return Group(*lines, Text())


def sparkline(values: Sequence[float]) -> str:
    """One character for each, as high as it is beside the highest."""
    most = max(values, default=0.0)
    return "".join(BARS[round(value / most * (len(BARS) - 1)) if most else 0] for value in values)


def bar(share: float, width: int = BAR_WIDTH) -> Text:
    """``share`` of ``width`` characters, with the number behind them."""
    num = round(min(1.0, max(0.0, share)) * width)
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * num, style), ("░" * (width - num), "dim"), f" {share:4.0%}")


def _percentiles(times: Thing) -> str:
    if not times["num"]:
        return "-"
    return "  ".join(f"{name} {_milliseconds(times[name])}" for name in ("p50", "p90", "p99"))


def _milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Text | str]], is_narrow: bool = False) -> Table:
    """Columns whose name begins with ``#`` are numbers; where it is narrow, those that end with ``?`` are left out."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_edge=False)
    kept = [number for number, column in enumerate(columns) if not (is_narrow and column.endswith("?"))]
    for column in (columns[number] for number in kept):
        name = column.strip("#?")
        table.add_column(
            name,
            justify="right" if column[0] == "#" else "left",
            no_wrap=True,
            min_width=max(len(name), 7) if column[0] == "#" else None,
        )
    for row in rows:
        table.add_row(*(row[number] for number in kept))
    return table


def _classes(now: Thing) -> Table:
    rows = [
        (
            one["sla_class"],
            f"{one['num_waiting']:,}",
            f"{one['oldest_wait_s']:,.1f} s",
            f"{one['num_ended']:,}",
            _attainment(one["attainment"]),
        )
        for one in now["classes"]
    ]
    return _table("Classes", ("class", "#waiting", "#oldest", "#ended/min", "#kept"), rows)


def _attainment(share: float | None) -> Text:
    return Text("-", "dim") if share is None else Text(f"{share:.1%}", "green" if share >= KEPT else "yellow")


def _workers(now: Thing, is_narrow: bool) -> Table:
    rows = [
        (
            printable(one["name"]),
            printable(one["model"]),
            one["state"],
            bar(one["num_used_blocks"] / one["num_blocks"]) if one["num_blocks"] else Text("-", "dim"),
            f"{one['num_running']:,}",
            f"{one['num_waiting']:,}",
            f"{one['prefill_tokens_per_s']:,.0f}",
            f"{one['decode_tokens_per_s']:,.0f}",
            f"{one['step_ms']:,.1f} ms",
        )
        for one in now["workers"]
    ]
    counts = ("#running", "#waiting?", "#prefill/s?", "#decode/s", "#step?")
    return _table("Workers", ("worker", "model?", "state", "KV", *counts), rows, is_narrow)


def _tenants(now: Thing) -> Table:
    rows = [
        (printable(one["name"]), *(f"{one[name]:,}" for name in ("num_open", "num_ended", "num_completion_tokens")))
        for one in now["tenants"][:MAX_TENANTS]
    ]
    return _table("Tenants", ("tenant", "#open", "#ended/min", "#tokens/min"), rows)


def _streams(now: Thing, most: int, is_narrow: bool) -> Table:
    names = {one["tenant_id"]: one["name"] for one in now["tenants"]}
    rows = [
        (
            printable(one["request_id"]),
            printable(names.get(one["tenant_id"], one["tenant_id"])),
            printable(one["model"]),
            one["sla_class"],
            one["state"],
            printable(one["worker"] or one.get("upstream") or "-"),
            f"{one['age_s']:,.1f} s",
            f"{one['num_prompt_tokens']:,}",
            f"{one['num_completion_tokens']:,}",
        )
        for one in now["streams"][:most]
    ]
    words = ("request", "tenant", "model?", "class?", "state", "worker?")
    return _table("Open for longest", (*words, "#age", "#prompt?", "#completion"), rows, is_narrow)


def _watch(admin: Administration) -> None:
    """Until q. A gateway that goes away is waited for."""
    view, console = View(), Console()
    with _keys() as is_left, Live(console=console, screen=True, auto_refresh=False) as screen:

        def show(payload: bytes) -> bool:
            view.take(payload)
            screen.update(view.drawn(*console.size), refresh=True)
            return not is_left()

        while not is_left():
            try:
                admin.follow("live", show=show, history=HISTORY if view.is_blank else 0)
            except CallFailed as error:
                if view.is_blank:
                    raise
                view.trouble = f"{error}; trying again"
                screen.update(view.drawn(*console.size), refresh=True)
                time.sleep(AGAIN_S)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Gives what says whether q was typed. The terminal hands over each key as it is typed while this lasts."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    left = False

    def is_left() -> bool:
        nonlocal left
        while not left and select.select([number], [], [], 0)[0]:
            typed = os.read(number, 1024)  # past the buffer of sys.stdin, of which select knows nothing
            left = not typed or b"q" in typed.lower()
        return left

    tty.setcbreak(number)
    try:
        yield is_left
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _printed(payload: bytes, once: bool) -> bool:
    click.echo(payload)
    sys.stdout.flush()
    return not once


def _shown(payload: bytes) -> bool:
    view = View()
    view.take(payload)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDE)
    console.print(view.drawn(console.width))
    return False
