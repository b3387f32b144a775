"""Subclasses of torch.Tensor as outputs: same type, same values and same history as `.to` gives."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from features import Counted, leaves
from subclasses import Asked, Pair, Quantized
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.masked import MaskedTensor, masked_tensor
from zoo_classes import low

import lite_ext
from lite_ext import LiteModule

F32, BF16 = torch.float32, torch.bfloat16


class Returns(nn.Module):
    """A model that returns what it was given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = [value]

    def forward(self) -> Any:
        return {"out": self.value}


def both(backend: Any, leaf: torch.Tensor) -> tuple[Any, Any]:
    """The leaf from convert and from a wrapper, none of which may take the fast path."""
    with Counted() as counted:
        converted = lite_ext.convert([leaf, (leaf,)], F32)
        wrapped = LiteModule(Returns(leaf), "bf16-mixed")()["out"][0]
    assert counted.fast == 0
    assert converted[0] is converted[1][0]
    return converted[0], wrapped


def test_function_protocol(backend: Any) -> None:
    leaf = low().as_subclass(Asked)
    leaf.note = "kept"
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.note) == (Asked, F32, "kept")
        assert result.tolist() == leaf.tolist()
    Asked.calls.clear()
    lite_ext.convert([leaf], F32)
    assert Asked.calls.count(torch.Tensor.to) == 1


def test_function_protocol_may_refuse(backend: Any) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.to:
                raise PermissionError("stays as it is")
            return super().__torch_function__(function, types, args, kwargs or {})

    with pytest.raises(PermissionError, match="stays as it is"):
        lite_ext.convert({"a": [low().as_subclass(Refusing)]}, F32)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dispatch_wrapper(backend: Any, requires_grad: bool) -> None:
    leaf = Pair(low(1.0, 2.0).requires_grad_(requires_grad), low(3.0, 4.0))
    wanted = leaf.to(F32)
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.requires_grad) == (Pair, F32, wanted.requires_grad)
        assert (result.one.dtype, result.two.dtype) == (F32, F32)
        assert (result.one.tolist(), result.two.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_quantized_tensor(backend: Any) -> None:
    """Its own `.to` changes what dtype it stands for; its int8 values must not be touched."""
    leaf = Quantized.quantize(low(1.0, -2.0, 0.5))
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.values.dtype) == (Quantized, F32, torch.int8)
        assert result.values is leaf.values
        torch.testing.assert_close(result.dequantize(), leaf.to(F32).dequantize())


def test_quantized_parameter_of_a_module() -> None:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(Quantized.quantize(torch.randn(2, 3)), requires_grad=False)
    model = lite_ext.setup_module(module, "bf16-mixed")
    result = model(torch.randn(1, 3))
    assert (result.dtype, type(model.weight.data)) == (F32, Quantized)


def jagged(dtype: torch.dtype = BF16, requires_grad: bool = False) -> torch.Tensor:
    parts = [torch.randn(2, 3).to(dtype), torch.randn(4, 3).to(dtype)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def test_jagged_nested(backend: Any) -> None:
    leaf = jagged()
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.layout) == (type(leaf), F32, torch.jagged)
        assert result.shape == leaf.shape
        assert [p.tolist() for p in result.unbind()] == [p.tolist() for p in leaf.unbind()]


