"""What else converts a tree of tensors, each as a function of (tree, dtype)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from cases import Case
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import lite_ext

Convert = Callable[[Any, torch.dtype], Any]

OURS = "lite_ext"


@dataclass(frozen=True)
class Peer:
    """One column of the table.

    Attributes:
        name: Its heading.
        convert: What is timed.
        package: The installed package that it comes from, for the record of versions.
        flat_only: It takes a tensor or a tuple of tensors only.
        with_grad: It gives outputs that autograd knows.
        float32_only: It always converts to float32.
        converts: It gives the values; the floor makes the outputs and leaves them as they are.
    """

    name: str
    convert: Convert
    package: str
    flat_only: bool = False
    with_grad: bool = True
    float32_only: bool = False
    converts: bool = True

    def can_run(self, case: Case) -> bool:
        """Return whether the peer does what ``case`` asks."""
        listed = case.peers is None or self.name == OURS or self.name in case.peers
        fits = (case.flat or not self.flat_only) and (self.with_grad or not case.grad)
        fits = fits and (self.converts or not case.noop)
        return listed and fits and (case.dtype is torch.float32 or not self.float32_only)

    @property
    def version(self) -> str:
        """The version of the peer's package."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"


def floating_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a floating tensor, return another as it is: the rule of Fabric's ``_convert_fp_tensor``."""
    return tensor.to(dtype) if torch.is_floating_point(tensor) else tensor


def torch_tree_map(tree: Any, dtype: torch.dtype) -> Any:
    """Map over ``torch.utils._pytree``."""
    return torch_pytree.tree_map(lambda leaf: floating_to(leaf, dtype), tree)


def loop_to(tree: Any, dtype: torch.dtype) -> Any:
    """Call ``Tensor.to``, for a tuple in a list comprehension."""
    if isinstance(tree, Tensor):
        return tree.to(dtype)
    return tuple([leaf.to(dtype) for leaf in tree])


def loop_float(tree: Any, dtype: torch.dtype) -> Any:
    """Call ``Tensor.float``, for a tuple in a list comprehension."""
    if isinstance(tree, Tensor):
        return tree.float()
    return tuple([leaf.float() for leaf in tree])


def foreach_copy(tree: Any, dtype: torch.dtype) -> Any:
    """Allocate the outputs, then fill them with one ``torch._foreach_copy_``."""
    alone = isinstance(tree, Tensor)
    sources = [tree] if alone else tree
    outputs = [torch.empty_like(leaf, dtype=dtype) for leaf in sources]
    torch._foreach_copy_(outputs, sources)
    return outputs[0] if alone else tuple(outputs)


def fabric() -> Peer:
    """Return Lightning Fabric's ``convert_output``, whose walk is ``apply_to_collection``."""
    from lightning_utilities.core.apply_func import apply_to_collection

    def convert(tree: Any, dtype: torch.dtype) -> Any:
        return apply_to_collection(tree, Tensor, floating_to, dtype)

    return Peer("fabric", convert, "lightning-utilities")


def accelerate() -> Peer:
    """Return Accelerate's conversion of outputs."""
    from accelerate.utils import convert_to_fp32

    return Peer("accelerate", lambda tree, dtype: convert_to_fp32(tree), "accelerate", float32_only=True)


def optree() -> Peer:
    """Return optree's ``tree_map``."""
    from optree import tree_map

    def convert(tree: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda leaf: floating_to(leaf, dtype), tree)

    return Peer("optree", convert, "optree")


def floor() -> Peer:
    """Return what makes and wraps the same outputs in C++, by torch's own allocation, without converting."""
    from floor import load_floor

    return Peer("floor", load_floor(), "torch", flat_only=True, with_grad=False, converts=False)


def all_peers(with_floor: bool = False) -> tuple[list[Peer], list[str]]:
    """Return the peers that can be had, lite_ext first, and the names of those that cannot.

    ``with_floor`` adds the floor, which is compiled on first use.
    """
    peers = [Peer(OURS, lite_ext.convert, "lite_ext")]
    missing = []
    for make in (fabric, accelerate, optree):
        try:
            peers.append(make())
        except ImportError:
            missing.append(f"{make.__name__} (not installed)")
    peers += [
        Peer("pytree", torch_tree_map, "torch"),
        Peer(".to", loop_to, "torch", flat_only=True),
        Peer(".float", loop_float, "torch", flat_only=True, float32_only=True),
        Peer("_foreach_copy_", foreach_copy, "torch", flat_only=True, with_grad=False),
    ]
    if with_floor:
        try:
            peers.append(floor())
        except ImportError as error:
            missing.append(f"floor ({str(error).splitlines()[0]})")
    return peers, missing


def check_equal(peer: Peer, case: Case) -> None:
    """Raise ``ValueError`` unless ``peer`` gives what ``Tensor.to`` gives for every leaf of ``case``."""
    tree = case.make()
    result = peer.convert(tree, case.dtype)
    wanted, structure = torch_pytree.tree_flatten(torch_pytree.tree_map(lambda t: floating_to(t, case.dtype), tree))
    got, came = torch_pytree.tree_flatten(result)
    if came != structure:
        raise ValueError(f"{peer.name} returns another tree for {case.name}")
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        same = want.dtype is have.dtype and want.shape == have.shape and want.requires_grad is have.requires_grad
        if not same or (peer.converts and not torch.equal(want, have)):
            raise ValueError(f"{peer.name} differs from Tensor.to at leaf {index} of {case.name}")
