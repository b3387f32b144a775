"""What comes back from six transformers models at ``bf16-mixed``, under every output policy.

    python examples/transformers_outputs.py [--quick] [--only gpt2 detr]

One table a model: its outputs by path, the dtype that the inner forward gave, and the dtype that the caller
gets under each policy; how many leaves were converted, kept and skipped; and what the conversion costs beside
``apply_to_collection`` of lightning_utilities doing the same. Then a small GPT-2 is trained on real text.
Everything shown is checked against a plain forward under ``torch.autocast`` and ``Tensor.to``; a wrong dtype
ends with exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from report import Mismatch, Section, echo, print_table
from tiny_models import BUILDERS, Subject, build
from torch import Tensor
from train_gpt2 import train

import lite_ext

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}

# What a loss or metric seldom reads. Older transformers call the cache past_key_values.
SKIPPED = (
    *(f"{side}hidden_states" for side in ("", "encoder_", "decoder_")),
    *(f"{side}attentions" for side in ("", "encoder_", "decoder_", "cross_")),
    *("cache", "past_key_values"),
)


@dataclass(frozen=True)
class Policy:
    """One column of a table.

    Attributes:
        title: The column's heading.
        options: Keyword arguments of ``LiteModule``.
        expected: The dtype of every converted output; ``None`` means that all are returned as they are.
        batch_dtype: The dtype of the caller's floating inputs.
    """

    title: str
    options: dict[str, Any]
    expected: torch.dtype | None
    batch_dtype: torch.dtype = torch.float32

    @property
    def skip(self) -> tuple[str, ...]:
        return tuple(self.options.get("skip_outputs", ()))


@dataclass(frozen=True)
class Leaf:
    """One tensor of an output tree.

    Attributes:
        path: The names and indices that lead to it.
        tensor: The tensor.
        cache: The class name of the cache object that holds it, if one does; lite_ext does not look inside.
    """

    path: tuple[str | int, ...]
    tensor: Tensor
    cache: str = ""


def policies(subject: Subject) -> list[Policy]:
    """Return the columns for ``subject``: the policy ``"input"`` depends on its floating inputs."""
    if subject.has_floating_inputs:
        by_input = [
            Policy("input\nf32 in", {"output_dtype": "input"}, torch.float32),
            Policy("input\nf64 in", {"output_dtype": "input"}, torch.float64, batch_dtype=torch.float64),
        ]
    else:
        by_input = [
            Policy("input\npromote", {"output_dtype": "input", "ambiguous_input": "promote"}, torch.float32),
            Policy("input\nkeep", {"output_dtype": "input", "ambiguous_input": "keep"}, None),
        ]
    return [
        Policy("default", {"output_dtype": "default"}, torch.float32),
        *by_input,
        Policy("keep", {"output_dtype": "keep"}, None),
        Policy("float16", {"output_dtype": torch.float16}, torch.float16),
        Policy("default\n+ skip", {"output_dtype": "default", "skip_outputs": SKIPPED}, torch.float32),
    ]


def leaves(tree: Any, path: tuple[str | int, ...] = (), cache: str = "") -> Iterator[Leaf]:
    """Yield the tensors of a transformers output in order, those in its caches too, without lite_ext."""
    if isinstance(tree, Tensor):
        yield Leaf(path, tree, cache)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key), cache)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index), cache)
    elif hasattr(tree, "self_attention_cache"):
        for name in ("self_attention_cache", "cross_attention_cache"):
            yield from leaves(getattr(tree, name), (*path, name), type(tree).__name__)
    elif hasattr(tree, "layers"):
        for index, layer in enumerate(tree.layers):
            pair = {"keys": layer.keys, "values": layer.values}
            yield from leaves(pair, (*path, index), cache or type(tree).__name__)


def expected_dtype(leaf: Leaf, policy: Policy) -> torch.dtype:
    """Return the dtype that ``policy`` promises for an output that the inner forward returned as ``leaf``."""
    skipped = any(name in policy.skip for name in leaf.path)
    if policy.expected is None or skipped or leaf.cache or not leaf.tensor.is_floating_point():
        return leaf.tensor.dtype
    return policy.expected


def plain_forward(subject: Subject) -> Any:
    """Return the output of the bare module under ``torch.autocast``, its floating inputs in bfloat16."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return subject.model(**subject.inputs_as(torch.bfloat16))


