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
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "loads", "execv", "spawn", "fork"}
WRITING = {"open", "write_text", "write_bytes", "unlink", "mkdir", "rmdir", "rename", "remove", "savefig"}


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_do_nothing_dangerous(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {
        _name(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Attribute) and _root(node.func) == "torch")
    }
    assert not imported & MODULES
    assert not called & CALLS
    assert path.name in WRITES or not called & WRITING


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def test_the_reader_sees_what_it_looks_for() -> None:
    calls = {
        _name(node)
        for node in ast.walk(ast.parse("eval('1'); os.system('x'); p.write_text('')"))
        if isinstance(node, ast.Call)
    }
    assert calls == {"eval", "system", "write_text"}
