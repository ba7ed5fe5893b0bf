"""The simulated overload as a PNG: what each class was promised, and what it got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.settings import CLASSES

if TYPE_CHECKING:
    from benchmarks.overload_simulated import Result

INK, MUTED, GRID, MARK = "#1c2b39", "#6b7a88", "#e3e8ec", "#c23b3b"
COLORS = {"interactive": "#2a78b8", "standard": "#6fa37a", "batch": "#b9c4cd"}


def draw(result: Result, loads: Mapping[str, float], tenants: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.9), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"Asked for {result.offered:.1f} times what the workers can do, one tenant flooding: recorded, simulated",
        x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK,
    )  # fmt: skip
    ttft, share, served_by, gaps = figure.subplots(1, 4)
    names = list(loads)
    colors = [COLORS[name] for name in names]
    parts = [result.outcome.classes[name] for name in names]

    seconds = [part.ttft_ms.p99 / 1e3 for part in parts]
    bars = ttft.bar(names, seconds, color=colors, width=0.62)
    ttft.bar_label(
        bars, labels=[f"{value:,.2g} s" if value < 10 else f"{value:,.0f} s" for value in seconds], padding=3
    )
    for index, name in enumerate(names):
        _mark(ttft, index, CLASSES[name].ttft_ms / 1e3)
    ttft.set_yscale("log")
    ttft.set_ylim(0.1, 3000)
    _dress(ttft, "TTFT p99", f"red: target; interactive within it: {100 * result.attainment:.2f} %")

    got = [part.share_while_waiting for part in parts]
    bars = share.bar(names, got, color=colors, width=0.62)
    share.bar_label(bars, labels=[f"{value:.3f}" for value in got], padding=3)
    for index, name in enumerate(names):
        _mark(share, index, CLASSES[name].share)
    share.set_ylim(0, 1)
    _dress(share, "Share of tokens while it waits", "red: guaranteed")

    position, ticks, labels = 0.0, [], []
    for name, members in tenants.items():
        for tenant in members:
            served = result.outcome.tenants[tenant].num_served_tokens / 1e6
            served_by.bar(position, served, color=COLORS[name], width=0.8)
            served_by.text(position, served, f"{served:.2f}", ha="center", va="bottom", fontsize=9, color=INK)
            ticks.append(position)
            labels.append(tenant)
            position += 1.0
        position += 0.5
    served_by.set_xticks(ticks, labels, rotation=30)
    served_by.set_ylim(0, served_by.get_ylim()[1] * 1.08)
    fair = ", ".join(f"{result.jain[name]:.4f}" for name in names)
    _dress(served_by, "Tokens of equal tenants, M", f"Jain index: {fair}")

    ratios = [result.gap[name] for name in names]
    bars = gaps.bar(names, ratios, color=colors, width=0.62)
    gaps.bar_label(bars, labels=[f"{value:.2f}" for value in ratios], padding=3)
    gaps.axhline(1.0, color=MARK, linewidth=1.4, linestyle=(0, (4, 2)))
    gaps.set_ylim(0, 1.15)
    _dress(gaps, "Longest gap between turns", "of its bound, red, as policies/priority.py states it")
    figure.savefig(path)


def _mark(ax: Any, index: int, value: float) -> None:
    ax.plot([index - 0.4, index + 0.4], [value, value], color=MARK, linewidth=1.6)


def _dress(ax: Any, title: str, note: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    ax.text(0.0, 1.02, note, transform=ax.transAxes, fontsize=9, color=MUTED)
    ax.grid(True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
