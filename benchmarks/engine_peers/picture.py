"""The report as a PNG: a row of panels a shape, a bar an engine, a tick where the machine's limit lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.engine_peers.contenders import NAMES, OURS
from benchmarks.engine_peers.figures import Point, Report

INK, MUTED, GRID, MARK = "#1c2b39", "#6b7a88", "#e3e8ec", "#c23b3b"
OWN_BARS = {"bf16": "#2a78b8", "int8": "#5b9ed0", "int4": "#94c1e3"}
PEER_BARS = {"bf16": "#9aa6b1", "8": "#b9c4cd", "4": "#d5dce2"}


def check() -> None:
    """Raises ClickException where matplotlib is missing: before the rounds, not after them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install 'penstock[plot]'") from None


def draw(report: Report, path: Path) -> None:
    """Needs matplotlib, and at least one point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shapes = [shape for shape in report.models if any(point.shape == shape for point in report.points)]
    rows = [_panels(report, shape) for shape in shapes]
    width = max(len(row) for row in rows)
    longest = max(len(bars) for row in rows for _, bars, _ in row)
    height = len(rows) * (1.0 + 0.3 * longest) + 0.9
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.985, 1 - 0.85 / height), wspace=0.03, hspace=0.06)
    figure = Figure(figsize=(4.1 * width + 1.6, height), dpi=120, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    heading = "Penstock and other engines on the same weights"
    figure.text(0.008, 1 - 0.12 / height, heading, va="top", fontsize=15, fontweight="bold", color=INK)
    figure.text(
        0.008,
        1 - 0.45 / height,
        f"{report.began} UTC, commit {report.commit}, {report.num_threads} threads of {report.machine['processor']}; "
        "greedy, whole batch at once, medians; red: what the machine can read or multiply, for that form",
        va="top",
        fontsize=9.5,
        color=MUTED,
    )
    axes = figure.subplots(len(rows), width, squeeze=False)
    for row, places in zip(rows, axes, strict=True):
        for ax in places[len(row) :]:
            ax.set_visible(False)
        for number, (ax, (title, bars, limits)) in enumerate(zip(places, row, strict=False)):
            _bars(ax, title, bars, limits, with_names=number == 0 or [b[0] for b in bars] != [b[0] for b in row[0][1]])
    figure.savefig(path)


Bar = tuple[str, float, str]
"""Name, value, colour."""


def _panels(report: Report, shape: str) -> list[tuple[str, list[Bar], list[float | None]]]:
    """Of one shape: title, bars, and each bar's limit."""
    points = [point for point in report.points if point.shape == shape]
    alone = [point for point in points if point.ttfts_s]
    panels: list[tuple[str, list[Bar], list[float | None]]] = []
    if alone:
        first = alone[0]
        panels.append(
            (
                f"{shape}: time to first token, ms",
                [_bar(point, 1e3 * (point.ttft_s or 0.0)) for point in alone],
                [_times(1e3 * (point.ttft_s or 0.0), report.prefill_share(point)) for point in alone],
            )
        )
        rates = [point.decode_tokens_per_s or 0.0 for point in alone]
        shares = [report.decode_share(point) for point in alone]
        panels.append(
            (
                f"{shape}: decode alone, tokens/s, {first.input_tokens} + {first.output_tokens}",
                [_bar(point, rate) for point, rate in zip(alone, rates, strict=True)],
                [rate / share if share else None for rate, share in zip(rates, shares, strict=True)],
            )
        )
    for concurrency in sorted({point.concurrency for point in points if not point.ttfts_s}):
        here = [point for point in points if point.concurrency == concurrency]
        bars = [_bar(point, point.tokens_per_s) for point in here]
        panels.append((f"{shape}: {concurrency} at once, tokens/s", bars, [None for _ in bars]))
    return panels


def _times(value: float, share: float | None) -> float | None:
    return None if share is None else value * share


def _bar(point: Point, value: float) -> Bar:
    if point.engine == OURS:
        colour = OWN_BARS[point.form]
    else:
        colour = next(colour for part, colour in PEER_BARS.items() if part in point.form)
    version = "" if point.engine == OURS else f" {point.version}"
    return f"{NAMES.get(point.engine, point.engine)}{version} {point.form}", value, colour


def _bars(ax: Any, title: str, bars: list[Bar], limits: list[float | None], with_names: bool) -> None:
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    names, values, colours = zip(*bars, strict=True)
    places = range(len(bars))
    drawn = ax.barh(places, values, color=colours, height=0.66)
    ax.bar_label(
        drawn,
        labels=[f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" for value in values],
        padding=3, fontsize=9, color=INK,
    )  # fmt: skip
    for place, limit in zip(places, limits, strict=True):
        if limit is not None:
            ax.plot([limit, limit], [place - 0.4, place + 0.4], color=MARK, linewidth=1.6)
    ax.set_yticks(places, names if with_names else ["" for _ in names])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(*values, *(limit for limit in limits if limit is not None), 0.0))
    ax.grid(True, axis="x", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=MUTED, length=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.spines["left"].set_color(GRID)
