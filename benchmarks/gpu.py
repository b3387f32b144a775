"""Time the fused cast on a CUDA device beside a loop of `.to`, `_foreach_copy_` with its allocations, and a copy.

    python benchmarks/gpu.py [--only small-1000 one-256MB] [--rounds 9] [--out FOLDER]

Rounds of all methods are interleaved; a figure is the median time of a call, host and device together, over calls
enqueued one after another and waited for at the end. Bandwidth counts the bytes read and written. The copy is the same
number of bytes moved from device to device. Results are checked before anything is timed. Writes `gpu.json` and, where
matplotlib is installed, `gpu.png`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import lite_ext

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SECONDS_A_ROUND = 0.03  # of one method
MIB = 2**20

Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """Leaves to convert, and what is aimed at: how many times longer another method should take."""

    make: Callable[[], Tensors]
    targets: dict[str, float]
    target_dtype: torch.dtype = F32


def small(count: int) -> Tensors:
    return [torch.randn(64, device="cuda").to(BF16) for _ in range(count)]


def hf_like() -> Tensors:
    """What a small decoder returns with hidden states and a cache: logits, 13 states, 12 pairs of keys and values."""
    shapes = [(4, 128, 32000), *[(4, 128, 768)] * 13, *[(4, 12, 128, 64)] * 24]
    return [torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes]


def ragged() -> Tensors:
    """Leaves of 1 to 16 Mi elements in three dtypes, 1 GB of sources at most."""
    draw = random.Random(0)
    leaves: Tensors = []
    room = 1_000_000_000
    while True:
        dtype = draw.choice([BF16, F16, torch.float64])
        count = int(2 ** draw.uniform(0, 24))
        room -= count * dtype.itemsize
        if room < 0:
            return leaves
        leaves.append(torch.empty(count, device="cuda", dtype=dtype).normal_())


def one_large(dtype: torch.dtype) -> Tensors:
    return [torch.empty(256 * MIB // dtype.itemsize, device="cuda", dtype=dtype).normal_()]


CASES = {
    "one-small": Case(lambda: small(1), {"to": 1.0}),
    "two-small": Case(lambda: small(2), {"to": 1.0}),
    "small-10": Case(lambda: small(10), {}),
    "small-100": Case(lambda: small(100), {}),
    "small-1000": Case(lambda: small(1000), {"to": 20.0, "foreach": 3.0}),
    "small-5000": Case(lambda: small(5000), {}),
    "hf-like": Case(hf_like, {}),
    "one-256MB": Case(lambda: one_large(BF16), {"to": 1.3, "copy": 0.9}),
    "one-256MB-narrowing": Case(lambda: one_large(F32), {"copy": 0.9}, BF16),
    "ragged-1GB": Case(ragged, {"copy": 0.9}),
}


def by_lite_ext(leaves: Tensors, dtype: torch.dtype) -> Tensors:
    return lite_ext.cast_tensors(leaves, dtype)


def by_to(leaves: Tensors, dtype: torch.dtype) -> Tensors:
    return [leaf.to(dtype) for leaf in leaves]


def by_foreach(leaves: Tensors, dtype: torch.dtype) -> Tensors:
    results = [torch.empty_like(leaf, dtype=dtype) for leaf in leaves]
    torch._foreach_copy_(results, leaves)
    return results


METHODS = {"lite_ext": by_lite_ext, "to": by_to, "foreach": by_foreach}


def moved_bytes(leaves: Tensors, dtype: torch.dtype) -> int:
    return sum(leaf.numel() * (leaf.dtype.itemsize + dtype.itemsize) for leaf in leaves)


def seconds_a_call(run: Callable[[], Any], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def launches(run: Callable[[], Any]) -> int:
    """Kernels that one call launched, as torch's profiler saw them on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if "cast_kernel" in event.key)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return the times of one case in seconds, their ratios and the bandwidth."""
    leaves, dtype = case.make(), case.target_dtype
    expected = by_to(leaves, dtype)
    for method in METHODS.values():
        torch.testing.assert_close(method(leaves, dtype), expected, rtol=0, atol=0, equal_nan=True)
    del expected
    size = moved_bytes(leaves, dtype)
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], Any]] = {
        name: lambda method=method: method(leaves, dtype) for name, method in METHODS.items()
    }
    runs["copy"] = lambda: target.copy_(source)
    calls = {}
    for name, run in runs.items():
        seconds_a_call(run, 3)
        calls[name] = max(2, min(2000, round(SECONDS_A_ROUND / seconds_a_call(run, 3))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds_a_call(run, calls[name]))
    medians = {name: median(values) for name, values in times.items()}
    ratios = {name: value / medians["lite_ext"] for name, value in medians.items()}
    return {
        "leaves": len(leaves),
        "bytes": size,
        "launches": launches(runs["lite_ext"]),
        "seconds": medians,
        "rounds": times,
        "ratios": ratios,
        "bandwidth": {name: size / value for name, value in medians.items()},
        "targets": case.targets,
        "missed": [name for name, aim in case.targets.items() if ratios[name] < aim],
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| case | leaves | launches | lite_ext us | GB/s | to | foreach | copy | aimed at |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, result in results.items():
        ratios = " | ".join(f"{result['ratios'][other]:.2f}" for other in ("to", "foreach", "copy"))
        aims = ", ".join(
            f"{other} {aim:g}{' (missed)' if other in result['missed'] else ''}"
            for other, aim in result["targets"].items()
        )
        lines.append(
            f"| {name} | {result['leaves']} | {result['launches']} | {1e6 * result['seconds']['lite_ext']:,.1f} | "
            f"{result['bandwidth']['lite_ext'] / 1e9:,.0f} | {ratios} | {aims or '-'} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], device: str, file: Path) -> None:
    """Bars of how many times longer the others take; left out where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {file} is not drawn")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for shift, other in enumerate(("to", "foreach", "copy")):
        places = [index + 0.27 * (shift - 1) for index in range(len(results))]
        axes.bar(places, [result["ratios"][other] for result in results.values()], 0.25, label=other)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(results)), list(results), rotation=25, ha="right")
    axes.set_ylabel("time / time of lite_ext")
    axes.set_title(device)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder for gpu.json and gpu.png")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is timed")
        return 0
    if "cuda" not in (lite_ext.build_info()["built_for"] or {"kernels": []})["kernels"]:
        print("lite_ext was built without CUDA", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name()
    results = {name: measure(CASES[name], options.rounds) for name in options.only or CASES}
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print(table(results))
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "results": results}
    (options.out / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, device, options.out / "gpu.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
