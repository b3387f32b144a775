"""Compile the CUDA kernel for every architecture and hold what ptxas reports against the limits.

    python tools/check_cuda_kernel.py [--arch 80 90] [--max-registers 40] [--report FILE]

Needs nvcc, but neither torch nor a GPU. Fails where nvcc warns, where a thread needs more registers than the limit,
where anything is spilled to memory, or where one of the three kernels is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "csrc" / "cast" / "cuda" / "cast_cuda.cu"
OLDEST, NEWEST = 75, 120
CAPACITIES = (16, 146, 1150)

# As in a build: torch's extensions define the last four.
FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Werror",
    "all-warnings",
    "-Xcompiler=-fPIC,-Wall,-Wextra",
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?:sm|compute)_(?P<arch>\d+)\w?'")
STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
CAPACITY = re.compile(r"cast_kernelILj(\d+)E")


class Kernel(NamedTuple):
    """What ptxas says of one kernel on one architecture."""

    arch: int
    capacity: int
    registers: int
    stack: int
    spilled: int


def find_nvcc() -> str | None:
    """The nvcc of the toolkit that is named, else the one on PATH."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            return shutil.which("nvcc", path=str(Path(folder) / "bin"))
    return shutil.which("nvcc")


def architectures(nvcc: str) -> list[int]:
    """Those from the oldest to the newest that this nvcc compiles for; variants with a letter are left out."""
    text = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout
    known = sorted({int(arch) for arch in re.findall(r"\bsm_(\d+)\b", text)})
    return [arch for arch in known if OLDEST <= arch <= NEWEST]


def compile_kernel(nvcc: str, archs: list[int]) -> str:
    """Compile for all ``archs`` at once, and to PTX for the newest; return what ptxas reports."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            nvcc,
            *FLAGS,
            *targets,
            "--threads=2",
            "-Xptxas=-v",
            "-c",
            str(SOURCE),
            "-o",
            f"{folder}/cast_cuda.o",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nnvcc failed")
    return done.stdout + done.stderr


def parse(report: str) -> list[Kernel]:
    """Read ptxas's report: of each kernel the entry, then the stack, then the registers."""
    kernels = []
    entry: re.Match[str] | None = None
    stack: re.Match[str] | None = None
    for line in report.splitlines():
        if found := ENTRY.search(line):
            entry, stack = found, None
        elif found := STACK.search(line):
            stack = found
        elif (found := REGISTERS.search(line)) and entry is not None and stack is not None:
            capacity = CAPACITY.search(entry["name"])
            kernels.append(
                Kernel(
                    arch=int(entry["arch"]),
                    capacity=int(capacity[1]) if capacity else 0,
                    registers=int(found["registers"]),
                    stack=int(stack["stack"]),
                    spilled=int(stack["stores"]) + int(stack["loads"]),
                )
            )
            entry = stack = None
    return sorted(kernels)


def faults(kernels: list[Kernel], archs: list[int], max_registers: int) -> list[str]:
    """What is over the limits, or missing."""
    found = []
    for kernel in kernels:
        name = f"sm_{kernel.arch}, {kernel.capacity} leaves"
        if kernel.registers > max_registers:
            found.append(f"{name}: {kernel.registers} registers, at most {max_registers} are allowed")
        if kernel.stack or kernel.spilled:
            found.append(f"{name}: {kernel.spilled} bytes spilled, {kernel.stack} bytes of stack")
    reported = {(kernel.arch, kernel.capacity) for kernel in kernels}
    wanted = {(arch, capacity) for arch in archs for capacity in CAPACITIES}
    found += [f"sm_{arch}: ptxas reported nothing of {leaves} leaves" for arch, leaves in sorted(wanted - reported)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", help="compute capabilities, such as 80 90 (default: all)")
    parser.add_argument("--max-registers", type=int, default=40, help="of a thread (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="also write the figures to this file, as JSON")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: set CUDA_HOME to a CUDA toolkit, or put its bin folder on PATH", file=sys.stderr)
        return 2
    archs = options.arch or architectures(nvcc)
    kernels = parse(compile_kernel(nvcc, sorted(archs)))
    print("arch    leaves  registers  spilled  stack")
    for kernel in kernels:
        print(f"sm_{kernel.arch:<4} {kernel.capacity:6} {kernel.registers:10} {kernel.spilled:8} {kernel.stack:6}")
    if options.report:
        options.report.write_text(json.dumps([kernel._asdict() for kernel in kernels], indent=2) + "\n")
    wrong = faults(kernels, archs, options.max_registers)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
