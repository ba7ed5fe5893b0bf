"""A report as one picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.bench.report import Report

INK, MUTED, GRID = "#1c2b39", "#6b7a88", "#e3e8ec"
COLOURS = ("#2a78b8", "#d98b1f", "#9aa6b1")


class PlotError(Exception):
    """The picture cannot be drawn; the message says what to do."""


def check(path: Path) -> None:
    """Raises PlotError where matplotlib is missing, or ``path`` will not do: before the rounds, not after them."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install 'penstock[plot]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise PlotError(f"cannot write the picture to {path}: its ending is none of {', '.join(sorted(known))}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlotError(f"cannot write the picture to {path}: no file can be written there")


def draw(report: Report, path: Path) -> None:
    """Writes a PNG. Raises PlotError where that cannot be done."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    if report.stall_chunked and report.stall_whole:
        figure.suptitle(f"8 streams while a long prompt arrives: {report.model}", x=0.01, ha="left", color=INK)
        for ax, title, stall in (
            (axes[0], "prompt in chunks", report.stall_chunked),
            (axes[1], "prompt in one step", report.stall_whole),
        ):
            _dress(ax, f"{title}: worst gap {stall.worst_to_median:.1f} x the median before", "s since it arrived")
            ax.set_ylabel("gap between two tokens of one stream, ms", fontsize=9.5, color=MUTED)
            ax.stem([at for at, _ in stall.gaps], [gap for _, gap in stall.gaps], linefmt=COLOURS[0], markerfmt=" ")
            ax.axvspan(0, stall.ttft_ms / 1e3, color=COLOURS[1], alpha=0.15, linewidth=0)
            ax.set_ylim(bottom=0)
    else:
        heading = f"{report.model}, {report.dtype} on {report.device}: {report.input_tokens} tokens in"
        figure.suptitle(f"{heading}, {report.output_tokens} out", x=0.01, ha="left", color=INK)
        _bars(axes[0], report)
        _ratios(axes[1], report)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write the picture to {path}: {error}") from error


def _bars(ax: Any, report: Report) -> None:
    _dress(ax, "output tokens/s", "prompts at a time")
    contenders = list(dict.fromkeys(result.contender for result in report.results))
    concurrencies = list(dict.fromkeys(result.concurrency for result in report.results))
    width = 0.8 / len(contenders)
    for i, contender in enumerate(contenders):
        rates = [result.median.output_tokens_per_s for result in report.results if result.contender == contender]
        places = [place + (i - (len(contenders) - 1) / 2) * width for place in range(len(rates))]
        bars = ax.bar(places, rates, width, label=contender, color=COLOURS[i])
        ax.bar_label(bars, fmt="{:,.0f}", fontsize=8, color=MUTED)
    ax.set_xticks(range(len(concurrencies)), [str(each) for each in concurrencies])
    ax.legend(frameon=False, fontsize=9)


def _ratios(ax: Any, report: Report) -> None:
    _dress(ax, "time between two tokens, p50 and p99, ms", "prompts at a time")
    own = [result for result in report.results if result.ratio is None]
    for name, colour in (("p50", COLOURS[0]), ("p99", COLOURS[1])):
        ax.plot(
            range(len(own)),
            [getattr(result.median.itl_ms, name) for result in own],
            "o-",
            color=colour,
            label=f"penstock {name}",
        )
    ax.set_xticks(range(len(own)), [str(result.concurrency) for result in own])
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=9)


def _dress(ax: Any, title: str, x: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    ax.set_xlabel(x, fontsize=9.5, color=MUTED)
    ax.grid(True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
