"""``python -m lite_ext bench``: how fast conversion is on this machine, beside what torch offers for it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

import lite_ext

DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""The dtypes by their short names; torch's own names are known too."""

OURS = "lite_ext.convert"
SECONDS_A_ROUND = 0.02

Method = Callable[[tuple[Tensor, ...], torch.dtype], Any]


def _map_to(tree: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(dtype), tree)


def _list_of_to(tree: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    return [leaf.to(dtype) for leaf in tree]


def _list_of_float(tree: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    return [leaf.float() for leaf in tree]


def _foreach_copy(tree: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    outputs = [torch.empty_like(leaf, dtype=dtype) for leaf in tree]
    torch._foreach_copy_(outputs, tree)
    return outputs


def _methods(target: torch.dtype) -> dict[str, Method]:
    methods: dict[str, Method] = {
        OURS: lite_ext.convert,
        "tree_map of .to (torch)": _map_to,
        "list of .to": _list_of_to,
    }
    if target is torch.float32:
        methods["list of .float"] = _list_of_float
    methods["_foreach_copy_"] = _foreach_copy
    return methods


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a name such as ``"bf16"`` or ``"bfloat16"`` means.

    Raises:
        ValueError: There is none; the text lists the names.

    Example:
        >>> dtype_named("bf16")
        torch.bfloat16
    """
    for short, dtype in DTYPES.items():
        if name in (short, str(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    known = ", ".join(f"{short} ({str(dtype).removeprefix('torch.')})" for short, dtype in DTYPES.items())
    raise ValueError(f"{name!r} is not a dtype to benchmark; use one of: {known}")


def run(
    device: str = "cpu",
    leaves: int = 1000,
    size: int = 64,
    source: torch.dtype = torch.bfloat16,
    target: torch.dtype = torch.float32,
    rounds: int = 9,
    threads: int | None = None,
) -> dict[str, Any]:
    """Time the conversion of a tuple of tensors, then of one that has the dtype already.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        leaves: How many tensors.
        size: The elements of each.
        source: Their dtype.
        target: The dtype to convert to, another than ``source``.
        rounds: Timed rounds of every method, interleaved.
        threads: The threads that torch may use; ``None``: as many as it uses now.

    Returns:
        The settings, the environment, and for ``"convert"`` and ``"nothing to convert"`` the seconds a call of every
        method: ``median``, ``low`` and ``high`` of the rounds, and ``ratio``, the median over that of lite_ext.

    Raises:
        ValueError: A setting makes no sense, or the device is not there.
        RuntimeError: A method gives another result than ``Tensor.to``.

    The garbage collector is on, as it is in a training loop.
    """
    threads = torch.get_num_threads() if threads is None else threads
    for name, value in (("leaves", leaves), ("size", size), ("rounds", rounds), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if source is target:
        raise ValueError(f"the dtypes must differ for something to be converted, got {source} twice")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device that this torch can use")
    tree = tuple(torch.randn(size, device=device).to(source) for _ in range(leaves))
    converted = tuple(leaf.to(target) for leaf in tree)
    methods = _methods(target)
    for name, method in methods.items():
        for have, want in zip(method(tree, target), converted, strict=True):
            if have.dtype is not target or not torch.equal(have, want):
                raise RuntimeError(f"{name} gives another result than Tensor.to")
    without_copy = {name: method for name, method in methods.items() if method is not _foreach_copy}
    build = lite_ext.build_info()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": threads,
        "torch": torch.__version__,
        "lite_ext": build["version"],
        "backend": build["backend"],
        "leaves": leaves,
        "size": size,
        "source": str(source),
        "target": str(target),
        "bytes": leaves * size * (source.itemsize + target.itemsize),
        "convert": _time(methods, tree, target, rounds, threads),
        "nothing to convert": _time(without_copy, converted, target, rounds, threads),
    }


def _time(
    methods: dict[str, Method], tree: tuple[Tensor, ...], dtype: torch.dtype, rounds: int, threads: int
) -> dict[str, dict[str, float]]:
    # The timer waits for the device, and turns the collector off: the setup turns it on.
    timers = {
        name: Timer(
            "convert(tree, dtype)",
            "gc.enable()",
            globals={"gc": gc, "convert": method, "tree": tree, "dtype": dtype},
            num_threads=threads,
        )
        for name, method in methods.items()
    }
    numbers = {name: max(1, round(SECONDS_A_ROUND / timer.timeit(2).mean)) for name, timer in timers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(numbers[name]).mean)
    ours = median(seconds[OURS])
    return {
        name: {"median": median(values), "low": min(values), "high": max(values), "ratio": median(values) / ours}
        for name, values in seconds.items()
    }


def table(result: dict[str, Any]) -> str:
    """Return what :func:`run` measured as text for a terminal."""
    source, target = (result[key].removeprefix("torch.") for key in ("source", "target"))
    lines = [
        f"lite_ext {result['lite_ext']} ({result['backend']}), torch {result['torch']}, {result['device']}, "
        f"{result['threads']} thread(s)",
        f"{result['leaves']:,} tensors of {result['size']:,} elements, {source} to {target}",
    ]
    for title in ("convert", "nothing to convert"):
        measured = result[title]
        width = max(map(len, measured))
        moved = title == "convert"
        head = f"{title if moved else f'already {target}'}"
        lines += ["", f"{head:<{width}}  {'us a call':>12}  {'ns a tensor':>11}" + ("    GB/s" if moved else "")]
        for name, figures in measured.items():
            seconds = figures["median"]
            line = f"{name:<{width}}  {1e6 * seconds:>12,.2f}  {1e9 * seconds / result['leaves']:>11,.1f}"
            if moved:
                line += f"  {result['bytes'] / seconds / 1e9:>6.2f}"
            lines.append(line if name == OURS else f"{line}  {_compared(figures['ratio'])}")
    return "\n".join(lines)


def _compared(ratio: float) -> str:
    return f"lite_ext is {ratio:,.1f} x faster" if ratio >= 1 else f"lite_ext is {1 / ratio:,.1f} x slower"


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw the ratios that :func:`run` measured to ``file``; its ending says in which format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    titles = ("convert", "nothing to convert")
    for axes, title in zip(figure.subplots(2, 1), titles, strict=True):
        names = list(result[title])
        ratios = [result[title][name]["ratio"] for name in names]
        bars = axes.barh(names, ratios, color=["#0072b2" if name == OURS else "#d55e00" for name in names])
        axes.bar_label(bars, [f" {ratio:,.1f}" for ratio in ratios])
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_title(f"{title}: time / time of {OURS}", fontsize=10)
    shape = f"{result['leaves']:,} tensors of {result['size']:,} elements"
    figure.suptitle(f"{shape}, {result['source']} to {result['target']}, {result['device']}", fontsize=10)
    figure.savefig(file, dpi=110)


def write_json(result: dict[str, Any], file: Path) -> None:
    """Write what :func:`run` measured."""
    file.write_text(json.dumps(result, indent=2) + "\n")
