"""The report as a PNG: a row of panels a shape, a bar an engine, a tick where the machine's limit lies."""

from __future__ import annotations

from collections.abc import Callable
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
        for ax, (title, bars, limits) in zip(places, row, strict=False):
            _bars(ax, title, bars, limits, with_names=ax is places[0])
    figure.savefig(path)


Bar = tuple[str, float | None, str]
"""Name, value where it was measured, colour."""


def _panels(report: Report, shape: str) -> list[tuple[str, list[Bar], list[float | None]]]:
    """Of one shape: title, bars, and each bar's limit. All panels have the same engines in the same order."""
    points = [point for point in report.points if point.shape == shape]
    names = list(dict.fromkeys(point.name for point in points))

    def panel(
        title: str,
        of: list[Point],
        value: Callable[[Point], float | None],
        limit: Callable[[Point], float | None] = lambda _: None,
    ) -> tuple[str, list[Bar], list[float | None]]:
        found = {point.name: point for point in of}
        first = {point.name: point for point in reversed(points)}
        bars = [(*_look(first[name]), value(found[name]) if name in found else None) for name in names]
        limits = [limit(found[name]) if name in found else None for name in names]
        return f"{shape}: {title}", [(name, value, colour) for name, colour, value in bars], limits

    def ttft_ms(point: Point) -> float | None:
        return None if point.ttft_s is None else 1e3 * point.ttft_s

    def least_ttft_ms(point: Point) -> float | None:
        share, whole_ms = report.prefill_share(point), ttft_ms(point)
        return None if share is None or whole_ms is None else whole_ms * share

    def most_tokens_per_s(point: Point) -> float | None:
        share, rate = report.decode_share(point), point.decode_tokens_per_s
        return None if share is None or rate is None else rate / share

    alone = [point for point in points if point.ttfts_s]
    panels = []
    if alone:
        panels.append(panel("time to first token, ms", alone, ttft_ms, least_ttft_ms))
        panels.append(
            panel("decode alone, tokens/s", alone, lambda point: point.decode_tokens_per_s, most_tokens_per_s)
        )
    for concurrency in sorted({point.concurrency for point in points if not point.ttfts_s}):
        here = [point for point in points if point.concurrency == concurrency]
        panels.append(panel(f"{concurrency} at once, tokens/s", here, lambda point: point.tokens_per_s))
    return panels


def _look(point: Point) -> tuple[str, str]:
    """Name and colour."""
    if point.engine == OURS:
        return f"{NAMES[OURS]} {point.form}", OWN_BARS[point.form]
    colour = next(colour for part, colour in PEER_BARS.items() if part in point.form)
    return f"{NAMES.get(point.engine, point.engine)} {point.version} {point.form}", colour


def _bars(ax: Any, title: str, bars: list[Bar], limits: list[float | None], with_names: bool) -> None:
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    names, values, colours = zip(*bars, strict=True)
    places = range(len(bars))
    ax.barh(places, [value or 0.0 for value in values], color=colours, height=0.66)
    most = max(value for value in (*values, *limits) if value is not None)
    for place, value, limit in zip(places, values, limits, strict=True):
        if limit is not None:
            ax.plot([limit, limit], [place - 0.4, place + 0.4], color=MARK, linewidth=1.6)
        text = "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
        beside = (value or 0.0) + 0.015 * most
        if limit is not None and beside < limit < beside + 0.16 * most:
            # The tick would go through the figure.
            beside = limit + 0.015 * most
        ax.text(beside, place, text, va="center", fontsize=9, color=INK)
    ax.set_yticks(places, names if with_names else ["" for _ in names])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.2 * most)
    ax.grid(True, axis="x", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=MUTED, length=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.spines["left"].set_color(GRID)
