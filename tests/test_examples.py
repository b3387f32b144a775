"""The example and the benchmarks do what they print, and notice when something is wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lite_ext

ROOT = Path(__file__).parent.parent


def load(monkeypatch: pytest.MonkeyPatch, folder: str, names: list[str]) -> dict[str, ModuleType]:
    """Import the modules of a folder of scripts, and forget them when the test ends."""
    monkeypatch.syspath_prepend(str(ROOT / folder))
    for file in (ROOT / folder).glob("*.py"):
        # Recorded first, so that monkeypatch takes the module out again.
        monkeypatch.setitem(sys.modules, file.stem, None)
        monkeypatch.delitem(sys.modules, file.stem)
    return {name: importlib.import_module(name) for name in names}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return load(monkeypatch, "examples", ["report", "tiny_models", "train_gpt2", "transformers_outputs"])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return load(monkeypatch, "benchmarks", ["cases", "peers", "memory", "convert"])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the lite_ext that this process has."""
    paths = [str(Path(lite_ext.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [sys.executable, *command]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("key", ["gpt2", "bert", "t5", "vit", "whisper", "detr"])
def test_outputs_follow_every_policy(example: dict[str, ModuleType], key: str) -> None:
    shown, subject = example["transformers_outputs"], example["tiny_models"].build(key)
    plain = shown.plain_forward(subject)
    counts = {}
    for policy in shown.policies(subject):
        counts[policy.title] = shown.check(subject, policy, plain, *shown.wrapped_forward(subject, policy))
    leaves = list(shown.leaves(plain))
    low = sum(leaf.tensor.dtype is torch.bfloat16 and not leaf.cache for leaf in leaves)
    assert 0 < low == counts["default"]["converted"] < len(leaves)
    assert counts["keep"]["converted"] == 0
    assert 0 < counts["default\n+ skip"]["converted"] < low
    assert counts["default\n+ skip"]["skipped"] > 0
    assert all(sum(count.values()) == len(leaves) for count in counts.values())


@pytest.mark.parametrize("key", ["gpt2", "bert", "t5"])
def test_token_model_has_no_input_dtype(example: dict[str, ModuleType], key: str) -> None:
    message = example["transformers_outputs"].ambiguous_error(example["tiny_models"].build(key))
    assert "ambiguous_input" in message


def test_example_fails_on_a_wrong_dtype(
    example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(lite_ext.LiteModule):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return lite_ext.convert(super().forward(*args, **kwargs), torch.float64)

    monkeypatch.setattr(lite_ext, "LiteModule", Wrong)
    assert example["transformers_outputs"].main(["--only", "bert"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("FAILED: BERT, 'default': ['logits']: expected torch.bfloat16 and torch.float32, got")
    assert "torch.float64 outside" in message


def test_example_fails_on_wrong_values(example: dict[str, ModuleType]) -> None:
    shown, subject = example["transformers_outputs"], example["tiny_models"].build("vit")
    plain = shown.plain_forward(subject)
    policy = shown.policies(subject)[0]
    inner, outer = shown.wrapped_forward(subject, policy)
    outer["logits"] = outer["logits"] + 1
    with pytest.raises(example["report"].Mismatch, match=r"\['logits'\]: values differ"):
        shown.check(subject, policy, plain, inner, outer)


def test_training_reads_real_text_and_learns(example: dict[str, ModuleType]) -> None:
    source, losses = example["train_gpt2"].train(steps=8)
    assert source
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("losses", [[5.0] * 8, [5.0, 4.0, 3.0, float("nan")]], ids=["flat", "nan"])
def test_training_that_fails_is_noticed(example: dict[str, ModuleType], losses: list[float]) -> None:
    with pytest.raises(example["report"].Mismatch):
        example["train_gpt2"].check_falls(losses)


def test_plain_table_lines_up(example: dict[str, ModuleType]) -> None:
    text = example["report"].plain_table("title", ["output", "a\nlong"], [[["['x']", "f32 *"]], [["count", "7"]]])
    assert text.splitlines() == [
        "title",
        "output      a",
        "         long",
        "-------------",
        "['x']   f32 *",
        "-------------",
        "count       7",
    ]


LEAVES = {
    "tuple-1000": 1000,
    "hf-74": 74,
    "one-tensor": 1,
    "detections-100": 300,
    "nested-729": 729,
    "large-16M": 1,
}


def test_benchmark_trees_have_the_leaves_they_say(bench: dict[str, ModuleType]) -> None:
    cases = [case for case in bench["cases"].all_cases() if not case.optional]
    assert set(bench["cases"].TARGETS) <= {case.name for case in bench["cases"].all_cases()}
    for case in cases:
        leaves = torch.utils._pytree.tree_leaves(case.make())
        tree, _, variant = case.name.partition("/")
        assert len(leaves) == LEAVES[tree]
        floating = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
        source, pair, target = variant.partition("-to-")
        if pair:
            assert (floating, case.dtype) == ({bench["cases"].DTYPES[source]}, bench["cases"].DTYPES[target])
        else:
            assert (floating, case.dtype) == ({torch.float32 if case.noop else torch.bfloat16}, torch.float32)
        assert all(leaf.requires_grad is case.grad for leaf in leaves)


def test_benchmark_peers_agree(bench: dict[str, ModuleType]) -> None:
    peers, _ = bench["peers"].all_peers()
    names = [peer.name for peer in peers]
    assert names[0] == "lite_ext"
    assert {"fabric", "pytree"} <= set(names)
    for case in bench["cases"].all_cases():
        able = [peer for peer in peers if not case.optional and peer.can_run(case)]
        for peer in able:
            bench["peers"].check_equal(peer, case)


def test_benchmark_notices_a_wrong_peer(bench: dict[str, ModuleType]) -> None:
    peers, case = bench["peers"], bench["cases"].all_cases()[0]
    lazy = peers.Peer("lazy", lambda tree, dtype: tree, "torch")
    with pytest.raises(ValueError, match=r"lazy differs from Tensor\.to at leaf 0 of tuple-1000"):
        peers.check_equal(lazy, case)
    other = peers.Peer("other", lambda tree, dtype: [leaf.to(dtype) for leaf in tree], "torch")
    with pytest.raises(ValueError, match="other returns another tree for tuple-1000"):
        peers.check_equal(other, case)


def test_benchmark_ratios(bench: dict[str, ModuleType]) -> None:
    case = bench["cases"].all_cases()[0]
    result = bench["convert"].summary(case, {"lite_ext": [1.0, 2.0, 9.0], "fabric": [6.0, 30.0, 20.0]})
    assert result["methods"]["fabric"]["ratio"] == 10.0
    assert result["methods"]["lite_ext"]["median"] == 2.0
    table = bench["convert"].speed_table([result], ["lite_ext", "fabric", "optree"])
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    targets = case.targets
    assert [cells[0], *cells[3:]] == ["tuple-1000", "10.0", f"{targets['fabric']:g}", "-", f"{targets['optree']:g}"]


def test_benchmark_refuses_an_unknown_case(bench: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match="no such case: nothing"):
        bench["convert"].choose(["nothing"], many=False)


def test_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "new" / "result.json"
    options = [
        "--only",
        "one-tensor",
        "detections-100/noop",
        "--rounds",
        "2",
        "--no-memory",
        "--json",
        str(file),
    ]
    done = run("benchmarks/convert.py", *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert [row["case"] for row in record["speed"]] == ["one-tensor", "detections-100/noop"]
    assert all(len(row["methods"]["fabric"]["rounds"]) == 2 for row in record["speed"])
    assert record["environment"]["threads"] == 1
    assert "| detections-100/noop |" in done.stdout


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_conversion_needs_no_more_memory_than_its_outputs(bench: dict[str, ModuleType]) -> None:
    done = run("benchmarks/memory.py", "16 x 1M, half int64", "lite_ext")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["outputs"] == 16 * 2**20 * 4
    # The lower bound proves that the peak is really measured.
    assert 0.9 < figures["peak"] / figures["outputs"] <= bench["memory"].LIMIT
