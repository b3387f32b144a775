"""`make fuzz N=20000 SEED=1`: runs that many random cases in all processors and prints what it ran.

Case number 7 of seed 1 is the same on every machine: `make fuzz SEED=1 CASE=7`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
warnings.simplefilter("ignore")

import fuzz
import torch
from backends import load_backend

BATCH = 500  # cases that a process takes at once
MOST_CASES = 10**9  # numbered for one seed


def generate(seed: int, number: int) -> fuzz.Case:
    return fuzz.Generator(seed * MOST_CASES + number).case()


def failure(case: fuzz.Case) -> str:
    """The traceback of a case that fails, or nothing."""
    try:
        fuzz.check(**case)
    except Exception:  # of any kind: it is what the fuzzer looks for
        return traceback.format_exc()
    return ""


def _start() -> None:
    load_backend("native")


def run(seed: int, numbers: range) -> str:
    """Run the cases of these numbers; return a report of the first one that fails, shrunk, or nothing."""
    for number in numbers:
        torch.set_num_threads(2 if number % 8 == 0 else 1)  # two cost a machine with few cores more than they find
        case = generate(seed, number)
        if failure(case):
            least = fuzz.shrink(case, lambda case: bool(failure(case)))
            code = "\n".join(f"    {name}={value!r}," for name, value in least.items())
            return f"{failure(least)}\nfuzz.check(\n{code}\n)\nreproduce it with: make fuzz SEED={seed} CASE={number}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    chosen = parser.parse_args()

    first, end = (0, chosen.cases) if chosen.case is None else (chosen.case, chosen.case + 1)
    batches = [range(at, min(at + BATCH, end)) for at in range(first, end, BATCH)]
    print(f"seed {chosen.seed}: {end - first:,} cases", flush=True)
    started, ran = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(min(chosen.processes, len(batches)), _start) as pool:
        for batch, report in zip(batches, pool.imap(functools.partial(run, chosen.seed), batches), strict=True):
            if report:
                print(report)
                return 1
            ran += len(batch)
            rate = ran / (time.monotonic() - started)
            if ran % (40 * BATCH) == 0:
                print(f"{ran:,} cases, {rate:.0f} a second", flush=True)
    print(f"{ran:,} cases without a difference in {time.monotonic() - started:.0f} s: {rate:.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
