"""Lightning's plugins, ours beside its own: the same training bit for bit, and what its own cannot do."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")  # an extra; without it there is nothing to test

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.fabric.plugins.precision.double import DoublePrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from lite_ext.integrations import _calls
from lite_ext.integrations.lightning import (
    FusedDoublePrecision,
    FusedFSDPPrecision,
    FusedFullPrecision,
    FusedHalfPrecision,
    FusedMixedPrecision,
    FusedPrecision,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP with `.*-true` enables computation in lower precision"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
    pytest.mark.filterwarnings("ignore:.*is enabled, but CUDA is not available"),
]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INNER = {"32-true": F32, "64-true": F64, "16-true": F16, "bf16-true": BF16, "16-mixed": F16, "bf16-mixed": BF16}


def lightnings(precision: str) -> Precision:
    if precision == "32-true":
        return Precision()
    if precision == "64-true":
        return DoublePrecision()
    return HalfPrecision(precision) if precision.endswith("true") else MixedPrecision(precision, "cpu")


class CpuFsdp(FSDPStrategy):
    """Lightning lets only subclasses of its FSDP strategy run on a CPU, and torch asks for the device by name."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        config = self.mixed_precision_config
        return FullyShardedDataParallel(
            module, mixed_precision=config, device_id=torch.device("cpu"), **self._fsdp_kwargs
        )


STRATEGIES: dict[str, Any] = {"single": lambda: SingleDeviceStrategy("cpu"), "ddp": DDPStrategy, "fsdp": CpuFsdp}


@pytest.fixture(autouse=True, scope="module")
def one_process_group() -> Iterator[None]:
    """Fabric makes it at the first need and uses it from then on; a module of DDP must not outlive it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)  # Lightning writes an address and a port there
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() == dtype
    assert not torch.is_autocast_enabled("cpu")
    assert _calls.running() is None


def make_fabric(plugin: Any, strategy: str = "single") -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=STRATEGIES[strategy](), plugins=plugin)
    fabric.launch()
    return fabric


class Echo(nn.Module):
    """Returns a tensor that it computed, and its input."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = inner
        self.seen: Any = None

    def forward(self, x: torch.Tensor, scale: Any = None) -> dict[str, Any]:
        self.seen = scale
        out = {"y": self.layer(x), "x": [x]}
        return out if self.inner is None else {**out, "inner": self.inner(out["y"])}


# ---------------------------------------------------------------- which class, and its name


@pytest.mark.parametrize(
    ("spec", "name", "cls", "base"),
    [
        ("32-true", "32-true", FusedFullPrecision, Precision),
        (32, "32-true", FusedFullPrecision, Precision),
        (64, "64-true", FusedDoublePrecision, DoublePrecision),
        ("16-true", "16-true", FusedHalfPrecision, HalfPrecision),
        ("bf16-true", "bf16-true", FusedHalfPrecision, HalfPrecision),
        (16, "16-mixed", FusedMixedPrecision, MixedPrecision),
        ("bf16", "bf16-mixed", FusedMixedPrecision, MixedPrecision),
        ("bf16-mixed", "bf16-mixed", FusedMixedPrecision, MixedPrecision),
    ],
)
def test_is_the_plugin_of_the_precision(spec: Any, name: str, cls: type, base: type) -> None:
    plugin = FusedPrecision(spec, device="cpu")
    assert type(plugin) is cls
    assert isinstance(plugin, base)
    assert plugin.precision == name
    assert (getattr(plugin, "scaler", None) is not None) == (name == "16-mixed")
    assert name in repr(plugin)


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
def test_fsdp_plugin_is_lightnings(precision: str) -> None:
    plugin, own = FusedFSDPPrecision(precision), FSDPPrecision(precision)
    assert isinstance(plugin, FSDPPrecision)
    assert plugin.precision == precision
    assert plugin.mixed_precision_config == own.mixed_precision_config
    assert type(plugin.scaler) is type(own.scaler)


