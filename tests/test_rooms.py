"""Holds every `#include` and import against the table of rooms: what each part of the project may touch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"


class Room(NamedTuple):
    """Patterns of the files of a room and of the headers they may include; the first room that matches decides."""

    files: str
    may: tuple[str, ...]


STANDARD = r"[a-z_0-9]+"  # the headers of the C++ library are those without a suffix
PROCESSOR = r"immintrin\.h|arm_neon\.h|cpuid\.h|pthread\.h"
DTYPE = r"csrc/dtype\.h"
TILE = r"csrc/cast/(tile|element)\.h"
PLAN = r"csrc/plan/[^/]*\.h"
PYTHON = r"Python\.h|structmember\.h|pybind11/.*"
TORCH = r"ATen/(?!cuda/).*|c10/(?!cuda/).*"
TORCH_CUDA = r"ATen/cuda/.*|c10/cuda/.*"

ROOMS = (
    Room(r"csrc/dtype\.h", ()),
    Room(r"csrc/bindings\.cpp", (r"csrc/.*", PYTHON, TORCH, r"torch/csrc/.*", r"torch/library\.h")),
    Room(r"csrc/(convert|forward|leaf_facts)\.(h|cpp)", (r"csrc/.*", PYTHON, TORCH, r"torch/csrc/.*")),
    Room(r"csrc/autocast\.(h|cpp)", (r"csrc/autocast\.h", TORCH)),
    Room(r"csrc/profile\.(h|cpp)", (r"csrc/profile\.h", TORCH)),
    Room(r"csrc/registered_op\.cpp", (TORCH, r"torch/library\.h")),
    Room(
        r"csrc/tree/leaf\.h",
        (
            DTYPE,
            PYTHON,
            r"csrc/tree/.*",
            r"torch/csrc/autograd/python_variable\.h",
            r"c10/core/ScalarType\.h",
        ),
    ),
    Room(r"csrc/tree/.*", (DTYPE, PYTHON, r"csrc/tree/.*")),
    Room(r"csrc/plan/.*", (DTYPE, PLAN)),
    Room(TILE, (DTYPE, TILE)),
    Room(r"csrc/cast/cpu/.*", (DTYPE, TILE, PLAN, r"csrc/cast/cpu/.*", PROCESSOR, TORCH)),
    Room(
        r"csrc/cast/cuda/launch_cuda\..*",
        (DTYPE, TILE, PLAN, r"csrc/cast/cuda/.*", r"cuda.*", TORCH, TORCH_CUDA),
    ),
    # The kernels, and the headers they share: compiled without torch.
    Room(
        r"csrc/cast/cuda/.*",
        (DTYPE, TILE, PLAN, r"csrc/cast/cuda/.*", r"cuda_(runtime|runtime_api|fp16|bf16)\.h"),
    ),
    Room(r"csrc/autograd/.*", (DTYPE, r"csrc/autograd/.*", r"torch/csrc/autograd/.*", TORCH)),
    Room(r"csrc/tests/.*", (r".*",)),
)

# Nobody may: they cost half a minute a file, or headers that are not there without the whole toolkit.
FORBIDDEN = r"torch/extension\.h|ATen/ATen\.h|ATen/cuda/CUDAContext\.h|torch/torch\.h"

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def resolve(file: str, quote: str, header: str, exists: Callable[[str], bool]) -> str:
    """The header as a path from the root if it is one of ours, else as it is written."""
    if quote == '"':
        for folder in (Path(file).parent, Path("csrc")):
            parts: list[str] = []
            for part in (folder / header).parts:
                if part == "..":
                    parts.pop()
                else:
                    parts.append(part)
            if exists("/".join(parts)):
                return "/".join(parts)
    return header


def include_faults(file: str, text: str, exists: Callable[[str], bool]) -> list[str]:
    """What a file includes that its room may not touch."""
    room = next((room for room in ROOMS if re.fullmatch(room.files, file)), None)
    if room is None:
        return [f"{file} is in no room"]
    faults = []
    for quote, written in _INCLUDE.findall(text):
        header = resolve(file, quote, written, exists)
        allowed = any(re.fullmatch(pattern, header) for pattern in (*room.may, STANDARD))
        if not allowed or (re.fullmatch(FORBIDDEN, header) and not file.startswith("csrc/tests/")):
            faults.append(f"{file} may not include {header}")
    return faults


# What a benchmark measures beside lite_ext, private or not.
PEERS = {"lite_ext/bench.py": ("torch.utils._pytree",)}


def import_faults(file: str, text: str) -> list[str]:
    """What a module of the package imports that it may not touch."""
    faults = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.level:
                faults.append(f"{file} uses a relative import")
        else:
            continue
        for name in names:
            parts = name.split(".")
            if name in PEERS.get(file, ()):
                continue
            if name.startswith("torch.") and any(part.startswith("_") and part != "__version__" for part in parts):
                faults.append(f"{file} may not import {name}: private to torch")
            if name.startswith("lite_ext._C") and not file.endswith(("_backend.py", "_build.py", "_info.py")):
                faults.append(f"{file} may not import {name}: _backend.py chooses the backend")
            if parts[0] in {
                "numpy",
                "lightning_utilities",
                "transformers",
                "accelerate",
                "lightning",
                "optree",
            } and ("/integrations/" not in file and "/_bench" not in file):
                faults.append(f"{file} may not import {name}: torch is the only dependency")
    return faults


def _sources() -> list[Path]:
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".hpp", ".cc", ".inc"}
    return sorted(path for path in CSRC.rglob("*") if path.suffix in suffixes)


def _exists(file: str) -> bool:
    return (ROOT / file).is_file()


def test_every_room_has_files() -> None:
    names = [str(path.relative_to(ROOT)) for path in _sources()]
    for room in ("tree", "plan", "cast", "autograd"):
        assert any(name.startswith(f"csrc/{room}/") for name in names), room


@pytest.mark.parametrize("file", [str(path.relative_to(ROOT)) for path in _sources()])
def test_includes(file: str) -> None:
    assert include_faults(file, (ROOT / file).read_text(), _exists) == []


@pytest.mark.parametrize("file", [str(path.relative_to(ROOT)) for path in sorted((ROOT / "lite_ext").rglob("*.py"))])
def test_imports(file: str) -> None:
    assert import_faults(file, (ROOT / file).read_text()) == []


def test_torch_is_not_asked_for_its_inside() -> None:
    """Beyond imports: `torch._C...` in the text of the walk."""
    for path in (ROOT / "lite_ext").rglob("*.py"):
        assert not re.search(r"\btorch\._C\b", path.read_text()), path


OURS = {
    "csrc/tree/walk.h",
    "csrc/plan/plan.h",
    "csrc/cast/tile.h",
    "csrc/cast/element.h",
    "csrc/cast/cpu/cast_cpu.h",
    "csrc/cast/cuda/launch_cuda.h",
    "csrc/autograd/cast_node.h",
    "csrc/dtype.h",
    "csrc/convert.h",
}


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("csrc/tree/bad.cpp", '"../plan/plan.h"'),
        ("csrc/tree/bad.cpp", '"plan/plan.h"'),
        ("csrc/tree/bad.cpp", '"../cast/cpu/cast_cpu.h"'),
        ("csrc/tree/bad.cpp", '"../autograd/cast_node.h"'),
        ("csrc/tree/bad.cpp", '"../convert.h"'),
        ("csrc/tree/bad.cpp", "<ATen/core/Tensor.h>"),
        ("csrc/tree/bad.cpp", "<c10/core/ScalarType.h>"),
        ("csrc/tree/bad.cpp", "<torch/csrc/autograd/python_variable.h>"),
        ("csrc/tree/bad.cpp", "<cuda_runtime.h>"),
        ("csrc/tree/leaf.h", "<ATen/core/Tensor.h>"),
        ("csrc/tree/leaf.h", "<torch/csrc/utils/pybind.h>"),
        ("csrc/plan/bad.cpp", "<Python.h>"),
        ("csrc/plan/bad.cpp", "<pybind11/pybind11.h>"),
        ("csrc/plan/bad.cpp", "<ATen/core/Tensor.h>"),
        ("csrc/plan/bad.cpp", "<c10/core/ScalarType.h>"),
        ("csrc/plan/bad.cpp", "<cuda_runtime.h>"),
        ("csrc/plan/bad.cpp", "<immintrin.h>"),
        ("csrc/plan/bad.cpp", '"../tree/walk.h"'),
        ("csrc/plan/bad.cpp", '"../cast/tile.h"'),
        ("csrc/cast/tile.h", "<c10/util/Half.h>"),
        ("csrc/cast/tile.h", "<Python.h>"),
        ("csrc/cast/tile.h", "<cuda_runtime.h>"),
        ("csrc/cast/tile.h", "<cuda_fp16.h>"),
        ("csrc/cast/element.h", "<c10/util/BFloat16.h>"),
        ("csrc/cast/tile.h", '"../plan/plan.h"'),
        ("csrc/cast/cpu/bad.cpp", "<Python.h>"),
        ("csrc/cast/cpu/bad.cpp", '"../../tree/walk.h"'),
        ("csrc/cast/cpu/bad.cpp", '"../cuda/launch_cuda.h"'),
        ("csrc/cast/cpu/bad.cpp", "<cuda_runtime.h>"),
        ("csrc/cast/cpu/bad.cpp", "<c10/cuda/CUDAStream.h>"),
        ("csrc/cast/cpu/bad.cpp", "<ATen/cuda/EmptyTensor.h>"),
        ("csrc/cast/cpu/bad.cpp", "<ATen/ATen.h>"),
        ("csrc/cast/cuda/cast_cuda.cu", "<c10/cuda/CUDAStream.h>"),
        ("csrc/cast/cuda/cast_cuda.cu", "<ATen/core/Tensor.h>"),
        ("csrc/cast/cuda/launch_args.h", "<c10/cuda/CUDAStream.h>"),
        ("csrc/cast/cuda/launch_cuda.cpp", "<ATen/cuda/CUDAContext.h>"),
        ("csrc/cast/cuda/launch_cuda.cpp", '"../cpu/cast_cpu.h"'),
        ("csrc/cast/cuda/launch_cuda.cpp", "<Python.h>"),
        ("csrc/autograd/bad.cpp", '"../tree/walk.h"'),
        ("csrc/autograd/bad.cpp", '"../cast/tile.h"'),
        ("csrc/autograd/bad.cpp", "<cuda_runtime.h>"),
        ("csrc/autocast.cpp", '"convert.h"'),
        ("csrc/dtype.h", "<c10/core/ScalarType.h>"),
        ("csrc/bindings.cpp", "<torch/extension.h>"),
        ("csrc/convert.cpp", "<c10/cuda/CUDAStream.h>"),
        ("csrc/new_room/bad.cpp", "<vector>"),
    ],
)
def test_checker_refuses_bad_includes(file: str, include: str) -> None:
    text = f"#include <vector>\n  #  include {include}  // for a name\n"
    assert len(include_faults(file, text, OURS.__contains__)) == 1


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("csrc/tree/good.cpp", "<Python.h>"),
        ("csrc/tree/good.cpp", '"walk.h"'),
        ("csrc/tree/good.cpp", '"../dtype.h"'),
        ("csrc/tree/leaf.h", "<torch/csrc/autograd/python_variable.h>"),
        ("csrc/plan/good.cpp", "<cstdint>"),
        ("csrc/cast/cpu/good.cpp", '"../tile.h"'),
        ("csrc/cast/cpu/good.cpp", "<immintrin.h>"),
        ("csrc/cast/tile.h", '"element.h"'),
        ("csrc/cast/cuda/launch_args.h", '"../../plan/plan.h"'),
        ("csrc/cast/cuda/launch_cuda.cpp", "<c10/cuda/CUDAGuard.h>"),
        ("csrc/cast/cuda/launch_cuda.cpp", "<ATen/cuda/EmptyTensor.h>"),
        ("csrc/cast/cuda/cast_cuda.cu", "<cuda_runtime.h>"),
        ("csrc/convert.cpp", '"plan/plan.h"'),
        ("csrc/tests/plan_test.cpp", "<gtest/gtest.h>"),
    ],
)
def test_checker_accepts_good_includes(file: str, include: str) -> None:
    assert include_faults(file, f"#include {include}\n", OURS.__contains__) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._subclasses import FakeTensor",
        "from torch.utils._pytree import tree_map",
        "import numpy as np",
        "from transformers.utils import ModelOutput",
        "from lite_ext import _C",
        "import lite_ext._C",
        "from . import tree",
        "def f():\n    from torch import _C",
    ],
)
def test_checker_refuses_bad_imports(line: str) -> None:
    assert len(import_faults("lite_ext/bad.py", line)) == 1


def test_checker_accepts_good_imports() -> None:
    text = "from __future__ import annotations\nimport torch\nfrom torch.compiler import is_compiling\nimport copy\n"
    assert import_faults("lite_ext/good.py", text) == []
    assert import_faults("lite_ext/_backend.py", "from lite_ext import _C as backend") == []
    assert import_faults("lite_ext/integrations/lightning.py", "import lightning.fabric") == []
