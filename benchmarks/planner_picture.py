"""Promises kept as a PNG: for each machine and load, the planner beside class priorities alone and order of arrival."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.planner import Kept

INK, MUTED, GRID = "#1c2b39", "#6b7a88", "#e3e8ec"
COLORS = {"promises": "#2a78b8", "priorities": "#6fa37a", "arrival": "#b9c4cd"}
LABELS = {"promises": "told the promises", "priorities": "told priorities", "arrival": "told nothing"}
TITLES = {"gpu": "8 B on a GPU", "cpu": "0.5 B on two cores", "small": "the same, short of memory"}


def draw(results: list[Kept], path: Path) -> None:
    """Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    machines = list(dict.fromkeys(each.machine for each in results))
    figure = Figure(figsize=(5 * len(machines), 7.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "First tokens and further ones as promised, share of requests: recorded traffic, simulated",
        x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK,
    )  # fmt: skip
    grid = figure.subplots(2, len(machines), squeeze=False)
    for column, machine in enumerate(machines):
        for row, (name, title) in enumerate((("interactive", "interactive"), ("all", "all classes"))):
            axes = grid[row][column]
            for number, (way, color) in enumerate(COLORS.items()):
                own = [each for each in results if each.machine == machine and each.way == way]
                bars = axes.bar(
                    [index + 0.27 * (number - 1) for index in range(len(own))],
                    [100 * each.kept[name] for each in own],
                    width=0.25,
                    color=color,
                    label=LABELS[way],
                )
                axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7, color=MUTED)
            loads = [each.load for each in results if each.machine == machine and each.way == "promises"]
            axes.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
            axes.set_ylim(0, 112)
            axes.set_title(f"{TITLES[machine]}: {title}", loc="left", fontsize=10, color=INK)
            axes.set_axisbelow(True)
            axes.yaxis.grid(True, color=GRID)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0, labelcolor=MUTED, labelsize=8)
            if row:
                axes.set_xlabel("asked for, of what can be served", fontsize=8, color=MUTED)
            else:
                axes.set_ylabel("%", fontsize=8, color=MUTED)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, ncols=3, loc="outside upper right")
    figure.savefig(path)
