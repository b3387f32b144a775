"""Accelerate with the fused conversion: what it did before, a prepared model that can be pickled, and the way back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")  # an extra; without it there is nothing to test

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from lite_ext.integrations import accelerate as fused

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OWN = Accelerator.__dict__["prepare_model"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)  # one for the whole process, with one precision
    fused.disable()
    assert Accelerator.__dict__["prepare_model"] is OWN


def counted(forward: Any) -> Any:
    """A decorator of the model's author, such as transformers has on every forward."""

    @functools.wraps(forward)
    def decorated(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return forward(self, *args, **kwargs)

    return decorated


@dataclasses.dataclass(frozen=True)
class Out:
    y: torch.Tensor
    wide: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.inner_dtype: Any = None

    @counted
    def forward(self, x: torch.Tensor, as_class: bool = False) -> Any:
        y = self.layer(x)
        self.inner_dtype = y.dtype
        wide = torch.ones(1, dtype=F64)
        return Out(y, wide) if as_class else {"y": y, "wide": wide, "more": [y]}


def accelerator(mixed_precision: str = "bf16", **kwargs: Any) -> Accelerator:
    return Accelerator(mixed_precision=mixed_precision, cpu=True, **kwargs)


def prepared() -> Any:
    fused.enable()
    return accelerator().prepare(Net())


X = torch.linspace(-1, 1, 8).view(2, 4)


def test_same_values_as_accelerates_own() -> None:
    torch.manual_seed(0)
    net = Net()
    own = accelerator().prepare(copy.deepcopy(net))
    with fused.enabled():
        ours = accelerator().prepare(net)
    wanted, got = own(X), ours(X)
    assert own.inner_dtype == ours.inner_dtype == BF16
    assert got["y"].dtype == F32
    assert torch.equal(got["y"], wanted["y"])
    assert got["wide"].dtype == wanted["wide"].dtype == F64  # upcast only
    assert got["more"][0] is got["y"]


def test_converts_what_accelerate_leaves() -> None:
    out = prepared()(X, as_class=True)
    assert type(out) is Out
    assert (out.y.dtype, out.wide.dtype) == (F32, F64)


def test_same_training() -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        engine = accelerator()
        net = Net()
        model, optimizer = engine.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        losses = []
        for _ in range(5):
            loss = model(torch.randn(3, 4))["y"].square().mean()
            engine.backward(loss)
            engine.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    wanted = train()
    with fused.enabled():
        got = train()
    assert got == wanted
    assert len(set(got)) == 5


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "how",
    [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy, saved_and_loaded],
    ids=["pickle", "deepcopy", "save"],
)
def test_a_copy_still_computes_in_mixed_precision(how: Any) -> None:
    model = prepared()
    wanted = model(X)["y"]
    copied = how(model)
    out = copied(X)["y"]
    assert copied.inner_dtype == BF16
    assert out.dtype == F32
    assert torch.equal(out, wanted)
    with torch.no_grad():  # its weights are its own
        copied.layer.weight.zero_()
        copied.layer.bias.zero_()
    assert not copied(X)["y"].any()
    assert torch.equal(model(X)["y"], wanted)


def test_accelerates_own_copy_loses_both() -> None:
    """What this module is there for; fails once Accelerate keeps them itself."""
    copied = pickle.loads(pickle.dumps(accelerator().prepare(Net())))
    assert copied(X)["y"].dtype == F32
    assert copied.inner_dtype == F32


def test_unwrap_keeps_the_conversion() -> None:
    model = prepared()
    unwrapped = accelerator().unwrap_model(model)
    assert unwrapped is model
    assert unwrapped(X)["y"].dtype == F32
    assert unwrapped.inner_dtype == BF16


@pytest.mark.parametrize("how", [lambda model: model, lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_unwrap_without_the_conversion(how: Any) -> None:
    model = how(accelerator().unwrap_model(prepared(), keep_fp32_wrapper=False))
    assert not hasattr(model, "_original_forward")
    calls = model.calls
    assert model(X)["y"].dtype == F32
    assert model.inner_dtype == F32
    assert model.calls == calls + 1  # the author's decorator is still there
    assert list(inspect.signature(model.forward).parameters) == ["x", "as_class"]


def test_unwrap_of_a_forward_that_is_no_method() -> None:
    fused.enable()
    net = Net()
    net.forward = functools.partial(Net.forward, net)  # as the hooks of big models do
    model = accelerator().prepare(net)
    assert model(X)["y"].dtype == F32
    assert model.inner_dtype == BF16
    unwrapped = accelerator().unwrap_model(model, keep_fp32_wrapper=False)
    unwrapped(X)
    assert unwrapped.inner_dtype == F32


def test_signature() -> None:
    assert list(inspect.signature(prepared().forward).parameters) == ["x", "as_class"]


def test_compiled() -> None:
    model = prepared()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X)["y"], model(X)["y"])


def test_prepared_twice_and_evaluation_mode() -> None:
    model = prepared()
    forward = model.forward
    assert accelerator().prepare(model).forward is forward
    assert accelerator().prepare_model(Net(), evaluation_mode=True)(X)["y"].dtype == F32


def test_without_mixed_precision_nothing_is_touched() -> None:
    fused.enable()
    assert "forward" not in accelerator("no").prepare(Net()).__dict__


def test_autocast_settings_are_accelerates() -> None:
    from accelerate.utils import AutocastKwargs

    fused.enable()
    model = accelerator(kwargs_handlers=[AutocastKwargs(enabled=False)]).prepare(Net())
    model(X)
    assert model.inner_dtype == F32


def test_enable_twice_and_disable() -> None:
    fused.enable()
    replaced = Accelerator.prepare_model
    fused.enable()
    assert Accelerator.prepare_model is replaced
    fused.disable()
    assert Accelerator.__dict__["prepare_model"] is OWN
    fused.disable()
    model = accelerator().prepare(Net())
    assert not isinstance(model.__dict__["forward"], fused.PreparedForward)


def test_context_manager() -> None:
    with fused.enabled():
        with fused.enabled():
            pass
        assert Accelerator.prepare_model is not OWN
        model = accelerator().prepare(Net())
    assert Accelerator.__dict__["prepare_model"] is OWN
    assert model(X)["y"].dtype == F32
    with pytest.raises(KeyError), fused.enabled():
        raise KeyError
    assert Accelerator.__dict__["prepare_model"] is OWN
    fused.enable()
    with fused.enabled():
        pass
    assert Accelerator.prepare_model is not OWN  # as it was before


def test_disable_does_not_undo_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.enable()
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "prepare_model", functools.wraps(OWN)(lambda *args: None))
        with pytest.raises(RuntimeError, match=r"replaced after enable\(\)"):
            fused.disable()


@pytest.mark.parametrize("version", ["1.14.0", "1.16.0.dev0", "2.0.0"])
def test_unknown_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"accelerate {version} is not understood .*: 1\.15\.\*"):
        fused.enable()
    assert Accelerator.__dict__["prepare_model"] is OWN
