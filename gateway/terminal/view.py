"""What `penstock top` draws: one snapshot of a gateway, and how fast it was before."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.terminal.administration import Thing
from gateway.terminal.tables import printable

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
    num_called = Counter(one["name"] for one in now["workers"])
    rows = [
        (
            printable(_told_apart(one) if num_called[one["name"]] > 1 else one["name"]),
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


def _told_apart(worker: Thing) -> str:
    """With the host and the process of the gateway that has started it: another one has one of the same name."""
    return f"{worker['name']} of {worker['gateway'].rpartition(':')[0]}"


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
