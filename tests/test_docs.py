"""Every Python block of README and docs runs, and each expression is what the comment behind it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 2
            if match[1] == "python":
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def run_block(code: str) -> int:
    """Run a block; return how many of its comments were held against values."""
    space: dict[str, Any] = {}
    lines = code.splitlines()
    compared = 0
    for statement in ast.parse(code).body:
        last = lines[(statement.end_lineno or statement.lineno) - 1]
        comment = last[statement.end_col_offset or 0 :].strip()
        source = ast.get_source_segment(code, statement)
        assert source is not None
        if isinstance(statement, ast.Expr) and comment.startswith("#"):
            value = eval(source, space)
            assert repr(value) == comment.lstrip("# "), source
            compared += 1
        else:
            exec(compile(ast.Module([statement], []), "<documentation>", "exec"), space)
    return compared


@pytest.mark.parametrize("code", blocks())
def test_block(code: str) -> None:
    run_block(code)


def test_values_are_compared() -> None:
    assert run_block("a = 1\na + 1  # 2\n") == 1
    with pytest.raises(AssertionError):
        run_block("1 + 1  # 3\n")


def test_blocks_are_found() -> None:
    assert len([block for block in blocks() if block.id.startswith("README.md")]) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