def test_jagged_gradient(backend: Any) -> None:
    grads = []
    leaf = jagged(requires_grad=True)
    for convert in (lambda x: lite_ext.convert([x], F32)[0], lambda x: x.to(F32)):
        (grad,) = torch.autograd.grad(convert(leaf).values().square().sum(), leaf)
        grads.append(grad)
    assert grads[0].dtype == grads[1].dtype == BF16
    torch.testing.assert_close(grads[0].values(), grads[1].values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage:UserWarning")
def test_masked_tensor(backend: Any) -> None:
    leaf = masked_tensor(low(1.0, 2.0, 3.0).half(), torch.tensor([True, False, True]))
    wanted = leaf.to(F32)
    for result in both(backend, leaf):
        assert type(result) is type(wanted) is MaskedTensor
        assert (result.dtype, result.get_mask().tolist()) == (F32, [True, False, True])
        assert result.get_data().tolist() == wanted.get_data().tolist()


@pytest.mark.parametrize("wrap", [nn.Parameter, nn.Buffer, lambda t: nn.Parameter(t, requires_grad=False)])
def test_parameters_and_buffers(backend: Any, wrap: Any) -> None:
    leaf = wrap(low(1.0, 2.0))
    wanted = leaf.to(F32)
    converted = lite_ext.convert({"a": leaf}, F32)["a"]
    wrapped = LiteModule(Returns(leaf), "bf16-mixed")()["out"][0]
    for result in (converted, wrapped):
        assert type(result) is type(wanted) is torch.Tensor
        assert (result.dtype, result.requires_grad, result.is_leaf) == (F32, wanted.requires_grad, wanted.is_leaf)
        assert type(result.grad_fn).__name__ == type(wanted.grad_fn).__name__ or not wanted.requires_grad
    same = wrap(torch.ones(2))
    assert lite_ext.convert([same], F32)[0] is same


def test_parameter_of_a_subclass(backend: Any) -> None:
    leaf = nn.Parameter(low().as_subclass(Asked))
    wanted = leaf.to(F32)
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.requires_grad) == (type(wanted), F32, True)


def test_plain_leaves_beside_subclasses_are_fast() -> None:
    with Counted() as counted:
        result = lite_ext.convert([low(), low().as_subclass(Asked), low(), Pair(low(), low())], F32)
    assert [type(leaf) for leaf in result] == [torch.Tensor, Asked, torch.Tensor, Pair]
    assert (counted.fast, counted.fallback) == (2, 2)


# ------------------------------------------------------------------------------------------------ DTensor


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before = dict(os.environ)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensor(backend: Any, mesh: Any, placement: Any) -> None:
    leaf = distribute_tensor(torch.randn(4, 2).bfloat16(), mesh, [placement])
    wanted = leaf.to(F32)
    for result in both(backend, leaf):
        assert (type(result), result.dtype, result.to_local().dtype) == (DTensor, F32, F32)
        assert result.placements == wanted.placements == (placement,)
        assert torch.equal(result.full_tensor(), wanted.full_tensor())


def test_partial_dtensor_is_left_to_its_own_rules(backend: Any, mesh: Any) -> None:
    """Whether a sum that is still to be made is made before the cast is DTensor's to say."""
    leaf = DTensor.from_local(torch.randn(2, 2).bfloat16(), mesh, [Partial()])
    wanted = leaf.to(F32)
    for result in both(backend, leaf):
        assert result.placements == wanted.placements
        assert torch.equal(result.full_tensor(), wanted.full_tensor())


def test_gradient_of_a_dtensor(backend: Any, mesh: Any) -> None:
    leaf = distribute_tensor(torch.randn(4, 2).bfloat16(), mesh, [Shard(0)]).requires_grad_()
    grads = [
        torch.autograd.grad(convert(leaf).square().sum(), leaf)[0]
        for convert in (lambda x: lite_ext.convert((x,), F32)[0], lambda x: x.to(F32))
    ]
    assert type(grads[0]) is DTensor
    assert torch.equal(grads[0].full_tensor(), grads[1].full_tensor())


def test_all_kinds_in_one_output(mesh: Any) -> None:
    tree = {
        "a": low(),
        "b": (Pair(low(), low()), jagged()),
        "c": [distribute_tensor(low(), mesh, [Replicate()]), nn.Parameter(low())],
    }
    result = lite_ext.convert(tree, F32)
    assert [type(leaf) for leaf in leaves(result)] == [type(leaf.to(F32)) for leaf in leaves(tree)]
    assert {leaf.dtype for leaf in leaves(result)} == {F32}
