"""``python -m lite_ext bench`` measures what it says, and explains what it cannot do."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lite_ext
from lite_ext import bench
from lite_ext.__main__ import main

SMALL = ["--leaves", "2", "--size", "3", "--rounds", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECONDS_A_ROUND", 1e-4)


@pytest.fixture
def result() -> dict[str, Any]:
    return bench.run(leaves=2, size=3, rounds=2, threads=1)


def test_every_method_is_timed_against_ours(result: dict[str, Any]) -> None:
    assert (result["leaves"], result["size"], result["bytes"]) == (2, 3, 2 * 3 * (2 + 4))
    assert (result["source"], result["target"]) == ("torch.bfloat16", "torch.float32")
    assert set(result["convert"]) == {
        "lite_ext.convert",
        "tree_map of .to (torch)",
        "list of .to",
        "list of .float",
        "_foreach_copy_",
    }
    for title in ("convert", "nothing to convert"):
        ours = result[title][bench.OURS]
        assert ours["ratio"] == 1
        for figures in result[title].values():
            assert 0 < figures["low"] <= figures["median"] <= figures["high"]
            assert figures["ratio"] == figures["median"] / ours["median"]


def test_float_is_compared_only_where_it_converts_to_the_dtype() -> None:
    result = bench.run(leaves=1, size=1, source=torch.float32, target=torch.float16, rounds=1)
    assert "list of .float" not in result["convert"]
    assert "list of .to" in result["convert"]


def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lite_ext, "convert", lambda tree, dtype: tree)
    with pytest.raises(RuntimeError, match=r"lite_ext\.convert gives another result than Tensor\.to"):
        bench.run(leaves=1, size=1, rounds=1)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_names_of_dtypes(name: str) -> None:
    assert bench.dtype_named(name) is torch.bfloat16


def test_unknown_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    known = "use one of: fp16 (float16), bf16 (bfloat16), fp32 (float32), fp64 (float64)"
    with pytest.raises(ValueError) as caught:
        bench.dtype_named("int8")
    assert str(caught.value) == f"'int8' is not a dtype to benchmark; {known}"
    with pytest.raises(SystemExit) as left:
        main(["bench", "--to", "int8"])
    assert left.value.code == 2
    assert f"error: {caught.value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leaves": 0}, "leaves must be at least 1, got 0"),
        ({"size": -1}, "size must be at least 1, got -1"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"target": torch.bfloat16}, "the dtypes must differ .* got torch.bfloat16 twice"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.run(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cuda"])
    assert "error: there is no CUDA device that this torch can use" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    assert bench.run("cuda", leaves=2, size=3, rounds=1)["device"] == torch.cuda.get_device_name()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    main(["bench", *SMALL, "--from", "fp64", "--to", "fp16", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "2 tensors of 3 elements, float64 to float16" in printed
    assert "cpu, 1 thread(s)" in printed
    written = json.loads(file.read_text())
    assert (written["source"], written["target"], written["leaves"]) == ("torch.float64", "torch.float16", 2)
    for name in written["convert"]:
        assert name in printed


def test_table_says_which_way_a_ratio_goes(result: dict[str, Any]) -> None:
    def line(seconds: float) -> str:
        result["convert"]["list of .to"] |= {"median": seconds, "ratio": seconds / 2e-6}
        return next(line for line in bench.table(result).splitlines() if line.startswith("list of .to"))

    result["convert"][bench.OURS]["median"] = 2e-6
    assert line(30e-6).split() == [
        "list",
        "of",
        ".to",
        "30.00",
        "15,000.0",
        "0.00",
        "lite_ext",
        "is",
        "15.0",
        "x",
        "faster",
    ]
    assert line(1e-6).endswith("lite_ext is 2.0 x slower")


def test_plot(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plot")
    bench.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="a plot needs matplotlib: pip install matplotlib"):
        bench.plot(result, tmp_path / "plot.png")
