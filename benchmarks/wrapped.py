"""What one wrapped forward costs, part by part.

Each part is the time by which a forward with it is longer than the same forward without it, all of them timed in the
same interleaved rounds. Times here are lower quartiles of many short rounds: a difference of two medians tells more of
what else the machine did than of a part. The module itself runs under an autocast that is entered once and caches no weights, so that
it casts its weights in every call, as it does under an autocast of its own. Forwards without the input walk are given
the input in bfloat16: whoever casts it, the cast belongs to the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from measure import Method, statistics, time_rounds
from torch import Tensor, nn

import lite_ext

DTYPE = torch.bfloat16
SECONDS_A_ROUND = 0.004
CALLS = 10  # of a forward in one timed statement
PARTS = ("module", "call", "autocast", "input walk", "output walk")
Tick = Callable[[], None]


class Policy(nn.Module):
    """A policy network of two layers with ten outputs, as a step of reinforcement learning runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 10)

    def forward(self, observation: Tensor) -> dict[str, Any]:
        values = self.second(torch.tanh(self.first(observation)))
        return {"heads": tuple(values.unbind(-1)[:9]), "values": values}


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "Linear(8, 8)": lambda: (nn.Linear(8, 8), torch.randn(4, 8)),
    "policy, 10 outputs": lambda: (Policy(), torch.randn(4, 8)),
}


def only(parts: tuple[str, ...]) -> lite_ext.Precision:
    """Return bf16-mixed with some of its parts only."""
    meant = lite_ext.precision("bf16-mixed")
    meant.input_dtype = DTYPE if "input walk" in parts else None
    meant.autocast_dtype = DTYPE if "autocast" in parts else None
    return meant


def floating_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if torch.is_floating_point(tensor) else tensor


def like_fabric(module: nn.Module, parts: tuple[str, ...]) -> Callable[[Tensor], Any]:
    """Return a forward in Python that does what Fabric's wrapper does, with some of its parts only."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if "input walk" in parts:
            args, kwargs = apply_to_collection((args, kwargs), Tensor, floating_to, DTYPE)
        if "autocast" in parts:
            with torch.autocast("cpu", dtype=DTYPE):
                output = module(*args, **kwargs)
        else:
            output = module(*args, **kwargs)
        if "output walk" in parts:
            output = apply_to_collection(output, Tensor, floating_to, torch.get_default_dtype())
        return output

    return forward


def forwards(module: nn.Module) -> dict[tuple[str, int], Callable[..., Any]]:
    """Return every forward to time, by who makes it and how many of ``PARTS`` it has."""
    made: dict[tuple[str, int], Callable[..., Any]] = {("bare", 1): module}
    for count in range(2, len(PARTS) + 1):
        parts = PARTS[:count]
        output = "default" if "output walk" in parts else "keep"
        made["lite_ext", count] = lite_ext.LiteModule(module, only(parts), output_dtype=output)
        made["like Fabric", count] = like_fabric(module, parts)
    return made


def plain_autocast(module: nn.Module) -> Callable[[Tensor], Any]:
    """Return the module under an autocast of each call, outputs left in bfloat16."""

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=DTYPE):
            return module(x)

    return forward


def method(forward: Callable[..., Any], x: Tensor, inside: bool) -> Method:
    """Return a loop of calls: in one autocast for all of them where ``forward`` enters none."""
    calls = f"for _ in range({CALLS}): forward(x)"
    outer = torch.autocast("cpu", dtype=DTYPE, cache_enabled=False)
    if inside:
        return Method(f"with outer:\n    {calls}", {"forward": forward, "x": x, "outer": outer})
    return Method(calls, {"forward": forward, "x": x})


def check(module: nn.Module, x: Tensor) -> None:
    """Raise ``ValueError`` unless both whole wrappers give the same."""
    made = forwards(module)
    ours, theirs = (made[who, len(PARTS)](x) for who in ("lite_ext", "like Fabric"))
    leaves = [torch.utils._pytree.tree_leaves(output) for output in (ours, theirs)]
    for a, b in zip(*leaves, strict=True):
        if a.dtype is not torch.float32 or not torch.equal(a, b):
            raise ValueError(f"the wrappers of {module} give different outputs")


def measure(name: str, rounds: int, tick: Tick) -> dict[str, Any]:
    """Return the seconds a call of every forward of one model, and of each part of them."""
    torch.manual_seed(0)
    module, x = MODELS[name]()
    check(module, x)
    low = x.to(DTYPE)
    walks, enters = 1 + PARTS.index("input walk"), 1 + PARTS.index("autocast")
    methods = {
        f"{who}/{count}": method(forward, x if count >= walks else low, inside=count < enters)
        for (who, count), forward in forwards(module).items()
    }
    methods["plain autocast"] = method(plain_autocast(module), x, inside=False)
    methods["plain autocast/bfloat16 input"] = method(plain_autocast(module), low, inside=False)
    timed = time_rounds(methods, rounds, tick=tick, seconds_a_round=SECONDS_A_ROUND)
    figures = {key: statistics([value / CALLS for value in values]) for key, values in timed.items()}
    whole = {key: figure["q1"] for key, figure in figures.items()}
    entered = whole["plain autocast/bfloat16 input"]
    stacks: dict[str, dict[str, float]] = {
        "torch.autocast alone": {
            "module": whole["bare/1"],
            "autocast": entered - whole["bare/1"],
            "input walk": whole["plain autocast"] - entered,
        }
    }
    for who in ("like Fabric", "lite_ext"):
        before = whole["bare/1"]
        stacks[who] = {"module": before}
        for count, part in enumerate(PARTS[1:], start=2):
            stacks[who][part] = whole[f"{who}/{count}"] - before
            before = whole[f"{who}/{count}"]
    return {"model": name, "stacks": stacks, "methods": figures}
