"""The result as a PNG: gateway against its limits, three panels."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway.rounds import AIM_RATIO, MOST_ADDED_MS, REQUIRED_RATIO, REQUIRED_STREAM_RATIO, Result

INK, MUTED, GRID, OURS, BARE, MARK = "#1c2b39", "#6b7a88", "#e3e8ec", "#2a78b8", "#b9c4cd", "#c23b3b"


def draw(result: Result, path: Path) -> None:
    """Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0.006, 0.01, 0.988, 0.83), wspace=0.06)
    figure = Figure(figsize=(14, 5.2), dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.965, "What the gateway costs, one core", va="top", fontsize=15, fontweight="bold", color=INK)
    figure.text(
        0.012,
        0.895,
        f"medians of {len(result.rounds)} interleaved rounds; authentication, template, tokenising, queue, wire, "
        "detokenising and ledger on; dashed: what is required",
        va="top",
        fontsize=10,
        color=MUTED,
    )
    requests, latency, tokens = figure.subplots(1, 3)

    def middle(name: str) -> float:
        return float(median(getattr(r, name) for r in result.rounds))

    echo = middle("echo_per_s")
    _bars(
        requests,
        "Requests/s, 32 connections",
        [
            ("bare echo", echo, BARE),
            ("bare proxy", middle("proxy_per_s"), BARE),
            ("Penstock", middle("gateway_per_s"), OURS),
        ],
        f"{result.requests_ratio:.3f} of the echo (aim {AIM_RATIO:g}), "
        f"{result.requests_ratio_to_proxy:.2f} of the proxy",
    )
    _mark(requests, REQUIRED_RATIO * echo)
    _bars(
        latency,
        "Latency at concurrency 1, p50 µs",
        [
            ("bare echo", middle("echo_c1_p50_us"), BARE),
            ("bare proxy", middle("proxy_c1_p50_us"), BARE),
            ("Penstock", middle("gateway_c1_p50_us"), OURS),
        ],
        f"{result.added_ms:.2f} ms added to the echo",
    )
    _mark(latency, middle("echo_c1_p50_us") + 1e3 * MOST_ADDED_MS)
    loop = middle("loop_tokens_per_s")
    _bars(
        tokens,
        f"Streamed tokens/s, {result.num_streams} streams",
        [
            ("bare loop", loop, BARE),
            ("Penstock,\na token a chunk", middle("in_step_tokens_per_s"), OURS),
            ("Penstock,\nmerged", middle("flood_tokens_per_s"), BARE),
        ],
        f"{result.stream_ratio:.2f} of the loop; merged: {middle('flood_tokens_per_chunk'):.0f} tokens a chunk",
    )
    _mark(tokens, REQUIRED_STREAM_RATIO * loop, share=0.66)
    figure.savefig(path)


def _bars(ax: Any, title: str, bars: list[tuple[str, float, str]], note: str) -> None:
    ax.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=24)
    ax.text(0.0, 1.03, note, transform=ax.transAxes, fontsize=9.5, color=MUTED)
    names, values, colors = zip(*bars, strict=True)
    drawn = ax.bar(names, values, color=colors, width=0.62)
    ax.bar_label(drawn, labels=[f"{value:,.0f}" for value in values], padding=3, fontsize=10, color=INK)
    ax.grid(True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9.5, colors=MUTED, length=0)
    ax.set_ylim(0, 1.12 * max(values))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(GRID)


def _mark(ax: Any, value: float, share: float = 1.0) -> None:
    """What is required, over the left ``share`` of the bars."""
    ax.axhline(value, xmax=share, color=MARK, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.1 * value))
