"""Time ``lite_ext.convert`` beside everything else that converts a tree.

    python benchmarks/convert.py [--only hf-74 tuple-1000/noop] [--rounds 11] [--threads 1] [--json FILE]

One core is pinned, the garbage collector is on, and the rounds of all methods are interleaved, so that
whatever else the machine does falls on all of them. A ratio is how many times longer a method takes than
lite_ext, in medians of this run; the target stands beside the ratio to Fabric. A slow run is not an error:
the exit status is about correctness only, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from cases import Case, all_cases
from memory import LIMIT, report
from peers import OURS, Peer, all_peers, check_equal
from torch.utils.benchmark import Timer

import lite_ext

SECONDS_A_ROUND = 0.02  # of one method: long enough for the clock, short enough to interleave


def pin(threads: int) -> list[int]:
    """Bind this process to ``threads`` cores and return them."""
    torch.set_num_threads(threads)
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cores)
    return cores


def timer(peer: Peer, case: Case, tree: Any, threads: int) -> Timer:
    """Return a timer of ``peer`` on ``tree``; timeit turns the collector off, so the setup turns it on."""
    names = {"convert": peer.convert, "tree": tree, "dtype": case.dtype}
    return Timer("convert(tree, dtype)", "import gc; gc.enable()", globals=names, num_threads=threads)


def time_case(case: Case, peers: list[Peer], rounds: int, threads: int) -> dict[str, list[float]]:
    """Return the seconds a call of every peer, one figure a round, rounds interleaved."""
    tree = case.make()
    timers = {peer.name: timer(peer, case, tree, threads) for peer in peers}
    numbers = {}
    for name, one in timers.items():
        one.timeit(1)
        numbers[name] = max(1, round(SECONDS_A_ROUND / one.timeit(3).mean))
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    for turn in range(rounds):
        # Starting at another method each round keeps one from always following the same neighbour.
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            seconds[name].append(timers[name].timeit(numbers[name]).mean)
    return seconds


def summary(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, quartiles and ratios of one case."""
    methods = {}
    for name, values in seconds.items():
        low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        methods[name] = {
            "median": median(values),
            "q1": low,
            "q3": high,
            "min": min(values),
            "rounds": values,
        }
    ours = methods[OURS]["median"]
    for method in methods.values():
        method["ratio"] = method["median"] / ours
    return {"case": case.name, "target": case.target, "methods": methods}


def cell(method: dict[str, Any] | None) -> str:
    """Show a ratio, or a dash for a method that does not do the case."""
    return "-" if method is None else f"{method['ratio']:.1f}"


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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_table(results: list[dict[str, Any]], names: list[str]) -> str:
    """Return the table of times and ratios."""
    others = [name for name in names if name != OURS]
    header = ["case", f"{OURS} us", "spread"]
    for name in others:
        header += [name, "target"] if name == "fabric" else [name]
    rows = []
    for result in results:
        methods = result["methods"]
        mine = methods[OURS]
        spread = 100 * (mine["q3"] - mine["q1"]) / mine["median"]
        row = [result["case"], f"{1e6 * mine['median']:,.2f}", f"{spread:.0f} %"]
        for name in others:
            row.append(cell(methods.get(name)))
            if name == "fabric":
                row.append("-" if result["target"] is None else f"{result['target']:g}")
        rows.append(row)
    return markdown(header, rows)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of peaks."""
    header = ["leaves", "method", "outputs MB", "peak MB", "peak / outputs", "aim"]
    return markdown(
        header,
        [
            [
                row["tree"],
                row["method"],
                f"{row['outputs'] / 1e6:.1f}",
                f"{row['peak'] / 1e6:.1f}",
                f"{row['peak'] / row['outputs']:.3f}",
                f"<= {LIMIT}",
            ]
            for row in rows
        ],
    )


def environment(cores: list[int], threads: int, peers: list[Peer], missing: list[str]) -> dict[str, Any]:
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
        "peers": {peer.name: peer.version for peer in peers},
        "missing": missing,
    }


def choose(names: list[str] | None, many: bool) -> list[Case]:
    """Return the cases asked for; those that are optional only when named or with ``many``."""
    cases = all_cases()
    if names is None:
        return [case for case in cases if many or not case.optional]
    unknown = set(names) - {case.name for case in cases}
    if unknown:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in cases)}")
    return [case for case in cases if case.name in names]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 only when a method gives a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run these cases only")
    parser.add_argument("--many", action="store_true", help="also a tuple of 100,000 leaves")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of every method (default: 11)")
    parser.add_argument("--threads", type=int, default=1, help="threads and cores (default: 1)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args(arguments)

    cases = choose(options.only, options.many)
    peers, missing = all_peers()
    facts = environment(pin(options.threads), options.threads, peers, missing)
    print(
        f"{facts['cpu']}, {options.threads} thread(s), Python {facts['python']}, torch {facts['torch']}, "
        f"lite_ext {lite_ext.__version__} ({facts['lite_ext']['backend']} backend)"
    )
    if missing:
        print(f"not installed, so not compared: {', '.join(missing)}")
    results = []
    for case in cases:
        able = [peer for peer in peers if peer.can_run(case)]
        try:
            for peer in able:
                check_equal(peer, case)
        except ValueError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        print(f"  timing {case.name} ...", file=sys.stderr, flush=True)
        results.append(summary(case, time_case(case, able, options.rounds, options.threads)))
    print(
        f"\nlite_ext in us a call (spread: middle half of {options.rounds} rounds); "
        "others in times longer than lite_ext\n"
    )
    print(speed_table(results, [peer.name for peer in peers]))
    rows = [] if options.no_memory else report()
    if rows:
        print("\nPeak memory of one conversion from bfloat16 to float32, above what was resident before\n")
        print(memory_table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": facts, "speed": results, "memory": rows}
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
