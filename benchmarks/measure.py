"""Times several methods side by side: what all benchmarks share."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

import lite_ext

SECONDS_A_ROUND = 0.02  # of one method: long enough for the clock, short enough to interleave


class Method(NamedTuple):
    """What is timed: a statement, and the names in it."""

    statement: str
    names: dict[str, Any]


def pin(threads: int) -> list[int]:
    """Bind this process to ``threads`` cores and return them."""
    torch.set_num_threads(threads)
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cores)
    return cores


def time_rounds(
    methods: dict[str, Method],
    rounds: int,
    threads: int = 1,
    tick: Callable[[], None] = lambda: None,
    seconds_a_round: float = SECONDS_A_ROUND,
) -> dict[str, list[float]]:
    """Return the seconds a call of every method, one figure a round, rounds interleaved.

    Args:
        methods: What is timed, by name.
        rounds: How many figures of each.
        threads: The threads that torch may use.
        tick: Called after each round, for a progress bar.
        seconds_a_round: How long a round of one method takes, about.
    """
    # timeit turns the collector off, so the setup turns it on.
    timers = {
        name: Timer(method.statement, "import gc; gc.enable()", globals=method.names, num_threads=threads)
        for name, method in methods.items()
    }
    numbers = {}
    for name, timer in timers.items():
        once = timer.timeit(1).mean
        if once < seconds_a_round:  # the first figure holds what only first calls do
            once = timer.timeit(3).mean
        numbers[name] = max(1, round(seconds_a_round / once))
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    for turn in range(rounds):
        # Starting at another method each round keeps one from always following the same neighbour.
        start = turn % len(order)
        for name in order[start:] + order[:start]:
            seconds[name].append(timers[name].timeit(numbers[name]).mean)
        tick()
    return seconds


def statistics(values: list[float]) -> dict[str, Any]:
    """Return the median and the spread of the rounds of one method, in seconds."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    figures = {"median": median(values), "q1": low, "q3": high, "min": min(values)}
    return {**figures, "rounds": [float(f"{value:.4g}") for value in values]}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table whose columns line up as plain text too."""
    rule = ["-"] * len(header)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, rule, *rows]:
        fill = "-" if row is rule else " "
        cells = [
            c.ljust(w, fill) if i == 0 else c.rjust(w, fill) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        # The colon keeps figures to the right where the table is rendered.
        cells = [c[:-1] + ":" if row is rule and i else c for i, c in enumerate(cells)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def environment(cores: list[int], threads: int) -> dict[str, Any]:
    """Return what a reader needs to know of the machine and the versions."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(": ")[1] for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": cores,
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lite_ext": lite_ext.build_info(),
    }
