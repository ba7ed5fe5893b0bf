"""A run as one picture: how long the first token, each next one and the whole answer took, and tokens/s over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.bench.measures import Outcome, tokens_over_time
from policies.distribution import percentile

INK, MUTED, GRID, FILL = "#1c2b39", "#6b7a88", "#e3e8ec", "#2a78b8"
MARKS = ((50, "#2a78b8"), (90, "#d98b1f"), (99, "#c23b3b"))


class PlotError(Exception):
    """The picture cannot be drawn; the message says what to do."""


def check(path: Path) -> None:
    """Raises PlotError where matplotlib is missing, or ``path`` will not do: before the load, not after it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install 'penstock[plot]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise PlotError(f"cannot write the picture to {path}: its ending is none of {', '.join(sorted(known))}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlotError(f"cannot write the picture to {path}: no file can be written there")


def draw(outcomes: Sequence[Outcome], title: str, subtitle: str, path: Path) -> None:
    """Writes a PNG of two by two panels to ``path``. Raises PlotError where that cannot be done."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ok = [outcome for outcome in outcomes if outcome.error is None]
    layout = ConstrainedLayoutEngine(rect=(0.006, 0.008, 0.988, 0.905), hspace=0.06, wspace=0.04)
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.982, title, ha="left", va="top", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 0.944, subtitle, ha="left", va="top", fontsize=10, color=MUTED)
    axes = figure.subplots(2, 2)
    ttfts = [outcome.ttft_s for outcome in ok]
    _ecdf(axes[0][0], "Time to first token", "share of requests", [1e3 * ttft for ttft in ttfts if ttft is not None])
    _ecdf(axes[0][1], "Inter-token latency", "share of gaps", [1e3 * gap for o in ok for gap in o.itls_s])
    _ecdf(axes[1][0], "End to end", "share of requests", [1e3 * outcome.e2e_s for outcome in ok])
    _throughput(axes[1][1], outcomes)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write the picture to {path}: {error}") from error


def _dress(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    ax.set_xlabel(x, fontsize=9.5, color=MUTED)
    ax.set_ylabel(y, fontsize=9.5, color=MUTED)
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(GRID)


def _ecdf(ax: Any, title: str, y: str, values_ms: list[float]) -> None:
    """Share of values at or below x; on a logarithmic axis where the slowest is far from the median, to show both."""
    _dress(ax, title, "ms", y)
    if not values_ms:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=MUTED)
        return
    ordered = sorted(values_ms)
    p50 = percentile(ordered, 50)
    positive = [value for value in ordered if value > 0]
    if positive and p50 > 0 and ordered[-1] > 8 * p50:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        ax.set_xscale("log")
        ax.set_xlim(left=max(positive[0], p50 / 50))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
    ax.step(ordered, shares, where="post", color=FILL, linewidth=1.9)
    ax.fill_between(ordered, shares, step="post", color=FILL, alpha=0.08, linewidth=0)
    ax.set_ylim(0, 1.03)
    for percent, color in MARKS:
        at_ms = percentile(ordered, percent)
        ax.plot(
            [at_ms, at_ms],
            [0, percent / 100],
            color=color,
            linewidth=1.1,
            linestyle=(0, (4, 2)),
            label=f"p{percent}   {_readable(at_ms)}",
        )
        ax.plot([at_ms], [percent / 100], "o", color=color, markersize=5)
    ax.legend(loc="lower right", fontsize=9, framealpha=0.92, edgecolor=GRID, labelcolor=INK)


def _throughput(ax: Any, outcomes: Sequence[Outcome]) -> None:
    _dress(ax, "Throughput", "s since the first request", "completion tokens/s")
    at_s, tokens_per_s = tokens_over_time(outcomes)
    if not at_s:
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=MUTED)
        return
    mean = sum(tokens_per_s) / len(tokens_per_s)
    ax.step(at_s, tokens_per_s, where="mid", color=FILL, linewidth=1.6)
    ax.fill_between(at_s, tokens_per_s, step="mid", color=FILL, alpha=0.12, linewidth=0)
    ax.axhline(mean, color=MARKS[1][1], linewidth=1.1, linestyle=(0, (4, 2)), label=f"mean   {mean:,.0f} tokens/s")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 1.18 * max(*tokens_per_s, 1e-9))
    ax.legend(loc="upper right", fontsize=9, framealpha=0.92, edgecolor=GRID, labelcolor=INK)


def _readable(ms: float) -> str:
    if ms >= 10_000:
        return f"{ms / 1e3:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
