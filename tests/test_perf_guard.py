"""The guard of instruction counts tells a change from none; what it counts with is not needed here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "tools" / "perf_guard.py"


@pytest.fixture
def guard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perf_guard", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stored_counts_are_of_the_cases(guard: ModuleType) -> None:
    assert tuple(json.loads(guard.STORED.read_text())["counts"]) == guard.CASES


@pytest.mark.parametrize(("now", "out"), [(1049, []), (951, []), (1051, ["a"]), (949, ["a"])])
def test_five_percent_either_way(guard: ModuleType, now: int, out: list[str]) -> None:
    assert guard.compare({"a": now}, {"a": 1000})[1] == out


def test_a_case_that_is_not_stored_is_out(guard: ModuleType) -> None:
    assert guard.compare({"a": 1, "b": 2}, {"a": 1})[1] == ["b"]


def test_counts_are_read_from_what_callgrind_wrote(guard: ModuleType, tmp_path: Path) -> None:
    *all_but_one, last = guard.CASES
    for number, name in enumerate(all_but_one, start=1):
        text = f"desc: Trigger: Client Request: {name}\nevents: Ir\ntotals: {guard.CALLS * number * 7}\n"
        (tmp_path / f"callgrind.out.1.{number}").write_text(text)
    with pytest.raises(SystemExit, match=f"callgrind left no counts of {last}"):
        guard.counts_in(tmp_path)
    text = f"desc: Trigger: Client Request: {last}\ntotals: {guard.CALLS}\n"
    (tmp_path / "callgrind.out.1.9").write_text(text)
    wanted = {name: 7 * number for number, name in enumerate(all_but_one, start=1)}
    assert guard.counts_in(tmp_path) == {**wanted, last: 1}


@pytest.mark.parametrize(("torch_version", "status"), [("as stored", 1), ("another", 0)])
def test_only_the_same_environment_is_compared(
    guard: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch_version: str,
    status: int,
    tmp_path: Path,
) -> None:
    stored: dict[str, Any] = {"environment": {"torch": "as stored"}, "counts": dict.fromkeys(guard.CASES, 100)}
    (tmp_path / "stored.json").write_text(json.dumps(stored))
    counts = {**stored["counts"], "hf-74": 200}
    monkeypatch.setattr(guard, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(guard.shutil, "which", lambda name: name)
    monkeypatch.setattr(guard, "measure", lambda compiler: (counts, {"torch": torch_version}))
    monkeypatch.setattr("sys.argv", ["perf_guard.py"])
    assert guard.main() == status
    printed = capsys.readouterr().out
    assert ("FAILED: hf-74 changed by more than 5%" in printed) is (status == 1)
    assert ("torch is 'another' here and was 'as stored'" in printed) is (status == 0)


def test_without_valgrind(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard.shutil, "which", lambda name: None if name == "valgrind" else name)
    monkeypatch.setattr("sys.argv", ["perf_guard.py"])
    assert guard.main() == 0
    assert "valgrind or a C compiler is not installed here, so nothing was counted" in capsys.readouterr().out
