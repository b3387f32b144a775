"""What a build needs besides torch, looked for before anything is compiled: each lack is one sentence with its remedy."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

# What the sources use of C++20; compilers before these do not have it.
PROBE = "#include <bit>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\nint main() { return std::popcount(0u); }\n"


class CannotBuild(Exception):
    """Something is missing, or too old."""


def check_ninja() -> None:
    if shutil.which("ninja") is None:
        raise CannotBuild("lite_ext is built with ninja, and none is on PATH: pip install ninja")


def check_python_headers(folder: str | None = None) -> None:
    folder = sysconfig.get_paths()["include"] if folder is None else folder
    if not (Path(folder) / "Python.h").is_file():
        raise CannotBuild(
            f"the headers of this Python are missing ({folder}/Python.h): install them, on Debian and Ubuntu by "
            "apt-get install python3-dev, or use a Python from python.org, pyenv or conda, which has them"
        )


def check_compiler(command: str) -> None:
    """Compile a few lines of C++20 with ``command``, the name of a compiler or the path of one."""
    if shutil.which(command) is None:
        raise CannotBuild(
            f"lite_ext needs a C++20 compiler, and {command} is not on PATH: apt-get install g++, or set CXX to a compiler"
        )
    arguments = [command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(arguments, input=PROBE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = next(iter(done.stderr.splitlines()), "no message")
        raise CannotBuild(
            f"{command} does not compile C++20 ({first}): use g++ 11, clang 14 or newer, or set CXX to a newer compiler"
        )
