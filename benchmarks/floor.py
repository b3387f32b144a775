"""Builds ``floor.cpp`` beside the benchmarks: it is no part of the library."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
TAG = re.sub(r"[^\w.]", "_", f"{torch.__version__}-{sys.implementation.cache_tag}")


def load_floor() -> Callable[[Any, torch.dtype], Any]:
    """Return the floor as a function of (tree, dtype), compiled on first use and kept in the build folder.

    Raises:
        ImportError: It cannot be compiled here; the text says why.
    """
    from torch.utils import cpp_extension

    folder = HERE.parent / "build" / "floor" / TAG
    folder.mkdir(parents=True, exist_ok=True)
    # Where pip put ninja, which is found by name only.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        module = cpp_extension.load(
            "lite_ext_floor",
            [str(HERE / "floor.cpp")],
            extra_cflags=["-O3", "-g0"],
            build_directory=str(folder),
        )
    except (OSError, RuntimeError) as error:
        raise ImportError(f"the floor cannot be compiled: {error}") from error
    make: Callable[[Any, torch.dtype], Any] = module.make
    return make
