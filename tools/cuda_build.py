"""Decides whether the CUDA kernels are built, and with which toolkit. Used by setup.py; imports nothing of torch.

The decision never asks for a device: wheels are built in containers and on machines that have none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

MODES = ("auto", "1", "0")

# What each release of the toolkit compiles for, newest first. The last architecture is built as PTX too.
ARCHITECTURES = (
    ((12, 8), "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
    ((12, 0), "7.5;8.0;8.6;8.9;9.0+PTX"),
    ((11, 8), "7.5;8.0;8.6;8.9;9.0+PTX"),
)


class Toolkit(NamedTuple):
    """A CUDA toolkit: its folder and release."""

    home: Path
    release: tuple[int, int]


class Decision(NamedTuple):
    """Whether CUDA is built; if so with which toolkit, else why not."""

    toolkit: Toolkit | None
    reason: str


class CudaWanted(Exception):
    """LITE_EXT_CUDA=1 asks for kernels that cannot be built; the message says why and what to set."""


def _home_of(nvcc: Path) -> Path | None:
    """Return the toolkit of an ``nvcc``, which may be a script that calls the real one elsewhere."""
    try:
        shown = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError:
        return None
    found = re.search(r"^#\$ _HERE_=(.*)$", shown.stderr + shown.stdout, re.MULTILINE)
    return Path(found[1]).parent if found else None


def _release(home: Path) -> tuple[int, int] | None:
    try:
        shown = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", shown.stdout)
    return (int(found[1]), int(found[2])) if found else None


def find_toolkit() -> Toolkit | str:
    """Return the toolkit, or a sentence that says what was looked for and where."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if named:
        homes = [Path(named)]
        looked = f"CUDA_HOME={named}"
    else:
        homes = [home for home in [on_path and _home_of(Path(on_path)), Path("/usr/local/cuda")] if home]
        looked = "CUDA_HOME (not set), nvcc on PATH and /usr/local/cuda"
    for home in homes:
        release = _release(home)
        if release is not None and (home / "include" / "cuda_runtime.h").exists():
            return Toolkit(home, release)
    return (
        f"no CUDA toolkit with bin/nvcc and include/cuda_runtime.h was found (looked at: {looked}); "
        "set CUDA_HOME to the folder of a toolkit"
    )


def decide(torch_version: str, torch_cuda: str | None, mode: str | None = None) -> Decision:
    """Return what to build for a torch of this version that was built with this CUDA.

    Args:
        torch_version: Such as ``"2.14.1+cu130"``.
        torch_cuda: ``torch.version.cuda``; ``None`` for a CPU build.
        mode: ``"auto"``, ``"1"`` (CUDA or an error) or ``"0"`` (no CUDA); ``LITE_EXT_CUDA`` unless given.

    Raises:
        CudaWanted: The mode is ``"1"`` and CUDA cannot be built, or the mode is not known.
    """
    mode = os.environ.get("LITE_EXT_CUDA", "auto") if mode is None else mode
    if mode not in MODES:
        raise CudaWanted(f"LITE_EXT_CUDA={mode!r} is not known; use one of: {', '.join(MODES)}")
    if mode == "0":
        return Decision(None, "LITE_EXT_CUDA=0")
    if torch_cuda is None:
        decision = Decision(None, f"torch {torch_version} was built without CUDA")
    else:
        decision = _with_toolkit(torch_version, torch_cuda)
    if mode == "1" and decision.toolkit is None:
        raise CudaWanted(f"LITE_EXT_CUDA=1, but {decision.reason}")
    return decision


def _with_toolkit(torch_version: str, torch_cuda: str) -> Decision:
    toolkit = find_toolkit()
    if isinstance(toolkit, str):
        return Decision(None, toolkit)
    if toolkit.release[0] != int(torch_cuda.split(".")[0]):
        release = ".".join(map(str, toolkit.release))
        return Decision(
            None,
            f"nvcc in {toolkit.home} is {release} and torch {torch_version} was built with CUDA {torch_cuda}: "
            "set CUDA_HOME to a toolkit of the same major version",
        )
    return Decision(toolkit, f"built with CUDA {'.'.join(map(str, toolkit.release))}")


def default_architectures(release: tuple[int, int]) -> str:
    """Return what TORCH_CUDA_ARCH_LIST should be for a toolkit where it is not set."""
    return next((architectures for since, architectures in ARCHITECTURES if release >= since), "7.5;8.0+PTX")
