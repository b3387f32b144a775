"""Decides what to build; metadata and tool settings are in pyproject.toml."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent

try:
    import torch
except ImportError as error:
    sys.exit(
        f"lite_ext is compiled against the torch you will run it with, and no torch can be imported here ({error}). "
        "Install torch first, then build without isolation: pip install --no-build-isolation ."
    )

from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # debug information makes the library twenty times larger
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Werror",
]
GIB = 1024**3


def sources() -> list[str]:
    lines = (ROOT / "csrc" / "sources.txt").read_text().splitlines()
    return [f"csrc/{line}" for line in lines if line and not line.startswith("#")]


def check_cuda_wish() -> None:
    """LITE_EXT_CUDA=1 asks for kernels that this torch cannot run: say so rather than build without them."""
    if os.environ.get("LITE_EXT_CUDA") == "1" and torch.version.cuda is None:
        sys.exit(f"LITE_EXT_CUDA=1, but torch {torch.__version__} was built without CUDA")


def parallel_flags() -> list[str]:
    """OpenMP if torch uses it. It is not linked: its symbols resolve to the runtime that libtorch_cpu has loaded."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "Config.h"
    uses_openmp = re.search(r"#define AT_PARALLEL_OPENMP 1", header.read_text()) is not None
    return ["-fopenmp"] if uses_openmp and sys.platform == "linux" else []


def system_includes() -> list[str]:
    """torch's and Python's headers as system headers, so that warnings are errors in our files only."""
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    return [part for folder in folders for part in ("-isystem", folder)]


def limit_jobs() -> None:
    """A file takes up to 2 GB to compile: without a limit, ninja starts more of them than small machines hold."""
    if "MAX_JOBS" not in os.environ:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, memory // (2 * GIB))))


class Build(BuildExtension):
    def initialize_options(self) -> None:
        super().initialize_options()
        # setuptools makes a new temporary folder for each editable install, and would compile everything again.
        tag = re.sub(r"[^\w.]", "_", f"{torch.__version__}-{sys.implementation.cache_tag}")
        self.build_temp = str(ROOT / "build" / f"temp-{tag}")

    def build_extensions(self) -> None:
        limit_jobs()
        # -I would turn torch's warnings into our errors; the same folders are given as system folders above.
        for extension in self.extensions:
            extension.include_dirs = []
        self.compiler.include_dirs = []
        super().build_extensions()
        self.write_build_info()

    def write_build_info(self) -> None:
        info = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cxx11_abi": torch.compiled_with_cxx11_abi(),
            "python": sys.implementation.cache_tag,
            "kernels": ["cpu"],
        }
        text = json.dumps(info, indent=2) + "\n"
        # An editable install copies the library itself into the source folder, but no file beside it.
        in_source = self.inplace or getattr(self, "editable_mode", False)
        folder = ROOT / "lite_ext" if in_source else Path(self.build_lib) / "lite_ext"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build_info.json").write_text(text)


check_cuda_wish()
setup(
    ext_modules=[
        CppExtension(
            "lite_ext._C",
            sources(),
            extra_compile_args={"cxx": [*CXX_FLAGS, *parallel_flags(), *system_includes()]},
            extra_link_args=["-s"],
        )
    ],
    cmdclass={"build_ext": Build},
)
