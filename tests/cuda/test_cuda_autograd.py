"""Training on a device: one node a leaf, loops with a scaler and with autocast."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from compare import fingerprint
from devices import NEEDS_CUDA

import lite_ext

pytestmark = NEEDS_CUDA

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BF16, F32 = torch.bfloat16, torch.float32


def weights(count: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [torch.full((3,), float(i + 1), dtype=dtype, device="cuda", requires_grad=True) for i in range(count)]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_gradients_come_back_in_the_dtype_of_the_source(source: torch.dtype, target: torch.dtype) -> None:
    ours, theirs = weights(2, source), weights(2, source)
    converted = lite_ext.convert([ours[0], ours[1] * 2], target)
    plain = [theirs[0].to(target), (theirs[1] * 2).to(target)]
    for one, two in (converted, plain):
        (one * 1.25 + two.square()).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert fingerprint(mine.grad) == fingerprint(other.grad)


def test_each_leaf_has_a_node_of_its_own() -> None:
    leaves = weights(3)
    fired: list[int] = []
    for index, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, index=index: fired.append(index))
    results = lite_ext.convert(leaves, F32)
    assert len({id(result.grad_fn) for result in results}) == 3
    results[1].sum().backward()
    assert fired == [1]
    results[0].add_(1)  # of another version than the others
    (results[2] * results[2]).sum().backward()
    assert fired == [1, 2]


def test_inference_mode_and_no_grad() -> None:
    leaves = weights(2)
    with torch.no_grad():
        assert not any(result.requires_grad for result in lite_ext.convert(leaves, F32))
    with torch.inference_mode():
        assert all(result.is_inference() for result in lite_ext.convert(leaves, F32))


def test_backward_runs_on_the_stream_of_the_forward() -> None:
    leaves = weights(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        loss = sum(result.sum() for result in lite_ext.convert(leaves, F32))
    loss.backward()
    torch.cuda.synchronize()
    assert all(leaf.grad.eq(1).all() for leaf in leaves)


def train(convert: Any, dtype: torch.dtype, scaled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    inputs, targets = torch.randn(64, 16, device="cuda"), torch.randn(64, 4, device="cuda")
    for _ in range(10):
        with torch.autocast("cuda", dtype=dtype):
            output = model(inputs)
            assert output.dtype == dtype
            result = convert({"logits": output, "copies": [output * 2, output[1:]]})
        loss = (result["logits"] - targets).square().mean() + result["copies"][0].mean() * 0.1
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.float16, True), (BF16, False)])
def test_training_with_autocast_and_a_scaler(dtype: torch.dtype, scaled: bool) -> None:
    def plain(tree: dict[str, Any]) -> dict[str, Any]:
        return {"logits": tree["logits"].to(F32), "copies": [leaf.to(F32) for leaf in tree["copies"]]}

    ours = train(lambda tree: lite_ext.convert(tree, F32), dtype, scaled)
    theirs = train(plain, dtype, scaled)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
