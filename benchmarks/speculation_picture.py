"""What guessing gains as a PNG: for each kind of prompts the median of the ratios, and between which it lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

INK, MUTED, GRID = "#1c2b39", "#6b7a88", "#e3e8ec"
KINDS = {"copies": "#2a78b8", "stories": "#6fa37a", "forced": "#8a6fb0", "random": "#b9a06a"}
LABELS = {"copies": "copies", "stories": "stories", "forced": "by a schema", "random": "random prompts"}


def draw(figures: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """``figures``: by kind and title, as Pairs.figures. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(kind, title, told_of) for kind, told in figures.items() for title, told_of in told.items()]
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(rows)), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Tokens a second with guesses, as times of those without", x=0.01, ha="left", fontsize=13, fontweight="bold",
        color=INK,
    )  # fmt: skip
    axes = figure.subplots()
    for kind, color in KINDS.items():
        own = [(place, told_of) for place, (its, _, told_of) in enumerate(rows) if its == kind]
        if not own:
            continue
        times = [told_of["times"] for _, told_of in own]
        spread = [
            [told_of["times"] - told_of["at_least"] for _, told_of in own],
            [told_of["at_most"] - told_of["times"] for _, told_of in own],
        ]
        axes.barh([place for place, _ in own], times, height=0.62, color=color, label=LABELS[kind])
        axes.errorbar(times, [place for place, _ in own], xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for place, told_of in own:
            axes.text(told_of["at_most"] + 0.08, place, f"{told_of['times']:.2f}", va="center", fontsize=8, color=INK)
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [title for _, title, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(told_of["at_most"] for *_, told_of in rows) + 0.7)
    axes.set_axisbelow(True)
    axes.xaxis.grid(True, color=GRID)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=MUTED, labelsize=8)
    axes.set_xlabel("times; lines: where the median lies with a chance of 0.95", fontsize=8, color=MUTED)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path)