def wrapped_forward(subject: Subject, policy: Policy) -> tuple[Any, Any]:
    """Return what the inner forward returned and what the caller of the wrapper got."""
    inner: list[Any] = []
    handle = subject.model.register_forward_hook(lambda module, args, output: inner.append(output))
    try:
        wrapped = lite_ext.LiteModule(subject.model, "bf16-mixed", **policy.options)
        with torch.no_grad():
            outer = wrapped(**subject.inputs_as(policy.batch_dtype))
    finally:
        handle.remove()
    return inner[0], outer


def check(subject: Subject, policy: Policy, plain: Any, inner: Any, outer: Any) -> dict[str, int]:
    """Hold one wrapped forward against the plain one, leaf by leaf.

    Returns:
        How many leaves were converted, kept and skipped, and how many the opaque cache holds.

    Raises:
        Mismatch: A type, path, dtype or value is not what ``policy`` promises.
    """
    where = f"{subject.name}, {policy.title!r}"
    if type(outer) is not type(inner):
        raise Mismatch(f"{where}: expected a {type(inner).__name__}, got a {type(outer).__name__}")
    if policy.expected is None and outer is not inner:
        raise Mismatch(f"{where}: the output is not the object that the inner forward returned")
    before, within, after = list(leaves(plain)), list(leaves(inner)), list(leaves(outer))
    if not before or not [x.path for x in before] == [x.path for x in within] == [x.path for x in after]:
        raise Mismatch(f"{where}: the paths of the outputs differ")
    counts = dict.fromkeys(("converted", "kept", "skipped", "in cache"), 0)
    for old, mid, new in zip(before, within, after, strict=True):
        want, place = expected_dtype(old, policy), f"{where}: {show_path(new.path)}"
        if new.tensor.dtype is not want or mid.tensor.dtype is not old.tensor.dtype:
            came = f"{mid.tensor.dtype} inside, {new.tensor.dtype} outside"
            raise Mismatch(f"{place}: expected {old.tensor.dtype} and {want}, got {came}")
        if not torch.equal(new.tensor, old.tensor.to(want)):
            raise Mismatch(f"{place}: values differ from Tensor.to({want})")
        if (new.tensor is mid.tensor) is not (want is mid.tensor.dtype):
            raise Mismatch(f"{place}: a leaf that needs no cast must stay the same object")
        counts[outcome(old, mid, new, policy)] += 1
    return counts


def outcome(old: Leaf, mid: Leaf, new: Leaf, policy: Policy) -> str:
    """Name what became of a leaf."""
    if new.tensor is not mid.tensor:
        return "converted"
    if old.cache:
        return "in cache"
    return "skipped" if any(name in policy.skip for name in old.path) else "kept"


def ambiguous_error(subject: Subject) -> str:
    """Return the message of the policy ``"input"`` for a model without floating inputs."""
    wrapped = lite_ext.LiteModule(subject.model, "bf16-mixed", output_dtype="input")
    try:
        with torch.no_grad():
            wrapped(**subject.inputs)
    except ValueError as error:
        return str(error)
    raise Mismatch(f'{subject.name}: output_dtype="input" without floating inputs did not raise ValueError')


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a floating tensor: the function that Lightning Fabric gives to ``apply_to_collection``."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def times(tree: Any, dtype: torch.dtype, skip: tuple[str, ...], rounds: int) -> tuple[float, float]:
    """Return the median microseconds of ``lite_ext.convert`` and of ``apply_to_collection``, interleaved.

    The latter cannot skip, so it converts everything.
    """
    ours, theirs = [], []
    for _ in range(rounds):
        start = perf_counter()
        lite_ext.convert(tree, dtype, skip=skip)
        middle = perf_counter()
        apply_to_collection(tree, Tensor, to_dtype, dtype)
        ours.append(middle - start)
        theirs.append(perf_counter() - middle)
    mine, other = lite_ext.convert(tree, dtype), apply_to_collection(tree, Tensor, to_dtype, dtype)
    if [leaf.tensor.dtype for leaf in leaves(mine)] != [leaf.tensor.dtype for leaf in leaves(other)]:
        raise Mismatch("lite_ext and apply_to_collection were timed on different work")
    return 1e6 * median(ours), 1e6 * median(theirs)


