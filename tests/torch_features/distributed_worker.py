"""What each process of the distributed tests runs: every check against plain torch, whose casts are calls of `.to`."""

from __future__ import annotations

import copy
import json
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import lite_ext
from lite_ext import LiteModule

F32, BF16 = torch.float32, torch.bfloat16
CHECKS: dict[str, Callable[[int, int], None]] = {}


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CHECKS[function.__name__] = function
    return function


class Branches(nn.Module):
    """A trunk and two heads, each an output of its own; `used` leaves one of the heads out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.heads = nn.ModuleList(nn.Linear(width, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1)) -> Any:
        hidden = self.trunk(x)
        return {f"head {at}": (self.heads[at](hidden), torch.arange(2)) for at in used}


class WrittenOut(nn.Module):
    """A mixed precision in plain torch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        with torch.autocast("cpu", BF16):
            output = self.inner(x.to(BF16), *args)
        return to_float32(output)


def to_float32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.to(F32) if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: to_float32(value) for key, value in output.items()}
    return tuple(to_float32(value) for value in output) if isinstance(output, tuple) else output


def data(rank: int, step: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(output: Any, *names: str) -> torch.Tensor:
    chosen = names or tuple(output)
    return sum(((output[name][0] * (1 + at)) ** 2).sum() for at, name in enumerate(chosen))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert any(g.abs().sum() > 0 for g in ours)


def same_on_all_ranks(tensors: list[torch.Tensor], world: int) -> None:
    flat = torch.cat([t.flatten() for t in tensors])
    gathered = [torch.empty_like(flat) for _ in range(world)]
    distributed.all_gather(gathered, flat)
    assert all(torch.equal(gathered[0], other) for other in gathered)


def fast_leaves() -> int:
    from lite_ext import _C

    return int(_C.counters()["fast_cpu"])


def pair(**options: Any) -> tuple[tuple[nn.Module, nn.Module], tuple[nn.Module, nn.Module]]:
    """Twice the same model under DDP: wrapped by us, and written out. Each with its inner module."""
    torch.manual_seed(7)
    one = Branches()
    other = copy.deepcopy(one)
    ours = LiteModule(DDP(one, **options), "bf16-mixed", original_module=one)
    return (ours, one), (WrittenOut(DDP(other, **options)), other)


@check
def over_ddp(rank: int, world: int) -> None:
    (ours, inner), (theirs, other) = pair()
    before = fast_leaves()
    for step in range(3):
        for model, module in ((ours, inner), (theirs, other)):
            loss(model(data(rank, step))).backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad
        same(gradients(inner), gradients(other))
        same_on_all_ranks(gradients(inner), world)
        ours.zero_grad()
        theirs.zero_grad()
    same(list(inner.parameters()), list(other.parameters()))
    assert fast_leaves() > before, "the fast path was not taken"


@check
def over_ddp_with_unused_parameters(rank: int, world: int) -> None:
    """Each rank leaves out another head; the hooks of its parameters must not fire in the backward pass of this rank."""
    (ours, inner), (theirs, other) = pair(find_unused_parameters=True)
    for step, used in enumerate([(rank % 2,), (0, 1), (0,)]):
        for model in (ours, theirs):
            loss(model(data(rank, step), used)).backward()
        same(gradients(inner), gradients(other))
        same_on_all_ranks(gradients(inner), world)
        ours.zero_grad()
        theirs.zero_grad()


class Towers(nn.Module):
    """Two outputs that share no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return {f"tower {at}": (tower(x), None) for at, tower in enumerate(self.towers)}


@check
def two_outputs_with_separate_backwards(rank: int, world: int) -> None:
    """The first backward pass must not reach the parameters of the other output."""
    torch.manual_seed(7)
    inner = Towers()
    other = copy.deepcopy(inner)
    ours, theirs = LiteModule(DDP(inner), "bf16-mixed", original_module=inner), WrittenOut(DDP(other))
    events: list[list[str]] = []
    for model, module in ((ours, inner), (theirs, other)):
        seen: list[str] = []
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, seen=seen: seen.append(name))
        output = model(data(rank))
        for name in ("tower 1", "tower 0"):
            output[name][0].square().sum().backward()
            seen.append(name)
        events.append(seen)
    assert events[0] == events[1], events
    assert {name.split(".")[1] for name in events[0][: events[0].index("tower 1")]} == {"1"}
    same(gradients(inner), gradients(other))
    same_on_all_ranks(gradients(inner), world)


@check
def two_backwards_through_one_parameter_are_refused_by_ddp(rank: int, world: int) -> None:
    for model in pair()[0][0], pair()[1][0]:
        output = model(data(rank))
        loss(output, "head 1").backward(retain_graph=True)
        try:
            loss(output, "head 0").backward()
        except RuntimeError as error:
            assert "Expected to mark a variable ready only once" in str(error)
        else:
            raise AssertionError("DDP accepted a parameter twice")


@check
def order_of_hooks_and_buckets(rank: int, world: int) -> None:
    """Gradients arrive, and buckets leave, in the order of plain `.to`: the exchange starts before the last gradient."""
    (ours, inner), (theirs, other) = pair(bucket_cap_mb=1e-4)
    events: list[list[str]] = []
    for model, ddp, module in ((ours, ours._forward_module, inner), (theirs, theirs.inner, other)):
        seen: list[str] = []

        def exchange(state, bucket, seen=seen):  # DDP refuses annotations that are not its own
            seen.append(f"bucket {bucket.index()}")
            return allreduce_hook(state, bucket)

        ddp.register_comm_hook(None, exchange)
        for name, p in module.named_parameters():
            p.register_hook(lambda grad, name=name, seen=seen: seen.append(name))
        for step in range(2):  # the buckets are made anew after the first
            loss(model(data(rank, step))).backward()
            seen.append("step")
        events.append(seen)
    assert events[0] == events[1], events
    last = events[0][events[0].index("step") + 1 :]
    assert last.index("bucket 0") < last.index("trunk.0.weight"), last


@check
def ddp_over_the_wrapper(rank: int, world: int) -> None:
    torch.manual_seed(7)
    inner = Branches()
    other = copy.deepcopy(inner)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        inner.zero_grad()
        other.zero_grad()
        ours, theirs = DDP(LiteModule(inner, "bf16-mixed"), **options), DDP(WrittenOut(other), **options)
        for model in (ours, theirs):
            loss(model(data(rank))).backward()
        same(gradients(inner), gradients(other))
        same_on_all_ranks(gradients(inner), world)
        assert list(ours.module.state_dict()) == list(inner.state_dict())
        del ours, theirs


@check
def without_synchronisation(rank: int, world: int) -> None:
    """Gradients add up within no_sync and are exchanged after it."""
    (ours, inner), (theirs, other) = pair()
    for model, ddp in ((ours, ours._forward_module), (theirs, theirs.inner)):
        with ddp.no_sync():
            loss(model(data(rank, 1))).backward()
        loss(model(data(rank, 2))).backward()
    same(gradients(inner), gradients(other))
    same_on_all_ranks(gradients(inner), world)


def sharded(module: nn.Module, mesh: Any, policy: MixedPrecisionPolicy) -> nn.Module:
    for part in (module.trunk, *module.heads):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


@check
def over_fully_shard(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(7)
    start = Branches()
    for output in (None, BF16, F32):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=output)
        one, other = (sharded(copy.deepcopy(start), mesh, policy) for _ in range(2))
        model = LiteModule(one, "32-true", skip_outputs=("head 1",))
        result = model(data(rank))
        wanted = other(data(rank))
        assert result["head 1"][0].dtype == wanted["head 1"][0].dtype == (output or BF16)
        assert result["head 0"][0].dtype == F32
        wanted["head 0"] = to_float32(wanted["head 0"])
        for outputs in (result, wanted):
            (loss({"head 0": outputs["head 0"]}) + outputs["head 1"][0].float().sum()).backward()
        grads = [[p.grad.full_tensor() for p in m.parameters()] for m in (one, other)]
        same(*grads)
        same_on_all_ranks(grads[0], world)
        assert list(model.state_dict()) == list(start.state_dict())


@check
def wrappers_within_wrappers(rank: int, world: int) -> None:
    """Parts with a policy of their own below DDP, below a wrapper: each does what its own policy says."""
    torch.manual_seed(7)
    first, second = nn.Linear(8, 8), Branches()
    others = copy.deepcopy((first, second))
    inside = nn.Sequential(LiteModule(first, "bf16-mixed", output_dtype="keep"), LiteModule(second, "32-true"))
    ours = LiteModule(DDP(inside), "bf16-mixed", output_dtype=torch.float64, original_module=inside)

    class Reference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = others

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", BF16):
                return to_float32(self.second(self.first(x.to(BF16))))

    theirs = DDP(Reference())
    wanted = {key: (y.to(torch.float64), i) for key, (y, i) in theirs(data(rank)).items()}
    result = ours(data(rank))
    assert result["head 0"][0].dtype == torch.float64
    for output in (result, wanted):
        loss(output).backward()
    same(gradients(first) + gradients(second), gradients(others[0]) + gradients(others[1]))


@check
def pipeline(rank: int, world: int) -> None:
    """A stage a process; bfloat16 travels between them, the last one returns float32."""
    torch.manual_seed(7)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(world)]
    reference = copy.deepcopy(stages)
    last = rank == world - 1
    mine = LiteModule(stages[rank], "bf16-mixed", output_dtype="default" if last else "keep")
    received = data(0) if rank == 0 else torch.empty(4, 8, dtype=BF16)
    if rank > 0:
        distributed.recv(received, rank - 1)
    received.requires_grad_()
    output = mine(received)
    assert output.dtype == (F32 if last else BF16)
    if last:
        output.square().sum().backward()
    else:
        distributed.send(output.detach(), rank + 1)
        grad = torch.empty(4, 8, dtype=BF16)
        distributed.recv(grad, rank + 1)
        output.backward(grad)
    if rank > 0:
        distributed.send(received.grad, rank - 1)

    x: Any = data(0)
    with torch.autocast("cpu", BF16):
        for stage in reference:
            x = stage(x.to(BF16))
    x.to(F32).square().sum().backward()
    torch.testing.assert_close(gradients(stages[rank]), gradients(reference[rank]), rtol=2e-2, atol=2e-2)


@check
def setup_module_of_a_ddp(rank: int, world: int) -> None:
    """A true precision: the parameters themselves are in bfloat16, the outputs are not."""
    torch.manual_seed(7)
    inner = Branches().to(BF16)
    other = copy.deepcopy(inner)
    ours, theirs = lite_ext.setup_module(DDP(inner), "bf16-true"), DDP(other)
    loss(ours(data(rank))).backward()
    loss(to_float32(theirs(data(rank).to(BF16)))).backward()
    same(gradients(inner), gradients(other))


def run(rank: int, world: int, port: int, folder: str) -> None:
    """Run every check and write what happened; a failure of one must not hide the others."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    results = {}
    for name, function in CHECKS.items():
        distributed.barrier()
        try:
            function(rank, world)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
