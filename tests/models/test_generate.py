"""Generation through the wrapper, caches, and objects of other libraries in an output."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")  # an extra; without it there is nothing to test

from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from zoo_models import ROWS

import lite_ext

BF16, F32 = torch.bfloat16, torch.float32
CACHES = ("cache", "past_key_values")  # transformers renamed the field

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    # Raised by the import of torchmetrics and tensordict.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchmetrics"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensordict"),
]

GENERATES = ["gpt2", "llama", "mistral", "gemma2", "falcon", "mixtral", "mamba", "t5", "bart", "whisper"]


def prompt(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = ROWS[name].inputs()
    return {key: value for key, value in inputs.items() if not key.startswith("decoder_")}


def generate(model: Any, inputs: dict[str, Any], **settings: Any) -> torch.Tensor:
    torch.manual_seed(2)
    ids = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, **settings)
    assert isinstance(ids, torch.Tensor)
    return ids


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
}


def cache_name(model: nn.Module) -> str:
    return next(name for name in CACHES if name in inspect.signature(model.forward).parameters)


@pytest.mark.parametrize("skip", [(), CACHES], ids=["all", "without the cache"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", GENERATES)
def test_generate_as_a_marked_method(name: str, strategy: str, skip: tuple[str, ...]) -> None:
    settings = STRATEGIES["sample" if name == "mamba" and strategy == "beams" else strategy]
    model = ROWS[name].build()
    low = {key: lite_ext.convert(value, BF16) for key, value in prompt(name).items()}
    with torch.autocast("cpu", dtype=BF16):
        wanted = generate(model, low, **settings)
    wrapped = lite_ext.LiteModule(model, "bf16-mixed", skip_outputs=skip)
    wrapped.mark_forward_method("generate")
    assert torch.equal(generate(wrapped, prompt(name), **settings), wanted)


@pytest.mark.parametrize("skip", [(), CACHES], ids=["all", "without the cache"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "falcon", "mixtral"])
def test_every_step_through_the_wrapper(name: str, skip: tuple[str, ...]) -> None:
    model = ROWS[name].build()
    with torch.autocast("cpu", dtype=BF16):
        wanted = generate(model, prompt(name), do_sample=False)
    wrapped = lite_ext.LiteModule(model, "bf16-mixed", skip_outputs=skip)
    argument = cache_name(model)
    assert argument in inspect.signature(wrapped.forward).parameters
    inputs = prompt(name)
    ids, step, mask = inputs["input_ids"], inputs["input_ids"], inputs.get("attention_mask")
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    cache, first = DynamicCache(config=model.config), None
    with torch.no_grad():
        for _ in range(6):
            more = {} if mask is None else {"attention_mask": mask, "position_ids": positions}
            out = wrapped(input_ids=step, use_cache=True, **{argument: cache}, **more)
            assert out.logits.dtype == F32
            assert out[argument] is cache  # opaque: never copied
            first = first or [layer.keys.dtype for layer in cache.layers]
            assert [layer.keys.dtype for layer in cache.layers] == first  # nor converted
            out.logits[..., model.config.eos_token_id] = -torch.inf  # min_new_tokens forbids the end
            step = out.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(step)], 1)
                positions = positions[:, -1:] + 1
    assert torch.equal(ids, wanted)


def test_generate_itself_is_the_models_own_until_it_is_marked() -> None:
    model = ROWS["llama"].build()
    wrapped = lite_ext.LiteModule(model, "bf16-mixed")
    assert torch.equal(generate(wrapped, prompt("llama")), generate(model, prompt("llama")))


# ---------------------------------------------------------------- caches


def filled(cache: Any) -> Any:
    for layer in range(2):
        cache.update(torch.randn(1, 4, 3, 8, dtype=BF16), torch.randn(1, 4, 3, 8, dtype=BF16), layer)
    return cache


def caches() -> dict[str, Any]:
    config = ROWS["llama"].build().config
    return {
        "dynamic": filled(DynamicCache()),
        "static": StaticCache(config=config, max_cache_len=16),
        "encoder-decoder": EncoderDecoderCache(filled(DynamicCache()), filled(DynamicCache())),
    }


@pytest.mark.parametrize("kind", ["dynamic", "static", "encoder-decoder"])
def test_caches_are_opaque(kind: str) -> None:
    cache = caches()[kind]
    output = {"logits": torch.ones(1, dtype=BF16), "cache": cache, "deep": [(cache,)]}
    before = pickle.dumps(cache)
    converted = lite_ext.convert(output, F32)
    assert converted["logits"].dtype == F32
    assert converted["cache"] is cache
    assert converted["deep"] is output["deep"]
    assert pickle.dumps(cache) == before


# ---------------------------------------------------------------- objects of other libraries


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.layer(x))


def test_torchmetrics() -> None:
    """Metrics of what the wrapper returns are those of the same values in float32, and lose nothing on the way."""
    metrics = pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    model = Returns(lambda y: {"logits": y, "regression": y.sum(1)})
    x, target = torch.randn(256, 4), torch.randint(4, (256,))
    out = lite_ext.LiteModule(model, "bf16-mixed")(x)
    with torch.autocast("cpu", dtype=BF16):
        plain = model(x.to(BF16))
    accuracy = metrics.classification.MulticlassAccuracy(4)
    accuracy.update(out["logits"].detach(), target)
    assert accuracy.compute() == metrics.functional.accuracy(
        plain["logits"].float(), target, task="multiclass", num_classes=4, average="macro"
    )
    mean = metrics.MeanMetric()
    mean.update(out["regression"].detach())
    assert mean.compute().dtype == F32
    torch.testing.assert_close(mean.compute(), plain["regression"].float().mean())
    error = metrics.MeanSquaredError()
    error.update(out["regression"].detach(), torch.zeros(256))
    torch.testing.assert_close(error.compute(), plain["regression"].float().square().mean())


def test_a_distribution_is_opaque() -> None:
    def make(y: torch.Tensor) -> Any:
        return {"logits": y, "policy": torch.distributions.Categorical(logits=y.float())}

    model = Returns(make)
    kept: list[Any] = []
    model.register_forward_hook(lambda module, args, output: kept.append(output["policy"]))
    out = lite_ext.LiteModule(model, "bf16-mixed")(torch.ones(2, 4))
    assert out["logits"].dtype == F32
    assert out["policy"] is kept[0]
    assert out["policy"].sample().shape == (2,)


REGISTERING = """
import torch, lite_ext
from tensordict import TensorDict
low = torch.ones(2, 3, dtype=torch.bfloat16)
nested = TensorDict({"b": low.clone(), "n": torch.arange(2)}, batch_size=[2])
out = {"td": TensorDict({"a": low, "inner": nested}, batch_size=[2]), "y": low}
wrapped = lite_ext.LiteModule(torch.nn.Identity(), "32-true")
opaque = wrapped(out)
assert opaque["td"] is out["td"] and opaque["y"].dtype == torch.float32
assert out["td"]["a"] is low
lite_ext.register_node(
    TensorDict,
    lambda td: (list(td.values()), (list(td.keys()), td.batch_size)),
    lambda context, values: TensorDict(dict(zip(context[0], values)), batch_size=context[1]),
)
made = wrapped(out)
assert type(made["td"]) is TensorDict and made["td"].batch_size == torch.Size([2])
assert made["td"]["a"] is made["y"] and made["y"].dtype == torch.float32
assert made["td"]["inner", "b"].dtype == torch.float32
assert made["td"]["inner", "n"].dtype == torch.int64
assert out["td"]["a"].dtype == torch.bfloat16
"""


def test_tensordict() -> None:
    """In a process of its own: a registration is for good."""
    pytest.importorskip("tensordict")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REGISTERING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
