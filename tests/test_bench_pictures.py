"""What ``make bench`` writes: tables and pictures of the figures it is given, and forwards that are all the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_examples import load

pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
pytest.importorskip("rich", reason="rich shows the progress")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return load(monkeypatch, "benchmarks", ["cases", "measure", "convert", "scaling", "wrapped", "charts", "run"])


def size_rows(scaling: ModuleType, seconds: float) -> list[dict[str, Any]]:
    figure = {"median": seconds, "q1": seconds, "q3": seconds, "bytes_a_second": 6e3 / seconds}
    methods = dict.fromkeys(["lite_ext", ".to", scaling.MEMCPY, scaling.TWO_THREADS], figure)
    return [{"output_bytes": size, "moved_bytes": 6000, "methods": methods} for size in (1024, 4 * 2**20, 2**30)]


def leaf_rows() -> list[dict[str, Any]]:
    figure = {"median": 2e-6, "q1": 1e-6, "q3": 3e-6}
    return [{"leaves": count, "methods": {"lite_ext": figure, "floor": figure}} for count in (1, 1000)]


def wrapped_rows() -> list[dict[str, Any]]:
    stacks = {
        "torch.autocast alone": {"module": 8e-6, "autocast": 2e-6},
        "lite_ext": {"module": 8e-6, "call": -1e-6, "autocast": 0.5e-6, "input walk": 0.25e-6, "output walk": 0.25e-6},
    }
    return [{"model": "a model", "stacks": stacks}]


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[row].strip("|").split("|")]


def test_tables(bench: dict[str, ModuleType]) -> None:
    run = bench["run"]
    assert cells(run.size_table(size_rows(bench["scaling"], 2e-6)), 3)[:3] == ["4 MiB", "3.0", "3.0"]
    assert cells(run.leaf_table(leaf_rows()), 2) == ["1", "2,000", "2,000"]
    assert cells(run.leaf_table(leaf_rows()), 3) == ["1,000", "2", "2"]
    row = cells(run.wrapped_table(wrapped_rows()), 3)
    assert row == ["a model", "lite_ext", "8.0", "-1.0", "0.5", "0.2", "0.2", "8.0", "0.80"]


def test_pictures(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    charts, cases = bench["charts"], bench["cases"].all_cases()
    seconds = {"lite_ext": [1.0], "fabric": [10.0], "_foreach_copy_": [2.0]}
    results = [bench["convert"].summary(case, seconds) for case in cases]
    charts.ratios(results, list(seconds), tmp_path / "ratios.png")
    charts.leaves(leaf_rows(), tmp_path / "leaves.png")
    charts.bandwidth(size_rows(bench["scaling"], 1e-6), tmp_path / "bandwidth.png")
    charts.wrapped(wrapped_rows(), tmp_path / "wrapped.png")
    assert {file.stem for file in tmp_path.iterdir()} == set(bench["run"].PICTURES)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())


@pytest.mark.parametrize(("share", "busy"), [(0.99, False), (0.5, True)])
def test_page_says_when_the_machine_was_busy(bench: dict[str, ModuleType], share: float, busy: bool) -> None:
    facts = {**bench["measure"].environment([0], 1), "missing": ["optree (not installed)"], "core_share": share}
    page = bench["run"].page(facts, {"A table": "| a |"})
    assert ("had 50% of their core" in page) is busy
    assert "Not compared: optree (not installed)." in page
    assert "## A table\n\n| a |" in page
    assert all(f"({name}.png)" in page for name in bench["run"].PICTURES)


def test_figures_are_shortened(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    bench["run"].write(tmp_path, "cases", [{"median": 1 / 3, "rounds": [1.0, 2.0], "name": "a", "count": 123456}])
    written = json.loads((tmp_path / "cases.json").read_text())
    assert written == [{"median": 0.33333, "name": "a", "count": 123456}]


@pytest.mark.parametrize("name", ["Linear(8, 8)", "policy, 10 outputs"])
def test_wrapped_forwards_do_the_parts_they_are_timed_for(bench: dict[str, ModuleType], name: str) -> None:
    wrapped = bench["wrapped"]
    module, x = wrapped.MODELS[name]()
    wrapped.check(module, x)
    for (who, count), forward in wrapped.forwards(module).items():
        seen: list[torch.dtype] = []
        hook = module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        leaves = torch.utils._pytree.tree_leaves(forward(x))
        hook.remove()
        walks = count > wrapped.PARTS.index("input walk")
        assert seen == [torch.bfloat16 if walks else torch.float32], (who, count)
        low = wrapped.PARTS.index("autocast") < count < len(wrapped.PARTS)
        assert {leaf.dtype for leaf in leaves} == {torch.bfloat16 if low else torch.float32}, (who, count)


def test_an_unequal_forward_is_not_timed(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = bench["wrapped"]
    module, x = wrapped.MODELS["Linear(8, 8)"]()
    monkeypatch.setattr(wrapped, "like_fabric", lambda module, parts: lambda x: torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"the wrappers of Linear\(.*\) give different outputs"):
        wrapped.check(module, x)


def test_copy_moves_as_many_bytes_as_the_conversion(bench: dict[str, ModuleType]) -> None:
    names = bench["scaling"].copy_method(6 * 1024).names
    assert names["source"].nbytes + names["target"].nbytes == 6 * 1024


def test_rounds_are_interleaved_with_the_collector_on(bench: dict[str, ModuleType]) -> None:
    import gc

    calls: list[str] = []
    collecting: set[bool] = set()

    def call(name: str) -> None:
        calls.append(name)
        collecting.add(gc.isenabled())

    method = bench["measure"].Method
    methods = {name: method("call(name)", {"call": call, "name": name}) for name in "ab"}
    ticks: list[int] = []
    seconds = bench["measure"].time_rounds(methods, 3, tick=lambda: ticks.append(1), seconds_a_round=1e-9)
    assert collecting == {True}
    assert len(ticks) == 3 and all(len(values) == 3 for values in seconds.values())
    changes = [name for index, name in enumerate(calls) if index == 0 or calls[index - 1] != name]
    assert changes == list("ababab")  # to get the numbers of calls, then three rounds that start in turn
