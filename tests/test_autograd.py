"""Autograd sees each converted leaf as if `.to` had made it: a node of its own, gradients in the source's dtype."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from compare import fingerprint
from zoo_leaves import GATHERED_LAYOUTS, LEAVES, PLAIN_LAYOUTS

import lite_ext

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
F32 = torch.float32


def weights(count: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.full((3,), float(i + 1), dtype=dtype, requires_grad=True) for i in range(count)]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_gradients_come_back_in_the_dtype_of_the_source(backend: Any, source: torch.dtype, target: torch.dtype) -> None:
    ours, theirs = weights(2, source), weights(2, source)
    converted = lite_ext.convert({"a": ours[0], "b": [ours[1] * 2]}, target)
    plain = [theirs[0].to(target), (theirs[1] * 2).to(target)]
    (converted["a"] * 1.25 + converted["b"][0].square()).sum().backward()
    (plain[0] * 1.25 + plain[1].square()).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == source
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("name", [*PLAIN_LAYOUTS, *GATHERED_LAYOUTS])
def test_gradients_of_every_layout(backend: Any, name: str) -> None:
    grads = []
    for cast in (lambda leaf: lite_ext.convert([leaf], F32)[0], lambda leaf: leaf.to(F32)):
        root = LEAVES[name](torch.bfloat16).detach().requires_grad_()
        cast(root).backward(torch.arange(root.numel(), dtype=F32).reshape(root.shape))
        grads.append(root.grad)
    assert fingerprint(grads[0]) == fingerprint(grads[1])


def test_each_leaf_has_a_node_of_its_own(backend: Any) -> None:
    results = lite_ext.convert(weights(3), F32)
    nodes = [result.grad_fn for result in results]
    assert len({id(node) for node in nodes}) == 3
    assert {node.name() for node in nodes} == {weights(1)[0].to(F32).grad_fn.name()}
    assert all(len(node.next_functions) == 1 for node in nodes)
    assert [result.output_nr for result in results] == [0, 0, 0]


def test_leaves_without_grad_have_no_node(backend: Any) -> None:
    frozen, trained = torch.ones(2, dtype=torch.bfloat16), weights(1)[0]
    results = lite_ext.convert([frozen, trained, trained.detach()], F32)
    assert [r.requires_grad for r in results] == [False, True, False]
    assert [r.is_leaf for r in results] == [True, False, True]


def test_parameter_becomes_a_tensor(backend: Any) -> None:
    result = lite_ext.convert(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), F32)
    assert type(result) is torch.Tensor
    assert result.requires_grad


def test_hooks_of_unused_leaves_stay_silent(backend: Any) -> None:
    leaves = weights(3)
    fired: list[int] = []
    for index, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, index=index: fired.append(index))
    results = lite_ext.convert(leaves, F32)
    results[1].sum().backward()
    assert fired == [1]
    assert [leaf.grad is None for leaf in leaves] == [True, False, True]


def test_second_backward_on_the_other_output(backend: Any) -> None:
    leaves = weights(2)
    first, second = lite_ext.convert([leaf * 2 for leaf in leaves], F32)
    first.sum().backward()
    second.sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[2.0] * 3] * 2


def test_in_place_on_one_output_does_not_disturb_another(backend: Any) -> None:
    first, second = lite_ext.convert(weights(2), F32)
    total = second.square().sum()
    first.mul_(3)
    first /= 2
    total.backward()
    assert first._version == 2


def test_in_place_on_an_output_before_its_own_backward(backend: Any) -> None:
    leaf = weights(1)[0]
    result = lite_ext.convert([leaf], F32)[0]
    result.mul_(3)
    result.sum().backward()
    assert leaf.grad.tolist() == [3.0] * 3


def test_one_kept_output_does_not_keep_the_others_graph(backend: Any) -> None:
    leaves = [leaf * 2 for leaf in weights(2)]
    dropped = weakref.ref(leaves[1])
    kept = lite_ext.convert(leaves, F32)[0]
    del leaves
    gc.collect()
    assert dropped() is None
    assert kept.requires_grad


def test_order_of_backward_through_layers(backend: Any) -> None:
    """A gradient reaches its parameter as soon as it is known, not when the last output was used."""
    order: list[int] = []
    layers = weights(3)
    for index, layer in enumerate(layers):
        layer.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    states = [layers[0] * 1]
    states += [states[0] * layers[1]]
    states += [states[1] * layers[2]]
    results = lite_ext.convert(states, F32)
    results[2].sum().backward()
    assert order == [2, 1, 0]


def test_no_grad(backend: Any) -> None:
    leaf = weights(1)[0]
    with torch.no_grad():
        result = lite_ext.convert([leaf], F32)[0]
    assert not result.requires_grad
    assert result.is_leaf
    with torch.no_grad(), torch.enable_grad():
        assert lite_ext.convert([leaf], F32)[0].requires_grad


def test_grad_mode_is_read_at_every_call(backend: Any) -> None:
    leaf = weights(1)[0]
    with torch.inference_mode():
        assert not lite_ext.convert([leaf], F32)[0].requires_grad
    assert lite_ext.convert([leaf], F32)[0].requires_grad


def test_double_backward(backend: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return lite_ext.convert({"x": x}, torch.float64)["x"].pow(3)

    x = torch.tensor([2.0, -3.0], requires_grad=True)
    (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert grad.dtype == second.dtype == F32
    assert second.tolist() == [12.0, -18.0]


@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double precision")
def test_gradcheck_of_widening_and_back(backend: Any) -> None:
    x = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        wide = lite_ext.convert([x.to(F32)], torch.float64)[0]
        return wide * 2

    assert torch.autograd.gradcheck(function, (x,), eps=1e-2, atol=1e-3)


def test_forward_mode_tangents_are_kept(backend: Any) -> None:
    primal, tangent = torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 2.0, dtype=torch.bfloat16)
    with forward.dual_level():
        result = lite_ext.convert([forward.make_dual(primal, tangent)], F32)[0]
        unpacked = forward.unpack_dual(result)
    assert unpacked.tangent.dtype == F32
    assert unpacked.tangent.tolist() == [2.0] * 3


def test_transforms(backend: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return lite_ext.convert({"x": x}, F32)["x"] * 2

    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert torch.equal(torch.vmap(function)(x), x.to(F32) * 2)
    primal, tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    assert (primal.dtype, tangent.dtype, tangent[0, 0].item()) == (F32, F32, 2.0)
    gradient = torch.func.grad(lambda x: function(x).sum())(x)
    assert (gradient.dtype, gradient[0, 0].item()) == (torch.bfloat16, 2.0)


def test_saved_tensor_hooks_and_anomaly_mode(backend: Any) -> None:
    leaf = weights(1)[0]
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        lite_ext.convert([leaf * leaf], F32)[0].sum().backward()
    assert leaf.grad.tolist() == [2.0] * 3


def test_backward_hooks_and_retained_gradients(backend: Any) -> None:
    leaf, seen = weights(1)[0], []
    result = lite_ext.convert([leaf], F32)[0]
    result.retain_grad()
    result.register_hook(lambda grad: seen.append(grad.dtype))
    result.sum().backward()
    assert seen == [F32]
    assert result.grad.dtype == F32


def test_graph_in_a_dataclass_attribute_is_not_touched(backend: Any) -> None:
    """A conversion must not deep-copy what it does not convert: a tensor inside a graph cannot be."""
    from zoo import Frozen

    tree = Frozen(weights(1)[0] * 2, (torch.ones(1, requires_grad=True) * 2))
    result = lite_ext.convert(tree, F32)
    assert result.y is tree.y
    assert result.x.grad_fn is not None