def test_a_given_scaler_is_used() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert FusedPrecision("16-mixed", scaler=scaler).scaler is scaler
    assert FusedFSDPPrecision("16-mixed", scaler=scaler).scaler is scaler


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("output_dtype", ["default", "input", "keep", F64])
@pytest.mark.parametrize("precision", INNER)
def test_policy(precision: str, output_dtype: Any, strategy: str) -> None:
    if strategy == "fsdp" and precision == "64-true":
        with pytest.raises(ValueError, match="not supported in FSDP"):
            FusedFSDPPrecision(precision)
        return
    plugin = (FusedFSDPPrecision if strategy == "fsdp" else FusedPrecision)(precision, output_dtype)
    model = make_fabric(plugin, strategy).setup_module(Echo())
    for dtype in (F32, F64):
        x = torch.randn(2, 4, dtype=dtype)
        inner = F64 if precision == "32-true" and dtype == F64 and strategy != "fsdp" else INNER[precision]
        if inner == F64 and precision == "32-true":
            continue  # float64 inputs do not meet float32 parameters
        out = model(x)
        wanted = {"default": F32, "input": dtype, "keep": inner}.get(output_dtype, output_dtype)
        assert out["y"].dtype == wanted
        if strategy == "single" and wanted == dtype and output_dtype != "keep":
            assert out["x"][0] is x  # passed through, so the caller's own


def test_source_and_skip_outputs() -> None:
    plugin = FusedPrecision("bf16-mixed", skip_outputs=["x"], source={F16})
    out = make_fabric(plugin).setup_module(Echo())(torch.ones(1, 4))
    assert (out["y"].dtype, out["x"][0].dtype) == (BF16, BF16)
    out = make_fabric(FusedPrecision("bf16-mixed", skip_outputs=["x"])).setup_module(Echo())(torch.ones(1, 4))
    assert (out["y"].dtype, out["x"][0].dtype) == (F32, BF16)


@pytest.mark.parametrize("call", [lambda m, x: m(x, x), lambda m, x: m(x, scale=x), lambda m, x: m(x, {"scale": x})])
def test_skip_inputs(call: Any) -> None:
    model = make_fabric(FusedPrecision("bf16-mixed", skip_inputs=["scale"])).setup_module(Echo())
    x = torch.ones(1, 4)
    call(model, x)
    seen = model.module.seen
    assert (seen["scale"] if isinstance(seen, dict) else seen) is x


def test_skip_inputs_by_position_where_modules_differ() -> None:
    class Other(Echo):
        def forward(self, x: torch.Tensor, y: Any = None, scale: Any = None) -> Any:
            return super().forward(x, scale)

    fabric = make_fabric(FusedPrecision("bf16-mixed", skip_inputs=["scale"]))
    echo, other = fabric.setup_module(Echo()), fabric.setup_module(Other())
    x = torch.ones(1, 4)
    for model in (echo, other):
        model(x, scale=x)
        assert model.module.seen is x
    with pytest.raises(ValueError, match="position 1 .* pass it by keyword"):
        echo(x, x)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.arange(4),), "no floating tensor"),
        (
            (torch.ones(1, 4), torch.ones(1, dtype=F64)),
            r"args\[0\]: torch.float32, args\[1\]: torch.float64",
        ),
    ],
)
def test_ambiguous_input(inputs: Any, message: str) -> None:
    model = make_fabric(FusedPrecision("bf16-mixed", "input")).setup_module(Echo())
    with pytest.raises(ValueError, match=message):
        model(*inputs)
    assert model(torch.ones(1, 4, dtype=F64))["y"].dtype == F64  # what went before is forgotten


def test_promoted_input() -> None:
    model = make_fabric(FusedPrecision("bf16-mixed", "input", ambiguous_input="promote")).setup_module(Echo())
    assert model(torch.ones(1, 4), torch.ones(1, dtype=F64))["y"].dtype == F64


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor
    note: str = "kept"


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Any) -> Any:
        return self.make(self.layer(x.y if isinstance(x, Frozen) else x))


