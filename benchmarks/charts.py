"""Draws the figures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from peers import OURS
from scaling import MEMCPY, TWO_THREADS

# The same colour for a method in every picture; chosen to be told apart without seeing red and green alike.
COLOURS = {
    OURS: "#0072b2",
    TWO_THREADS: "#56b4e9",
    "floor": "#444444",
    MEMCPY: "#444444",
    "fabric": "#d55e00",
    "accelerate": "#cc79a7",
    "optree": "#e69f00",
    "pytree": "#b8860b",
    ".to": "#009e73",
    ".float": "#7fc8a9",
    "_foreach_copy_": "#8c6bb1",
}
DASHED = {"floor", MEMCPY}
PART_COLOURS = {
    "module": "#c9ced6",
    "call": "#8d99ae",
    "autocast": "#e69f00",
    "input walk": "#0072b2",
    "output walk": "#d55e00",
}
SETTINGS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "font.size": 10,
}
pyplot.rcParams.update(SETTINGS)
PLAIN_NUMBERS = FuncFormatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}")


def finish(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def label(name: str) -> str:
    """Return the name as a legend shows it: matplotlib leaves out those that begin with an underscore."""
    return name.strip("_")


def ratios(results: list[dict[str, Any]], names: list[str], file: Path) -> None:
    """Dots at how many times longer each peer takes, a row for each case; a bar marks what is aimed at."""
    shown = [result for result in results if "-to-" not in result["case"]]
    others = [name for name in names if name != OURS]
    figure, axes = pyplot.subplots(figsize=(10, 0.36 * len(shown) + 1.4), layout="constrained")
    for row, result in enumerate(shown):
        every = [method["ratio"] for method in result["methods"].values()]
        axes.plot([min(every), max(every)], [row, row], color="#c9ced6", lw=3, zorder=1, solid_capstyle="round")
        for name, target in result["targets"].items():
            axes.plot([target, target], [row - 0.32, row + 0.32], color=COLOURS[name], lw=1.6, zorder=2)
    for name in others:
        points = [(r["methods"][name]["ratio"], row) for row, r in enumerate(shown) if name in r["methods"]]
        if points:
            axes.scatter(*zip(*points, strict=True), s=42, color=COLOURS.get(name), label=label(name), zorder=3)
    axes.set_yticks(range(len(shown)), [result["case"] for result in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.axvline(1, color=COLOURS[OURS], linewidth=1.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"times longer than {OURS}, which is the line at 1 (upright bars: aimed at, by colour)")
    figure.legend(loc="outside upper center", ncols=len(others), handletextpad=0.1, columnspacing=1.2)
    finish(figure, file)


def lines(axes: Axes, rows: list[dict[str, Any]], place: str, figure: Any) -> None:
    """Draw one line a method through what ``figure`` takes from its row, with the middle half of the rounds."""
    for name in rows[0]["methods"]:
        points = [(row[place], *figure(row, row["methods"][name])) for row in rows if name in row["methods"]]
        xs, middle, low, high = zip(*points, strict=True)
        dashes = (4, 3) if name in DASHED else ()
        weight = 2.4 if name == OURS else 1.4
        axes.plot(xs, middle, "o-", ms=3, lw=weight, dashes=dashes, color=COLOURS.get(name), label=label(name))
        axes.fill_between(xs, low, high, color=COLOURS.get(name), alpha=0.15, linewidth=0)


def leaves(rows: list[dict[str, Any]], file: Path) -> None:
    """Nanoseconds a leaf against the number of leaves."""
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")

    def nanoseconds(row: dict[str, Any], method: dict[str, Any]) -> tuple[float, ...]:
        return tuple(1e9 * method[key] / row["leaves"] for key in ("median", "q1", "q3"))

    lines(axes, rows, "leaves", nanoseconds)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.set_xlabel("leaves of 64 elements in a tuple, bfloat16 to float32")
    axes.set_ylabel("ns a leaf")
    figure.legend(loc="outside upper center", ncols=len(rows[0]["methods"]))
    finish(figure, file)


def byte_size(value: float, _: object = None) -> str:
    """Show a power of 1024 as people read it."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def bandwidth(rows: list[dict[str, Any]], file: Path) -> None:
    """Bytes read and written a second against the size of one leaf."""
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")

    def gigabytes(row: dict[str, Any], method: dict[str, Any]) -> tuple[float, ...]:
        return tuple(row["moved_bytes"] / method[key] / 1e9 for key in ("median", "q3", "q1"))

    lines(axes, rows, "output_bytes", gigabytes)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["output_bytes"] for row in rows])
    axes.xaxis.set_major_formatter(FuncFormatter(byte_size))
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of the output, one leaf, bfloat16 to float32")
    axes.set_ylabel("GB/s read and written")
    axes.legend()
    finish(figure, file)


def wrapped(rows: list[dict[str, Any]], file: Path) -> None:
    """Stacked parts of one wrapped forward, a panel for each model."""
    figure, panels = pyplot.subplots(1, len(rows), figsize=(5.4 * len(rows), 3.2), layout="constrained", squeeze=False)
    for axes, row in zip(panels[0], rows, strict=True):
        names = list(row["stacks"])
        start = [0.0] * len(names)
        for part, colour in PART_COLOURS.items():
            # A part that is lost in the noise may come out below nothing; the file of figures keeps it.
            widths = [max(0.0, 1e6 * row["stacks"][name].get(part, 0.0)) for name in names]
            axes.barh(names, widths, 0.6, left=start, color=colour, label=part)
            start = [a + b for a, b in zip(start, widths, strict=True)]
        for place, name in enumerate(names):
            whole = 1e6 * sum(row["stacks"][name].values())
            axes.text(start[place], place, f" {whole:.1f}", va="center", fontsize=9)
        axes.set_xlim(0, 1.15 * max(start))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("us a forward")
        axes.set_title(row["model"], fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    finish(figure, file)
