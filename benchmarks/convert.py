"""Time ``lite_ext.convert`` beside everything else that converts a tree.

    python benchmarks/convert.py [--only hf-74 tuple-1000/noop] [--rounds 11] [--threads 1] [--floor] [--json FILE]

One core is pinned, the garbage collector is on, and the rounds of all methods are interleaved, so that
whatever else the machine does falls on all of them. A ratio is how many times longer a method takes than
lite_ext, in medians of this run; the targets stand beside the ratios to Fabric and optree. A slow run is not an error:
the exit status is about correctness only, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import Case, all_cases
from measure import Method, environment, markdown, pin, statistics, time_rounds
from memory import LIMIT, report
from peers import OURS, Peer, all_peers, check_equal

import lite_ext

WITH_TARGET = ("fabric", "optree")  # the peers whose column has one of targets beside it


def time_case(
    case: Case, peers: list[Peer], rounds: int, threads: int, tick: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds a call of every peer, one figure a round, rounds interleaved."""
    tree = case.make()
    methods = {
        peer.name: Method("convert(tree, dtype)", {"convert": peer.convert, "tree": tree, "dtype": case.dtype})
        for peer in peers
    }
    return time_rounds(methods, rounds, threads, tick)


def summary(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, quartiles and ratios of one case."""
    methods = {name: statistics(values) for name, values in seconds.items()}
    ours = methods[OURS]["median"]
    for method in methods.values():
        method["ratio"] = method["median"] / ours
    return {"case": case.name, "targets": case.targets, "methods": methods}


def cell(method: dict[str, Any] | None) -> str:
    """Show a ratio, or a dash for a method that does not do the case."""
    if method is None:
        return "-"
    return f"{method['ratio']:.2f}" if method["ratio"] < 10 else f"{method['ratio']:,.1f}"


def speed_table(results: list[dict[str, Any]], names: list[str]) -> str:
    """Return the table of times and ratios."""
    others = [name for name in names if name != OURS]
    header = ["case", f"{OURS} us", "spread"]
    for name in others:
        header += [name, "target"] if name in WITH_TARGET else [name]
    rows = []
    for result in results:
        methods = result["methods"]
        mine = methods[OURS]
        spread = 100 * (mine["q3"] - mine["q1"]) / mine["median"]
        row = [result["case"], f"{1e6 * mine['median']:,.2f}", f"{spread:.0f} %"]
        for name in others:
            row.append(cell(methods.get(name)))
            if name in WITH_TARGET:
                target = result["targets"].get(name)
                row.append("-" if target is None else f"{target:g}")
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
    parser.add_argument("--floor", action="store_true", help="also the floor, compiled on first use")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args(arguments)

    cases = choose(options.only, options.many)
    peers, missing = all_peers(options.floor)
    facts = environment(pin(options.threads), options.threads)
    facts |= {"peers": {peer.name: peer.version for peer in peers}, "missing": missing}
    print(
        f"{facts['cpu']}, {options.threads} thread(s), Python {facts['python']}, torch {facts['torch']}, "
        f"lite_ext {lite_ext.__version__} ({facts['lite_ext']['backend']} backend)"
    )
    if missing:
        print(f"not compared: {', '.join(missing)}")
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