class Named(dict):
    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_dataclass(strategy: str) -> None:
    plugin = (FusedFSDPPrecision if strategy == "fsdp" else FusedPrecision)("bf16-mixed")
    fabric = make_fabric(plugin, strategy)
    model = fabric.setup_module(Returns(Frozen))
    out = model(Frozen(torch.ones(1, 4)))
    assert type(out) is Frozen
    assert (out.y.dtype, out.note) == (F32, "kept")
    fabric.backward(out.y.sum())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lightnings_own_plugin_still_refuses_it() -> None:
    make_fabric(FusedPrecision("bf16-mixed"))  # what is replaced is replaced by now
    model = make_fabric(MixedPrecision("bf16-mixed", "cpu")).setup_module(Returns(Frozen))
    with pytest.raises(ValueError, match="frozen dataclass"):
        model(torch.ones(1, 4))


def test_containers_that_lightning_breaks() -> None:
    model = make_fabric(FusedPrecision("bf16-mixed")).setup_module(Returns(lambda y: [Named("n", y=y), range(3)]))
    named, numbers = model(torch.ones(1, 4))
    assert (type(named), named.name, named["y"].dtype, numbers) == (Named, "n", F32, range(3))


def test_generator_is_converted_item_by_item() -> None:
    class Stream(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(2):
                yield super().forward(x)

    items = list(make_fabric(FusedPrecision("bf16-mixed")).setup_module(Stream(4, 4))(torch.ones(1, 4)))
    assert [item.dtype for item in items] == [F32, F32]
    assert torch.equal(items[0], items[0].bfloat16().float())  # computed under autocast


@pytest.mark.parametrize("output_dtype", ["default", "input", "keep"])
def test_compiled_inside(output_dtype: str) -> None:
    model = torch.compile(Echo(), backend="eager")
    model = make_fabric(FusedPrecision("bf16-mixed", output_dtype)).setup_module(model)
    assert model(torch.ones(1, 4))["y"].dtype == (BF16 if output_dtype == "keep" else F32)


# ---------------------------------------------------------------- policy B keeps calls apart


def test_nested_modules_each_get_their_own_input_dtype() -> None:
    inner = make_fabric(FusedPrecision("64-true", "input")).setup_module(Echo())
    model = make_fabric(FusedPrecision("bf16-mixed", "input")).setup_module(Echo(inner))
    out = model(torch.ones(1, 4))
    assert out["y"].dtype == out["x"][0].dtype == F32
    assert out["inner"]["y"].dtype == F32  # the inner module returned bfloat16, which is what it was given
    assert inner.module.layer.weight.dtype == F64
    assert inner(torch.ones(1, 4, dtype=F16))["y"].dtype == F16


def test_reentrant_module() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.wrapper: Any = []  # in a list, for a child would be a cycle of modules
            self.inner_dtypes: list[torch.dtype] = []

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            y = self.layer(x)
            if depth:
                again = self.wrapper[0](y.double(), depth - 1)
                self.inner_dtypes.append(again.dtype)
            return y

    model = make_fabric(FusedPrecision("bf16-mixed", "input")).setup_module(Again())
    model.module.wrapper.append(model)
    assert model(torch.ones(1, 4), 3).dtype == F32
    assert model.module.inner_dtypes == [F64, F64, F64]


class Failing(Echo):
    def forward(self, x: Any, fail: bool = False) -> Any:
        if fail:
            raise KeyError("on purpose")
        return super().forward(x)


def test_exceptions_leave_no_call_behind() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            for data in (x.double(), "no tensor"):
                with pytest.raises((KeyError, ValueError)):
                    self.inner(data, True)
            with pytest.raises(KeyError), fabric.autocast():  # belongs to no call, and must not end ours
                raise KeyError
            return x * 1

    fabric = make_fabric(FusedPrecision("bf16-mixed", "input"))
    inner = fabric.setup_module(Failing())
    model = fabric.setup_module(Outer(inner))
    assert model(torch.ones(1, 4)).dtype == F32
    assert model(torch.ones(1, 4, dtype=F16)).dtype == F16
    with pytest.raises(KeyError):
        inner(torch.ones(1, 4), True)
    assert _calls._calls.get() is None


def test_threads() -> None:
    barrier = threading.Barrier(2, timeout=60)

    class Meet(Echo):
        def forward(self, x: torch.Tensor) -> Any:
            barrier.wait()
            return super().forward(x)

    model = make_fabric(FusedPrecision("bf16-mixed", "input")).setup_module(Meet())
    wrong: list[Any] = []

    def work(dtype: torch.dtype) -> None:
        for _ in range(20):
            got = model(torch.ones(1, 4, dtype=dtype))["y"].dtype
            if got != dtype:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (F32, F64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not barrier.broken


def test_tasks() -> None:
    class Wait(Echo):
        async def forward(self, x: torch.Tensor) -> Any:
            await asyncio.sleep(0)
            return super().forward(x)

    model = make_fabric(FusedPrecision("bf16-mixed", "input")).setup_module(Wait())

    async def all_of_them() -> list[Any]:
        dtypes = [F32, F64, F16, BF16] * 2
        outs = await asyncio.gather(*(model(torch.ones(1, 4, dtype=dtype)) for dtype in dtypes))
        return [(out["y"].dtype, dtype) for out, dtype in zip(outs, dtypes, strict=True)]

    for got, wanted in asyncio.run(all_of_them()):
        assert got == wanted


# ---------------------------------------------------------------- training


def train(plugin: Any, strategy: str = "single", steps: int = 6) -> tuple[list[float], list[torch.Tensor], Any]:
    torch.manual_seed(1)
    fabric = make_fabric(plugin, strategy)
    model = fabric.setup_module(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for step in range(steps):
        x, target = torch.randn(16, 8), torch.randint(3, (16,))
        loss = nn.functional.cross_entropy(model(x), target)
        fabric.backward(loss)
        clip = {"clip_val": 0.05} if step % 2 else {"max_norm": 0.5, "error_if_nonfinite": False}
        if strategy != "fsdp" or "clip_val" in clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    del model, optimizer, loss
    gc.collect()  # what DDP and FSDP registered with the process group goes here, not in the middle of the next training
    return losses, parameters, plugin.state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", INNER)
def test_same_losses_as_lightning(precision: str, strategy: str) -> None:
    if strategy == "fsdp" and precision == "64-true":
        assert precision not in FSDPPrecision.__init__.__annotations__  # Lightning has none to compare with
        return
    if strategy == "fsdp":
        ours, theirs = FusedFSDPPrecision(precision), FSDPPrecision(precision)
    else:
        ours, theirs = FusedPrecision(precision), lightnings(precision)
    losses, parameters, state = train(ours, strategy)
    wanted_losses, wanted_parameters, wanted_state = train(theirs, strategy)
    assert losses == wanted_losses
    assert len(set(losses)) == len(losses)  # it does train
    assert all(map(torch.equal, parameters, wanted_parameters))
    assert state == wanted_state


def test_scaler_skips_steps_as_lightnings() -> None:
    def run(plugin: Any) -> Any:
        torch.manual_seed(2)
        fabric = make_fabric(plugin)
        net = nn.Linear(4, 4)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for factor in (1.0, float("inf"), 1.0):
            fabric.backward(model(torch.ones(1, 4)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
        return plugin.state_dict(), model.state_dict()

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0)

    state, weights = run(FusedPrecision("16-mixed", scaler=scaler(), device="cpu"))
    wanted_state, wanted = run(MixedPrecision("16-mixed", "cpu", scaler()))
    assert state == wanted_state
    assert state["scale"] == 512.0
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    other = FusedPrecision("16-mixed", device="cpu")
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_checkpoint(tmp_path: Path) -> None:
    def setup(plugin: Any) -> Any:
        torch.manual_seed(3)
        fabric = make_fabric(plugin)
        net = nn.Linear(4, 4)
        return fabric, *fabric.setup(net, torch.optim.Adam(net.parameters()))

    fabric, model, optimizer = setup(FusedPrecision("bf16-mixed"))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    wanted = model(torch.ones(1, 4))
    for plugin in (FusedPrecision("bf16-mixed"), MixedPrecision("bf16-mixed", "cpu")):  # either reads the other's
        fabric, model, optimizer = setup(plugin)
        fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
        assert torch.equal(model(torch.ones(1, 4)), wanted)
        assert len(optimizer.state_dict()["state"]) == 2


def test_backward_is_guarded_and_parameters_gather_no_hooks() -> None:
    class Tied(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.weight

    model = make_fabric(FusedPrecision("16-mixed")).setup_module(Tied(4, 4))
    for _ in range(3):
        out, weight = model(torch.ones(1, 4))
    assert weight is model.weight
    assert not weight._backward_hooks
    with pytest.raises(RuntimeError, match=r"fabric.backward"):
        out.sum().backward()


TWO_PROCESSES = """
import os, sys, torch, test_lightning
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lite_ext.integrations.lightning import FusedPrecision

def run(fabric, output_dtype):
    torch.manual_seed(0)
    net = test_lightning.Echo()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
        y = model(x)["y"]
        assert y.dtype == torch.float32
        loss = y.square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses

if __name__ == "__main__":
    torch.set_num_threads(1)
    results = []
    for plugin in (FusedPrecision("bf16-mixed"), FusedPrecision("bf16-mixed", "input"), MixedPrecision("bf16-mixed", "cpu")):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork", plugins=plugin)
        results.append(fabric.launch(run, None))
        os.environ.pop("MASTER_PORT", None)  # the next launch takes another
    assert results[0] == results[1] == results[2], results
    assert len(set(results[0])) == 3
    print("same", results[0])
"""


def test_two_processes() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    command = [sys.executable, "-W", "ignore", "-c", TWO_PROCESSES]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "same" in done.stdout


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("precision", INNER)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_convert_alike(precision: str, how: Any) -> None:
    model = make_fabric(FusedPrecision(precision, "input", skip_inputs=["scale"])).setup_module(Echo())
    x = torch.ones(1, 4)
    wanted = model(x, x)["y"]
    copied = how(model)
    out = copied(x, x)
    assert out["y"].dtype == F32
    assert torch.equal(out["y"], wanted)
    assert copied.module.seen is x
    assert copied._strategy.precision.precision == precision


# ---------------------------------------------------------------- bad input


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'bf16-mixed'"):
        FusedPrecision("bf16-mxed")
    with pytest.raises(ValueError, match=r"Received both .*precision=bf16-mixed.*FusedMixedPrecision\('bf16-mixed'"):
        Fabric(accelerator="cpu", precision="bf16-mixed", plugins=FusedPrecision("bf16-mixed"))
    with pytest.raises(TypeError, match="FusedHalfPrecision is not for 'bf16-mixed': use or subclass FusedMixed"):
        FusedHalfPrecision("bf16-mixed")
    with pytest.raises(ValueError, match="does not use a scaler"):
        FusedPrecision("32-true", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match="must be a name"):
        FusedPrecision(MixedPrecision("bf16-mixed", "cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output_dtype='inputs'"):
        FusedPrecision("bf16-mixed", "inputs")
    with pytest.raises(TypeError, match="skip_outputs"):
        FusedPrecision("bf16-mixed", skip_outputs="cache")


def test_fsdp_asks_for_its_own_class() -> None:
    with pytest.raises(TypeError, match="FSDPPrecision"):
        Fabric(accelerator="cpu", devices=1, strategy=CpuFsdp(), plugins=FusedPrecision("bf16-mixed"))


def test_a_subclass_of_the_factory_is_refused() -> None:
    class Mine(FusedPrecision):
        pass

    with pytest.raises(TypeError, match="subclass FusedMixedPrecision"):
        Mine("bf16-mixed")


def test_subclass_with_another_rule() -> None:
    class Mine(FusedMixedPrecision):
        def convert_output(self, data: Any) -> Any:
            return {**super().convert_output(data), "mine": True}

    assert make_fabric(Mine("bf16-mixed")).setup_module(Echo())(torch.ones(1, 4))["mine"]


# ---------------------------------------------------------------- the Trainer


def fit(plugin: Any, folder: Path, **settings: Any) -> tuple[list[float], list[Any]]:
    from lightning.pytorch import LightningModule, Trainer

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.losses: list[float] = []
            self.batch_dtypes: list[Any] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x = batch.y if isinstance(batch, Frozen) else batch["x"]
            self.batch_dtypes.append(x.dtype if isinstance(batch, Frozen) else (x.dtype, batch["scale"].dtype))
            loss = self.net(x).float().square().mean()
            self.losses.append(loss.item())
            return loss

        def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
            # Lightning's own moving of batches refuses frozen dataclasses, before any plugin is asked.
            return batch if isinstance(batch, Frozen) else super().transfer_batch_to_device(batch, device, index)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    task = Task()
    batches = settings.pop("batches", None) or [{"x": torch.randn(2, 4), "scale": torch.ones(1)} for _ in range(4)]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=plugin,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    trainer.fit(task, torch.utils.data.DataLoader(batches, batch_size=None))
    return task.losses, task.batch_dtypes


TRAINER_WARNINGS = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the data loader's workers and the missing logger
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def trainer_test(function: Any) -> Any:
    for mark in TRAINER_WARNINGS:
        function = mark(function)
    return function


@trainer_test
@pytest.mark.parametrize("precision", INNER)
def test_trainer_has_the_same_losses(precision: str, tmp_path: Path) -> None:
    from lightning.pytorch.plugins import precision as own

    from lite_ext.integrations.lightning import TrainerPrecision

    makes = {
        "32-true": own.Precision,
        "64-true": own.DoublePrecision,
        "16-true": lambda: own.HalfPrecision("16-true"),
        "bf16-true": lambda: own.HalfPrecision("bf16-true"),
        "16-mixed": lambda: own.MixedPrecision("16-mixed", "cpu"),
        "bf16-mixed": lambda: own.MixedPrecision("bf16-mixed", "cpu"),
    }
    theirs = makes[precision]()
    ours = TrainerPrecision(precision, device="cpu")
    assert isinstance(ours, type(theirs))
    assert ours.precision == precision
    settings = {"gradient_clip_val": 0.5}
    losses, dtypes = fit(ours, tmp_path, **settings)
    wanted, wanted_dtypes = fit(theirs, tmp_path, **settings)
    assert losses == wanted
    assert len(set(losses)) == 4
    assert dtypes == wanted_dtypes
    skipped = TrainerPrecision(precision, skip_inputs=["scale"], device="cpu")
    assert fit(skipped, tmp_path, **settings)[1] == [(x, F32) for x, _ in dtypes]


@trainer_test
def test_trainer_takes_frozen_dataclasses(tmp_path: Path) -> None:
    from lite_ext.integrations.lightning import TrainerPrecision

    batch = Frozen(torch.ones(2, 4))
    converted = TrainerPrecision("bf16-true").convert_input(batch)
    assert (type(converted), converted.y.dtype, converted.note) == (Frozen, BF16, "kept")
    losses, dtypes = fit(TrainerPrecision("bf16-true"), tmp_path, batches=[batch] * 2)
    assert (len(losses), dtypes) == (2, [BF16, BF16])


@trainer_test
def test_trainer_refuses_two_precisions() -> None:
    from lightning.pytorch import Trainer

    from lite_ext.integrations.lightning import TrainerPrecision

    with pytest.raises(ValueError, match="Received both"):
        Trainer(accelerator="cpu", precision="bf16-true", plugins=TrainerPrecision("bf16-true"))


# ---------------------------------------------------------------- the extra


@pytest.mark.parametrize(("module", "extra"), [("lightning", "lightning"), ("accelerate", "accelerate")])
def test_missing_extra(module: str, extra: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nimport lite_ext.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"pip install 'lite_ext[{extra}]'" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError")


def test_nothing_but_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, lite_ext, lite_ext.integrations\n"
        "bad = {'lightning', 'accelerate', 'transformers', 'lightning_utilities'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
