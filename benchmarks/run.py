"""Run every benchmark and write the figures, a table and the pictures: ``make bench``.

    python benchmarks/run.py [--rounds 9] [--most-leaves 100000] [--out benchmarks/results]

Takes under five minutes. Results are checked before they are timed, and only a wrong one makes the exit status
non-zero. A peer that is not installed is left out with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import charts
import scaling
import torch
import wrapped
from cases import all_cases
from convert import memory_table, speed_table, summary, time_case
from measure import environment, markdown, pin
from memory import report
from peers import all_peers, check_equal
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

BUSY = 0.95  # of its core: with less, others ran on it, and the figures are rough
WRAPPED_ROUNDS = 20  # times the rounds of the rest, which are longer
PICTURES = {
    "ratios": "Times longer than lite_ext, by case and method",
    "leaves": "Nanoseconds a leaf against the number of leaves",
    "bandwidth": "Bytes read and written a second against the size of one leaf",
    "wrapped": "One wrapped forward, part by part",
}


def write(folder: Path, name: str, figures: Any) -> None:
    """Write one file of figures, shortened to what a measurement can tell."""

    def shorten(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items() if key != "rounds"}
        return [shorten(item) for item in value] if isinstance(value, list) else value

    (folder / f"{name}.json").write_text(json.dumps(shorten(figures), indent=1, default=str) + "\n")


def wrapped_table(rows: list[dict[str, Any]]) -> str:
    """Return the parts of a wrapped forward in microseconds, the whole, and its ratio to plain autocast."""
    header = ["model", "wrapper", *wrapped.PARTS, "whole us", "/ torch.autocast"]
    lines = []
    for row in rows:
        plain = sum(row["stacks"]["torch.autocast alone"].values())
        for who, stack in row["stacks"].items():
            whole = sum(stack.values())
            parts = [f"{1e6 * stack[part]:.1f}" if part in stack else "-" for part in wrapped.PARTS]
            lines.append([row["model"], who, *parts, f"{1e6 * whole:.1f}", f"{whole / plain:.2f}"])
    return markdown(header, lines)


def size_table(rows: list[dict[str, Any]]) -> str:
    """Return the bandwidth in GB/s by the size of a leaf."""
    names = list(rows[0]["methods"])
    header = ["output", *names]
    return markdown(
        header,
        [
            [
                charts.byte_size(row["output_bytes"]),
                *(f"{row['methods'][name]['bytes_a_second'] / 1e9:.1f}" for name in names),
            ]
            for row in rows
        ],
    )


def leaf_table(rows: list[dict[str, Any]]) -> str:
    """Return nanoseconds a leaf by the number of leaves."""
    names = list(rows[0]["methods"])
    return markdown(
        ["leaves", *names],
        [
            [f"{row['leaves']:,}", *(f"{1e9 * row['methods'][name]['median'] / row['leaves']:,.0f}" for name in names)]
            for row in rows
        ],
    )


def page(facts: dict[str, Any], tables: dict[str, str]) -> str:
    """Return the page of all tables."""
    parts = [
        "# One run of `make bench`",
        f"{facts['cpu']}, one core, Python {facts['python']}, torch {facts['torch']}, "
        f"lite_ext {facts['lite_ext']['version']} ({facts['lite_ext']['cpu_level']}). Medians of interleaved rounds, "
        "garbage collector on. Ratios, not microseconds, are what carries over to another machine.",
    ]
    if facts["core_share"] < BUSY:
        parts.append(
            f"**The machine was busy**: these benchmarks had {facts['core_share']:.0%} of their core, and the figures are "
            "rough. Run them again on a machine that does nothing else."
        )
    if facts["missing"]:
        parts.append(f"Not compared: {', '.join(facts['missing'])}.")
    for title, table in tables.items():
        parts += [f"## {title}", table]
    for name, title in PICTURES.items():
        parts.append(f"![{title}]({name}.png)")
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run everything; the exit status is 1 only when a method gives a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every method (default: 9)")
    parser.add_argument(
        "--most-leaves", type=int, default=scaling.LEAVES[-1], help="the largest tree (default: 100,000)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder to write to")
    options = parser.parse_args(arguments)

    console = Console(stderr=True)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with console.status("building the floor"):
        peers, missing = all_peers(with_floor=True)
    facts = environment(pin(1), 1) | {"peers": {peer.name: peer.version for peer in peers}, "missing": missing}
    for name in missing:
        console.print(f"not compared: {name}", highlight=False, markup=False)
    cases = [case for case in all_cases() if not case.optional]
    rounds = options.rounds
    two = len(cores) > 1
    steps = {
        "cases": rounds * len(cases),
        "leaves": scaling.round_count(rounds, options.most_leaves),
        "sizes": rounds * len(scaling.OUTPUT_BYTES) * (1 + two),
        "forwards": rounds * WRAPPED_ROUNDS * len(wrapped.MODELS),
    }
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between rounds only: a thread that draws would take the lock from what is timed.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        tasks = {name: progress.add_task(name, total=total, start=False) for name, total in steps.items()}

        def ticker(name: str) -> Any:
            progress.start_task(tasks[name])

            def tick() -> None:
                progress.advance(tasks[name])
                progress.refresh()

            return tick

        began = time.perf_counter(), time.process_time()
        speed = []
        tick = ticker("cases")
        for case in cases:
            able = [peer for peer in peers if peer.can_run(case)]
            try:
                for peer in able:
                    check_equal(peer, case)
            except ValueError as error:
                console.print(f"FAILED: {error}", markup=False)
                return 1
            speed.append(summary(case, time_case(case, able, rounds, 1, tick)))
        forwards = []
        tick = ticker("forwards")
        for name in wrapped.MODELS:
            forwards.append(wrapped.measure(name, rounds * WRAPPED_ROUNDS, tick))
        leaves = scaling.against_leaves(peers, rounds, ticker("leaves"), options.most_leaves)
        tick = ticker("sizes")
        sizes = scaling.against_size(peers, rounds, tick)
        facts["core_share"] = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
        if two:  # last: threads that were started once stay
            os.sched_setaffinity(0, cores[-2:])
            torch.set_num_threads(2)
            for row, more in zip(sizes, scaling.against_size(peers, rounds, tick, threads=2), strict=True):
                row["methods"] |= more["methods"]
    with console.status("measuring memory"):
        memory = report()

    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    names = [peer.name for peer in peers]
    write(folder, "environment", facts)
    for name, figures in {
        "cases": speed, "leaves": leaves, "bandwidth": sizes, "wrapped": forwards, "memory": memory
    }.items():  # fmt: skip
        write(folder, name, figures)
    charts.ratios(speed, names, folder / "ratios.png")
    charts.leaves(leaves, folder / "leaves.png")
    charts.bandwidth(sizes, folder / "bandwidth.png")
    charts.wrapped(forwards, folder / "wrapped.png")
    tables = {
        "Cases: lite_ext in us a call, the others in times longer": speed_table(speed, names),
        "Nanoseconds a leaf": leaf_table(leaves),
        "GB/s of one leaf, read and written": size_table(sizes),
        "One wrapped forward, us, lower quartiles of short rounds": wrapped_table(forwards),
    }
    if memory:
        tables["Peak memory of one conversion"] = memory_table(memory)
    (folder / "README.md").write_text(page(facts, tables))
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")
    if facts["core_share"] < BUSY:
        console.print(f"the machine was busy: {facts['core_share']:.0%} of a core was had, so the figures are rough")
    console.print(f"written to {folder}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
