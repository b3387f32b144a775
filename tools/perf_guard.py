"""Compare the instructions that a few conversions take with the figures in tools/perf_guard.json.

    python tools/perf_guard.py [--update]

callgrind counts; a clock does not come into it, so a busy machine changes nothing. What is counted starts once a
conversion is warm and ends before the interpreter does: see `--count`, which is what runs under valgrind. Counts depend
on the compiler, on torch and on what the processor can do, so they are compared only where these are as stored.
`--update` stores the counts of this run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tools" / "perf_guard.json"
TOLERANCE = 0.05
CASES = ("tuple-1000", "tuple-1000/noop", "hf-74", "detections-100/noop")
WARM_UP, CALLS = 3, 20

# valgrind answers these requests of the program itself; run without valgrind they do nothing.
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def count(requests: str) -> None:
    """Run the cases between requests to callgrind, and print what the processor of valgrind can do."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from cases import all_cases

    import lite_ext

    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = ctypes.CDLL(requests)
    cases = {case.name: case for case in all_cases()}
    for name in CASES:
        tree, dtype, convert = cases[name].make(), cases[name].dtype, lite_ext.convert
        for _ in range(WARM_UP):
            convert(tree, dtype)
        gc.collect()
        gc.disable()  # when it would run next depends on all that ran before
        library.start()
        for _ in range(CALLS):
            convert(tree, dtype)
        library.stop(name.encode())
        gc.enable()
    print(json.dumps({"lite_ext": lite_ext.build_info()["cpu_level"], "torch": torch.__version__}))


def counts_in(folder: Path) -> dict[str, int]:
    """Return the instructions a call of each case, from the files that callgrind wrote."""
    found = {}
    for file in folder.glob("callgrind.out.*"):
        text = file.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (\S+)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if name and total and name[1] in CASES:
            found[name[1]] = round(int(total[1]) / CALLS)
    missing = set(CASES) - set(found)
    if missing:
        raise SystemExit(f"callgrind left no counts of {', '.join(sorted(missing))}")
    return {name: found[name] for name in CASES}


def first_line(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def measure(compiler: str) -> tuple[dict[str, int], dict[str, str]]:
    """Return the counts and what they depend on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requests.c").write_text(REQUESTS)
        requests = folder / "requests.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", requests, folder / "requests.c"], check=True)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        command += [f"--callgrind-out-file={folder}/callgrind.out.%p", sys.executable, __file__, "--count", requests]
        # Hashes of strings decide in what order and how often dicts are probed.
        variables = {**os.environ, "PYTHONHASHSEED": "0", "LITE_EXT_BACKEND": "native", "OMP_NUM_THREADS": "1"}
        variables.pop("LITE_EXT_POOL", None)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=variables)
        if done.returncode != 0:
            raise SystemExit(f"the conversions failed under valgrind:\n{done.stdout}{done.stderr}")
        running = json.loads(done.stdout.splitlines()[-1])
        counts = counts_in(folder)
    return counts, {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": running["torch"],
        "cpu_level": running["lite_ext"],
        "compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": first_line("valgrind", "--version"),
    }


def compare(counts: dict[str, int], stored: dict[str, int]) -> tuple[str, list[str]]:
    """Return a table of both, and the cases that take more or fewer instructions than they may."""
    lines, out = [f"{'case':<22}{'stored':>12}{'now':>12}{'change':>9}"], []
    for name, now in counts.items():
        before = stored.get(name)
        if before is None:
            lines.append(f"{name:<22}{'-':>12}{now:>12,}{'-':>9}")
            out.append(name)
            continue
        change = now / before - 1
        lines.append(f"{name:<22}{before:>12,}{now:>12,}{100 * change:>+8.1f}%")
        if abs(change) > TOLERANCE:
            out.append(name)
    return "\n".join(lines), out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="store the counts of this run")
    parser.add_argument("--count", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(options.count)
        return 0
    compiler = shutil.which("cc") or shutil.which("gcc")
    if shutil.which("valgrind") is None or compiler is None:
        print("perf-guard: valgrind or a C compiler is not installed here, so nothing was counted")
        return 0
    counts, environment = measure(compiler)
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {"environment": {}, "counts": {}}
    print("instructions a call")
    table, out = compare(counts, stored["counts"])
    print(table)
    if options.update:
        STORED.write_text(json.dumps({"environment": environment, "counts": counts}, indent=2) + "\n")
        print(f"stored in {STORED.relative_to(ROOT)}")
        return 0
    differs = {name: value for name, value in environment.items() if stored["environment"].get(name) != value}
    if differs:
        for name, value in differs.items():
            print(f"perf-guard: {name} is {value!r} here and was {stored['environment'].get(name)!r}")
        print("perf-guard: not compared, for such counts differ for reasons of their own; --update stores those above")
        return 0
    if out:
        print(
            f"perf-guard: FAILED: {', '.join(out)} changed by more than {TOLERANCE:.0%}. Where that is meant, slower or "
            "faster, run tools/perf_guard.py --update and commit tools/perf_guard.json"
        )
        return 1
    print(f"perf-guard: all within {TOLERANCE:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
