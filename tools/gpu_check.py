"""Everything that only a GPU can tell, in one command: build, tests, compute-sanitizer, benchmarks.

    python tools/gpu_check.py [--out docs/gpu] [--no-build]

Ends within eight minutes. Fails where the build, a test or the sanitizer does, and where a test is skipped for another
reason than the machine's own. Without a CUDA device it says so, counts the tests left out, and ends well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 480.0  # seconds, for all steps together
TOOLS = ("memcheck", "racecheck", "initcheck")

# Tests that run under the sanitizer: every pair, every misalignment, no profiler (both cannot watch at once).
SHORT_SET = "test_every_pair or test_lengths_and_misaligned_sources or test_sources_may_die"

# What a machine may rightly lack; anything else that is skipped was not tested.
RIGHTLY_SKIPPED = (
    "one CUDA device, two are needed",
    "less than 16 GiB of device memory are free",
    "lite_ext was built with CUDA",
)

PYTEST = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-rs", "-p", "no:cacheprovider", "tests/cuda"]


class Steps:
    """Runs commands one after another until the deadline, and remembers how each ended."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.ends: list[tuple[str, str]] = []
        self.failed = False

    def run(self, name: str, command: list[str], **environment: str) -> str:
        """Run a command, show what it prints as it ends, and return it."""
        left = DEADLINE - (time.monotonic() - self.begin)
        print(f"\n=== {name}: {' '.join(command)}", flush=True)
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(1.0, left),
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            text = output.decode() if isinstance(output, bytes) else output
            print(text)
            self.end(name, f"stopped after {left:.0f} s: out of time", failed=True)
            return text
        print(done.stdout)
        self.end(name, "passed" if done.returncode == 0 else f"FAILED, status {done.returncode}", done.returncode != 0)
        return done.stdout

    def end(self, name: str, how: str, failed: bool = False) -> None:
        self.ends.append((name, how))
        self.failed = self.failed or failed


def count(word: str, text: str) -> int:
    """The number before a word in pytest's last line."""
    found = re.findall(rf"(\d+) {word}", text)
    return int(found[-1]) if found else 0


def wrongly_skipped(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("SKIPPED")]
    return [line for line in lines if not line.endswith(RIGHTLY_SKIPPED)]


def without_device() -> int:
    done = subprocess.run(PYTEST, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0 or count("passed", done.stdout):
        print(done.stdout + done.stderr)
        return 1
    print(f"no CUDA device: {count('skipped', done.stdout)} tests were skipped, and nothing was measured")
    return 0


def sanitize(steps: Steps) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        steps.end("compute-sanitizer", "NOT RUN: it is not on PATH")
        return
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        # Allocations of torch's pool lie in larger ones, whose bounds are all that the sanitizer knows.
        steps.run(tool, [*command, *PYTEST, "-k", SHORT_SET], PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu", help="the folder for figures")
    parser.add_argument("--no-build", action="store_true", help="test what is installed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        return without_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    steps = Steps()
    if not options.no_build:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "-e", "."]
        steps.run("build", install, LITE_EXT_CUDA="1")
    if not steps.failed:
        tests = steps.run("tests", PYTEST)
        for line in wrongly_skipped(tests):
            steps.end("tests", f"FAILED: {line}", failed=True)
        bench = [sys.executable, "benchmarks/gpu.py", "--out", str(options.out)]
        steps.run("benchmarks", bench)
        sanitize(steps)
    print("\n=== summary")
    for name, how in steps.ends:
        print(f"{name}: {how}")
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main())