def show_path(path: Iterable[str | int]) -> str:
    """Return ``path`` as Python would index it."""
    return "".join(f"[{part!r}]" for part in path)


def show_group(paths: list[tuple[str | int, ...]], cache: str) -> str:
    """Return one label for the items of one sequence, or for all that a cache holds."""
    if cache:
        return f"{show_path(paths[0][:1])}: {cache}"
    if len(paths) == 1:
        return show_path(paths[0])
    at = next(i for i, part in enumerate(paths[0]) if part != paths[-1][i])
    first, last = paths[0], paths[-1]
    return f"{show_path(first[:at])}[{first[at]}..{last[at]}]{show_path(first[at + 1 :])}"


def group_rows(plain: Any, outers: list[Any]) -> list[list[str]]:
    """Return table rows: one for each run of items of a sequence that have the same dtypes everywhere."""
    groups: dict[tuple[Any, ...], list[tuple[str | int, ...]]] = {}
    for old, *news in zip(leaves(plain), *map(leaves, outers), strict=True):
        before = SHORT[old.tensor.dtype]
        after = [SHORT[new.tensor.dtype] + ("" if new.tensor.dtype is old.tensor.dtype else " *") for new in news]
        # Without indices, so that the items of one sequence meet; a cache is one row whatever it holds.
        name = tuple(part for part in old.path if isinstance(part, str)) if not old.cache else old.path[:1]
        groups.setdefault((name, old.cache, before, *after), []).append(old.path)
    return [[show_group(paths, cache), *cells] for (_, cache, *cells), paths in groups.items()]


def show_model(key: str, rounds: int) -> None:
    """Run, check and print one model."""
    subject = build(key)
    plain = plain_forward(subject)
    columns = policies(subject)
    outers, counts, costs = [], [], []
    for policy in columns:
        inner, outer = wrapped_forward(subject, policy)
        counts.append(check(subject, policy, plain, inner, outer))
        outers.append(outer)
        dtype = policy.expected
        costs.append(None if dtype is None else times(inner, dtype, policy.skip, rounds))
    summary: Section = [[f"leaves {name}", "", *(str(c[name]) for c in counts)] for name in counts[0]]
    speed: Section = [
        ["us lite_ext.convert", "", *(f"{cost[0]:.1f}" if cost else "-" for cost in costs)],
        ["us apply_to_collection", "", *(f"{cost[1]:.1f}" if cost else "-" for cost in costs)],
        ["ratio", "", *(f"{cost[1] / cost[0]:.1f}" if cost else "-" for cost in costs)],
    ]
    title = f"{subject.name}: {type(plain).__name__}"
    print_table(title, ["output", "before", *(p.title for p in columns)], [group_rows(plain, outers), summary, speed])
    if not subject.has_floating_inputs:
        echo(f'output_dtype="input" alone raises here:\n  ValueError: {ambiguous_error(subject)}\n')


def main(arguments: list[str] | None = None) -> int:
    """Run the example and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models and fewer timing rounds")
    parser.add_argument("--only", nargs="+", choices=list(BUILDERS), metavar="MODEL", help=" ".join(BUILDERS))
    options = parser.parse_args(arguments)
    keys = options.only or (["gpt2", "detr"] if options.quick else list(BUILDERS))

    import transformers

    transformers.logging.set_verbosity_error()
    info = lite_ext.build_info()
    echo(f"lite_ext {lite_ext.__version__} ({info['backend']} backend), torch {torch.__version__}")
    echo("* marks a converted dtype; times are medians of one run, for the output tree of that column\n")
    try:
        for key in keys:
            show_model(key, 5 if options.quick else 50)
        source, losses = train()
    except Mismatch as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    echo(f"A byte-level GPT-2 at bf16-mixed, {len(losses)} steps on {source}; loss in nats a byte:")
    echo("  " + " ".join(f"{loss:.2f}" for loss in losses))
    echo(f"fell from {losses[0]:.2f} to {losses[-1]:.2f}\n")
    echo(f"All outputs of {', '.join(keys)} under every policy have the dtypes and values promised.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
