"""What the library was built for: shown, and compared with the torch that runs before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lite_ext
from lite_ext import _build

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import build_checks
import cuda_build


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter, away from the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd="/",
    )


def test_build_info_names_what_runs() -> None:
    info = lite_ext.build_info()
    assert info["backend"] == "native"
    assert info["torch"] == torch.__version__
    assert info["version"] == lite_ext.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", info["version"])
    assert info["built_for"]["torch"].split("+")[0].split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
    assert "cpu" in info["built_for"]["kernels"]
    assert info["cpu_level"] in {"baseline", "avx2"}


def test_info_command() -> None:
    command = [sys.executable, "-m", "lite_ext", "info"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"version: {lite_ext.__version__}" in text
    assert f"  torch: {lite_ext.build_info()['built_for']['torch']}" in text
    as_json = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert as_json["version"] == lite_ext.__version__


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.0.1+cpu"},
        {"cuda": "11.8"},
        {"cxx11_abi": not torch.compiled_with_cxx11_abi()},
        {"python": "cpython-27"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_build_is_refused(change: dict[str, Any]) -> None:
    built = {**_build.read_info(), **change}
    with pytest.raises(ImportError) as caught:
        _build.check(built)
    message = str(caught.value)
    assert message.startswith(f"lite_ext was compiled for torch {built['torch']} (CUDA {built['cuda']}, ")
    assert f"torch {torch.__version__} " in message
    of_build, of_running = re.findall(r"torch \S+ \(.*?\)", message)
    assert of_build != of_running  # what differs is named
    assert "pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir lite_ext" in message


def test_another_patch_release_is_accepted() -> None:
    major, minor = torch.__version__.split(".")[:2]
    _build.check({**_build.read_info(), "torch": f"{major}.{minor}.99+other"})


def test_without_a_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"is not compiled in .*pip install --no-build-isolation -e"):
        _build.read_info(tmp_path / "_build_info.json")


def test_mismatch_is_found_before_the_library_is_loaded() -> None:
    code = (
        "import sys, torch\n"
        "torch.__version__ = '1.0.0+cpu'\n"
        "try:\n    import lite_ext\nexcept ImportError as error:\n"
        "    assert 'lite_ext._C' not in sys.modules\n    print(error)"
    )
    result = run(code)
    assert "this is torch 1.0.0+cpu" in result.stdout, result.stderr


def test_unknown_backend() -> None:
    result = run("import lite_ext", LITE_EXT_BACKEND="fast")
    assert result.returncode != 0
    assert "LITE_EXT_BACKEND='fast' is not a backend; use one of: native, python" in result.stderr


def test_python_backend_needs_no_library() -> None:
    code = (
        "import sys, torch, lite_ext\n"
        "assert 'lite_ext._C' not in sys.modules\n"
        "assert lite_ext.convert([torch.ones(2)], torch.float16)[0].dtype is torch.float16\n"
        "assert lite_ext.LiteModule(torch.nn.Linear(2, 2), 'bf16-mixed')(torch.ones(1, 2)).dtype is torch.float32\n"
        "assert lite_ext.pool_stats() == {'enabled': False}\n"
        "print(lite_ext.build_info()['backend'])"
    )
    result = run(code, LITE_EXT_BACKEND="python")
    assert result.stdout.strip() == "python", result.stderr


def test_import_does_not_initialise_cuda_and_a_fork_works() -> None:
    code = (
        "import os, torch, lite_ext\n"
        "assert not torch.cuda.is_initialized()\n"
        "lite_ext.convert(torch.ones(2), torch.float16)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ok = lite_ext.convert(torch.ones(2), torch.float16).dtype is torch.float16\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "print('done')"
    )
    result = run(code)
    assert result.stdout.strip() == "done", result.stderr


def test_one_openmp_runtime_is_loaded() -> None:
    code = (
        "import torch, lite_ext\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({path for path in maps if 'libgomp' in path or 'libiomp' in path or 'libomp' in path}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    assert run(code).stdout.strip() == "1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, with what an earlier build left in them."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for folder in (".ci", "benchmarks", "csrc", "docs", "examples", "lite_ext", "tests", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in ROOT.iterdir():
        if path.is_file() and (not path.name.startswith(".") or path.name == ".clang-format"):
            shutil.copy(path, copy)
    (copy / "lite_ext" / "_build_info.json").write_text("{}")
    (copy / "lite_ext" / "_C.cpython-27.so").touch()
    return copy


def run_setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=checkout,
    )


def test_the_source_distribution_holds_the_sources_and_nothing_built(checkout: Path) -> None:
    sources = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    made = run_setup(checkout, "--quiet", "sdist", "--dist-dir", "dist", LITE_EXT_CUDA="0")
    assert made.returncode == 0, made.stderr
    (archive,) = (checkout / "dist").iterdir()
    with tarfile.open(archive) as packed:
        held = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    assert sources - held == {"lite_ext/_build_info.json", "lite_ext/_C.cpython-27.so"}
    assert {name for name in held - sources if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_the_version_has_a_label_only_where_asked_for(checkout: Path) -> None:
    plain = (ROOT / "VERSION").read_text().strip()
    for setting, wanted in (("0", plain), ("1", f"{plain}+cpu.torch{''.join(torch.__version__.split('.')[:2])}")):
        result = run_setup(checkout, "--version", LITE_EXT_CUDA="0", LITE_EXT_LOCAL_LABEL=setting)
        assert result.stdout.strip().splitlines()[-1] == wanted


def test_a_build_without_a_compiler_says_so_at_once(checkout: Path) -> None:
    result = run_setup(checkout, "build_ext", LITE_EXT_CUDA="0", CXX="/nowhere/c++")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "lite_ext needs a C++20 compiler, and /nowhere/c++ is not on PATH: apt-get install g++, or set CXX to a compiler"
    )


def test_an_old_compiler_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho \"old-c++: error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(
        build_checks.CannotBuild, match=r"does not compile C\+\+20 \(.*unrecognized option.*use g\+\+ 11"
    ):
        build_checks.check_compiler(str(old))


def test_missing_ninja_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(build_checks.CannotBuild, match=r"Python\.h\): install them.*python3-dev"):
        build_checks.check_python_headers(str(tmp_path))
    build_checks.check_python_headers()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_checks.CannotBuild, match=r"none is on PATH: pip install ninja$"):
        build_checks.check_ninja()


def test_a_build_without_torch_says_what_to_do(checkout: Path) -> None:
    """As in an isolated build, where pip installs only what the build requires."""
    hidden = checkout.parent / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    result = run_setup(checkout, "--version", PYTHONPATH=str(hidden))
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "lite_ext is compiled against the torch you will run it with, and no torch can be imported here "
        "(No module named 'torch'). Install torch first, then build without isolation: "
        "pip install --no-build-isolation ."
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_build_with_cuda_for_a_torch_without_is_refused(checkout: Path) -> None:
    result = run_setup(checkout, "--version", LITE_EXT_CUDA="1")
    assert result.returncode == 1
    assert result.stderr.strip() == f"LITE_EXT_CUDA=1, but torch {torch.__version__} was built without CUDA"


class TestCudaDecision:
    """What setup.py builds; no device is ever asked for."""

    def test_cpu_torch(self) -> None:
        decision = cuda_build.decide("2.13.0+cpu", None, "auto")
        assert decision == (None, "torch 2.13.0+cpu was built without CUDA")
        with pytest.raises(cuda_build.CudaWanted) as caught:
            cuda_build.decide("2.13.0+cpu", None, "1")
        assert str(caught.value) == "LITE_EXT_CUDA=1, but torch 2.13.0+cpu was built without CUDA"

    def test_off_and_unknown(self) -> None:
        assert cuda_build.decide("2.14.1+cu130", "13.0", "0").toolkit is None
        with pytest.raises(cuda_build.CudaWanted, match="LITE_EXT_CUDA='yes' is not known; use one of: auto, 1, 0"):
            cuda_build.decide("2.14.1+cu130", "13.0", "yes")

    def test_no_toolkit(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        decision = cuda_build.decide("2.14.1+cu130", "13.0", "auto")
        assert decision.toolkit is None
        assert decision.reason == (
            f"no CUDA toolkit with bin/nvcc and include/cuda_runtime.h was found (looked at: CUDA_HOME={tmp_path}); "
            "set CUDA_HOME to the folder of a toolkit"
        )

    @staticmethod
    def toolkit(folder: Path, release: str) -> Path:
        """Make what looks like a toolkit, with an nvcc that tells its release."""
        (folder / "bin").mkdir(parents=True)
        (folder / "include").mkdir()
        (folder / "include" / "cuda_runtime.h").touch()
        nvcc = folder / "bin" / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            'case "$1" in --version) echo "Cuda compilation tools, release ' + release + ', V0";;\n'
            '*) echo "#\\$ _HERE_=' + str(folder / "bin") + '" >&2;; esac\n'
        )
        nvcc.chmod(0o755)
        return nvcc

    def test_another_major_version(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.toolkit(tmp_path, "12.4")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(cuda_build.CudaWanted) as caught:
            cuda_build.decide("2.14.1+cu130", "13.0", "1")
        assert str(caught.value) == (
            f"LITE_EXT_CUDA=1, but nvcc in {tmp_path} is 12.4 and torch 2.14.1+cu130 was built with CUDA 13.0: "
            "set CUDA_HOME to a toolkit of the same major version"
        )

    def test_a_script_on_the_path_leads_to_the_toolkit(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        nvcc = self.toolkit(tmp_path / "real", "13.0")
        wrapper = tmp_path / "bin" / "nvcc"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
        decision = cuda_build.decide("2.14.1+cu130", "13.0", "1")
        assert decision.toolkit == (tmp_path / "real", (13, 0))
        assert cuda_build.default_architectures((13, 0)).endswith("12.0+PTX")


def test_stub_names_what_the_library_has() -> None:
    from lite_ext import _C

    stub = (ROOT / "lite_ext" / "_C.pyi").read_text()
    declared = set(re.findall(r"^(?:def )?(\w+)(?:\(|: )", stub, re.MULTILINE))
    assert declared == {name for name in dir(_C) if not name.startswith("__")}


def test_source_list_is_complete() -> None:
    csrc = ROOT / "csrc"
    lines = [line for name in ("sources.txt", "sources_cuda.txt") for line in (csrc / name).read_text().splitlines()]
    listed = sorted(line for line in lines if line and line[0] != "#")
    found = sorted(str(path.relative_to(csrc)) for pattern in ("*.cpp", "*.cu") for path in csrc.rglob(pattern))
    assert listed == [path for path in found if not path.startswith("tests/")]
