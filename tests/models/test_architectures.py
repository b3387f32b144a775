"""Real models: what comes out of the wrapper is what plain torch computes, followed by the reference walk."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from compare import actual, bits, expected
from torch import nn

pytest.importorskip("transformers")  # an extra; without it there is nothing to test

from zoo_models import ROWS

import lite_ext
from lite_ext import tree
from lite_ext.dtypes import DEFAULT_SOURCE_MASK

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
NO_NAMES: frozenset[str] = frozenset()
EVERYTHING = ("output_hidden_states", "output_attentions", "use_cache")

pytestmark = [
    # torch's own, raised by the code of some models.
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]


class Subject(NamedTuple):
    model: nn.Module
    inputs: dict[str, Any]  # floating ones in float32, with values that bfloat16 holds too
    plain: Any  # what plain torch returns for them under autocast


def run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(1)  # some models draw masks
    with torch.no_grad():
        return model(**inputs)


@functools.lru_cache(maxsize=2)  # the tests of one model run one after the other
def subject(name: str) -> Subject:
    model = ROWS[name].build()
    torch.manual_seed(0)
    inputs = ROWS[name].inputs()
    for key, value in inputs.items():
        if value.is_floating_point():
            inputs[key] = value.to(BF16).float()
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds
    # Where use_cache has no parameter of its own, the configuration has switched it on.
    wanted = {key: True for key in EVERYTHING if key in parameters or (takes_more and key != "use_cache")}
    inputs = {**inputs, **wanted}
    low = {key: to_low(value) for key, value in inputs.items()}
    with torch.autocast("cpu", dtype=BF16):
        plain = run(model, low)
    return Subject(model, inputs, plain)


def to_low(value: Any) -> Any:
    return value.to(BF16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def values(part: Any) -> Any:
    """What a tree holds: types, names, dtypes and bits. Objects that no walk enters are asked for their tensors."""
    if isinstance(part, torch.Tensor):
        held = bits(part).tolist() if part.is_floating_point() else part.tolist()
        return part.dtype, tuple(part.shape), held
    if isinstance(part, dict):
        return type(part), [(key, values(value)) for key, value in part.items()]
    if isinstance(part, (list, tuple)):
        return type(part), [values(value) for value in part]
    if hasattr(part, "__dict__"):
        return type(part), [(key, values(value)) for key, value in vars(part).items() if not callable(value)]
    return part if isinstance(part, (str, int, float, bool, type(None))) else type(part)


def wrapped_run(
    name: str, precision: str = "bf16-mixed", inputs: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Any]:
    """The output of the wrapper, and what the model inside returned."""
    model, made, _ = subject(name)
    raw: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, output: raw.append(output))
    try:
        out = run(lite_ext.LiteModule(model, precision, **settings), made if inputs is None else inputs)
    finally:
        hook.remove()
    return out, raw[0]


POLICIES: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {
    "default": ({"output_dtype": "default"}, F32),
    "input": ({"output_dtype": "input", "ambiguous_input": "default"}, F32),
    "keep": ({"output_dtype": "keep"}, None),
    "float64": ({"output_dtype": F64}, F64),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ROWS)
def test_equals_plain_torch_and_the_reference_walk(name: str, policy: str) -> None:
    settings, dtype = POLICIES[policy]
    out, raw = wrapped_run(name, **settings)
    plain = subject(name).plain
    if dtype is None:
        assert out is raw
        assert values(out) == values(plain)
        return
    assert values(out) == values(tree.convert(plain, dtype, DEFAULT_SOURCE_MASK, NO_NAMES))
    # The same leaves, containers and opaque objects as one conversion of what this forward returned.
    assert actual(raw, out) == expected(raw, dtype)
    assert values(raw) == values(plain)  # the model's own output is as it was


@pytest.mark.parametrize("name", ROWS)
def test_input_policy_follows_the_inputs(name: str) -> None:
    inputs = subject(name).inputs
    floating = [key for key, value in inputs.items() if to_low(value) is not value]
    if not floating:
        with pytest.raises(ValueError, match="no floating tensor"):
            wrapped_run(name, output_dtype="input")
        return
    wide = {key: value.double() if key in floating else value for key, value in inputs.items()}
    out, _ = wrapped_run(name, inputs=wide, output_dtype="input")
    assert values(out) == values(tree.convert(subject(name).plain, F64, DEFAULT_SOURCE_MASK, NO_NAMES))


@pytest.mark.parametrize("name", ROWS)
def test_skip_outputs(name: str) -> None:
    skipped = ("hidden_states", "decoder_hidden_states", "attentions", "past_key_values", "cache")
    out, raw = wrapped_run(name, skip_outputs=skipped)
    for key in skipped:
        if key in raw:
            assert out[key] is raw[key]
    assert values(out) == values(tree.convert(subject(name).plain, F32, DEFAULT_SOURCE_MASK, frozenset(skipped)))


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mixtral", "mamba", "vit", "detr", "wav2vec2", "clip"])
def test_true_half_precision(name: str) -> None:
    row, inputs = ROWS[name], subject(name).inputs
    plain = row.build().to(BF16)
    torch.set_default_dtype(BF16)
    try:
        wanted = run(plain, {key: to_low(value) for key, value in inputs.items()})
    finally:
        torch.set_default_dtype(F32)
    out = run(lite_ext.setup_module(row.build(), "bf16-true"), inputs)
    assert values(out) == values(tree.convert(wanted, F32, DEFAULT_SOURCE_MASK, NO_NAMES))


def test_the_families_are_many() -> None:
    assert len(ROWS) >= 30
    assert len({row.model for row in ROWS.values()}) == len(ROWS)
    families = {row.family for row in ROWS.values()}
    assert families >= {
        "encoder",
        "decoder",
        "encoder-decoder",
        "vision",
        "detection",
        "segmentation",
        "speech",
        "multimodal",
        "mixture of experts",
        "state space",
    }


def test_hidden_states_attentions_and_caches_are_on() -> None:
    held = {key for name in ("llama", "t5", "vit", "mamba") for key in subject(name).plain}
    assert held >= {"hidden_states", "attentions", "decoder_hidden_states", "cross_attentions"}
    assert held & {"cache", "past_key_values"}
