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
sys.path.insert(0, str(ROOT / "tools"))

from build_checks import CannotBuild, check_compiler, check_ninja, check_python_headers  # noqa: E402
from cuda_build import CudaWanted, decide, default_architectures  # noqa: E402

try:
    import torch
except ImportError as error:
    sys.exit(
        f"lite_ext is compiled against the torch you will run it with, and no torch can be imported here ({error}). "
        "Install torch first, then build without isolation: pip install --no-build-isolation ."
    )

try:
    CUDA = decide(torch.__version__, torch.version.cuda)
except CudaWanted as error:
    sys.exit(str(error))
if CUDA.toolkit is not None:
    # Before torch guesses: it takes the parent of an nvcc on PATH, which may be a script that calls the real one.
    os.environ["CUDA_HOME"] = str(CUDA.toolkit.home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(CUDA.toolkit.release))

from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    CUDAExtension,
    get_cxx_compiler,
    include_paths,
)

GIB = 1024**3
TAG = re.sub(r"[^\w.]", "_", f"{torch.__version__}-{sys.implementation.cache_tag}")

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
NVCC_FLAGS = ["-std=c++20", "-O3", "--threads=2", "-Werror=all-warnings", "-Xcompiler=-fvisibility=hidden"]


def version() -> str:
    """What pyproject.toml leaves to this file: a wheel to be handed on says what it was compiled for.

    Only where asked for by LITE_EXT_LOCAL_LABEL=1, as `make wheel` does: package indexes refuse such versions.
    """
    plain = (ROOT / "VERSION").read_text().strip()
    if os.environ.get("LITE_EXT_LOCAL_LABEL", "0") != "1":
        return plain
    device = "cpu" if CUDA.toolkit is None else "cu" + "".join(torch.version.cuda.split(".")[:2])
    return f"{plain}+{device}.torch{''.join(torch.__version__.split('+')[0].split('.')[:2])}"


def listed(name: str) -> list[str]:
    lines = (ROOT / "csrc" / name).read_text().splitlines()
    return [f"csrc/{line}" for line in lines if line and not line.startswith("#")]


def parallel_flags() -> list[str]:
    """OpenMP if torch uses it. It is not linked: its symbols resolve to the runtime that libtorch_cpu has loaded."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "Config.h"
    uses_openmp = re.search(r"#define AT_PARALLEL_OPENMP 1", header.read_text()) is not None
    return ["-fopenmp"] if uses_openmp and sys.platform == "linux" else []


def system_includes() -> list[str]:
    """The headers of torch, Python and CUDA as system headers, so that warnings are errors in our files only."""
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    if CUDA.toolkit is not None:
        folders.append(str(CUDA.toolkit.home / "include"))
    return [part for folder in folders for part in ("-isystem", folder)]


def limit_jobs() -> None:
    """A file takes up to 2 GB to compile: without a limit, ninja starts more of them than small machines hold."""
    if "MAX_JOBS" not in os.environ:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, memory // (2 * GIB))))


def extension() -> CppExtension:
    cxx = [*CXX_FLAGS, *parallel_flags(), *system_includes()]
    if CUDA.toolkit is None:
        return CppExtension(
            "lite_ext._C", listed("sources.txt"), extra_compile_args={"cxx": cxx}, extra_link_args=["-s"]
        )
    return CUDAExtension(
        "lite_ext._C",
        [*listed("sources.txt"), *listed("sources_cuda.txt")],
        extra_compile_args={"cxx": [*cxx, "-DLITE_EXT_WITH_CUDA"], "nvcc": NVCC_FLAGS},
        extra_link_args=["-s"],
    )


class Build(BuildExtension):
    def initialize_options(self) -> None:
        super().initialize_options()
        # A folder for each torch, the same every time: setuptools makes new ones and would compile everything again.
        self.build_temp = str(ROOT / "build" / TAG)

    def finalize_options(self) -> None:
        super().finalize_options()
        # ninja knows what has to be compiled; setuptools would keep a library of another torch because it is newer.
        self.force = True

    def build_extensions(self) -> None:
        try:
            check_ninja()
            check_python_headers()
            check_compiler(get_cxx_compiler())
        except CannotBuild as error:
            sys.exit(str(error))
        limit_jobs()
        # -I would turn torch's warnings into our errors; the same folders are given as system folders above.
        for built in self.extensions:
            built.include_dirs = []
        self.compiler.include_dirs = []
        super().build_extensions()
        self.write_build_info()

    def write_build_info(self) -> None:
        info = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cxx11_abi": torch.compiled_with_cxx11_abi(),
            "python": sys.implementation.cache_tag,
            "kernels": ["cpu"] if CUDA.toolkit is None else ["cpu", "cuda"],
            "cuda_decision": CUDA.reason,
            "cuda_architectures": os.environ["TORCH_CUDA_ARCH_LIST"] if CUDA.toolkit is not None else None,
        }
        text = json.dumps(info, indent=2) + "\n"
        # An editable install copies the library itself into the source folder, but no file beside it.
        in_source = self.inplace or getattr(self, "editable_mode", False)
        folder = ROOT / "lite_ext" if in_source else Path(self.build_lib) / "lite_ext"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build_info.json").write_text(text)


setup(version=version(), ext_modules=[extension()], cmdclass={"build_ext": Build})
