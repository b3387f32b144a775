"""What SECURITY.md says of the package, read from its sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lite_ext

SOURCES = sorted(Path(lite_ext.__file__).parent.rglob("*.py"))
WRITES = {"bench.py"}  # to the files that its options name

MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "socket",
    "urllib",
    "http",
    "requests",
    "subprocess",
    "ctypes",
    "ssl",
    "ftplib",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"system", "popen", "execv", "spawnv", "fork", "Popen", "urlopen", "import_from_path"}
WRITING = {"open", "write_text", "write_bytes", "unlink", "mkdir", "rmdir", "savefig"}


def _calls(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names of the functions and of the methods that a source calls."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = {function.id for function in calls if isinstance(function, ast.Name)}
    return functions, {function.attr for function in calls if isinstance(function, ast.Attribute)}


def _imports(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_do_nothing_dangerous(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions, methods = _calls(tree)
    assert not _imports(tree) & MODULES
    assert not functions & BUILTINS
    assert not methods & METHODS
    assert path.name in WRITES or not (functions | methods) & WRITING


def test_the_reader_sees_what_it_looks_for() -> None:
    tree = ast.parse("import os.path\nfrom pickle import load\neval('1'); os.system('x'); p.write_text('')")
    assert _calls(tree) == ({"eval"}, {"system", "write_text"})
    assert _imports(tree) == {"os", "pickle"}
