"""What the compiled library was built for, compared with the torch that runs, before the library is loaded.

A library built for another torch can abort the process when it is loaded, so the comparison reads a small file that
the build wrote beside it.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

INFO_FILE = Path(__file__).with_name("_build_info.json")

_REBUILD = (
    "Rebuild it: pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir lite_ext "
    "(in a checkout: . for the name)"
)


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _cuda_major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]


def read_info(file: Path = INFO_FILE) -> dict[str, Any]:
    """Return what the build wrote, or raise ``ImportError`` where nothing was built."""
    try:
        info: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ImportError(
            f"lite_ext is not compiled in {file.parent}: run pip install --no-build-isolation -e . there, "
            "or leave that folder if lite_ext is installed elsewhere"
        ) from None
    return info


def check(info: dict[str, Any] | None = None) -> None:
    """Raise ``ImportError`` if the library was built for another torch, C++ ABI, CUDA or Python."""
    built = read_info() if info is None else info
    same = (
        _minor(built["torch"]) == _minor(torch.__version__)
        and _cuda_major(built["cuda"]) == _cuda_major(torch.version.cuda)
        and built["cxx11_abi"] == torch.compiled_with_cxx11_abi()
        and built["python"] == sys.implementation.cache_tag
    )
    if not same:
        abi = "C++11 ABI" if torch.compiled_with_cxx11_abi() else "old C++ ABI"
        built_abi = "C++11 ABI" if built["cxx11_abi"] else "old C++ ABI"
        raise ImportError(
            f"lite_ext was compiled for torch {built['torch']} (CUDA {built['cuda']}, {built_abi}, {built['python']}); "
            f"this is torch {torch.__version__} (CUDA {torch.version.cuda}, {abi}, {sys.implementation.cache_tag}). "
            f"{_REBUILD}"
        )


def version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("lite_ext")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def build_info() -> dict[str, Any]:
    """Return what this installation is: versions, kernels and the backend in use.

    Returns:
        A dict of plain values: ``version``, ``backend`` (``"native"`` or ``"python"``), ``torch`` (the one running),
        ``built_for`` (torch, CUDA, C++ ABI and Python of the build, and its kernels; ``None`` for the Python backend),
        ``cpu_level`` (the instruction set of the CPU kernels) and ``pool`` (see :func:`lite_ext.pool_stats`).

    Example:
        >>> build_info()["backend"]
        'native'
    """
    from lite_ext import _backend  # the library is loaded after this module

    native = _backend.native
    info: dict[str, Any] = {
        "version": version(),
        "backend": _backend.NAME,
        "torch": torch.__version__,
        "built_for": None if native is None else read_info(),
    }
    if native is not None:
        info["cpu_level"] = native.cpu_level()
        info["pool"] = native.pool_stats()
    return info
