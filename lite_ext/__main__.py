"""``python -m lite_ext info``: what this installation is. ``python -m lite_ext bench``: how fast it is here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lite_ext import build_info


def _lines(info: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in info.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {', '.join(value) if isinstance(value, list) else value}")
    return lines


def _bench(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    from lite_ext import bench  # torch.utils.benchmark takes a while to import

    try:
        source, target = bench.dtype_named(chosen.source), bench.dtype_named(chosen.target)
        result = bench.run(chosen.device, chosen.leaves, chosen.size, source, target, chosen.rounds, chosen.threads)
        print(bench.table(result))
        if chosen.json is not None:
            bench.write_json(result, chosen.json)
        if chosen.plot is not None:
            bench.plot(result, chosen.plot)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process unless given."""
    parser = argparse.ArgumentParser(prog="python -m lite_ext", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="print versions, kernels and the backend in use")
    info.add_argument("--json", action="store_true", help="as JSON")
    bench = commands.add_parser("bench", help="time a conversion beside what torch offers for it")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default: cpu)")
    bench.add_argument("--leaves", type=int, default=1000, metavar="N", help="how many tensors (default: 1000)")
    bench.add_argument("--size", type=int, default=64, metavar="N", help="the elements of each (default: 64)")
    bench.add_argument("--from", dest="source", default="bf16", metavar="DTYPE", help="their dtype (default: bf16)")
    bench.add_argument("--to", dest="target", default="fp32", metavar="DTYPE", help="the dtype wanted (default: fp32)")
    bench.add_argument("--rounds", type=int, default=9, metavar="N", help="timed rounds of each (default: 9)")
    bench.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: as many as it takes)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios to FILE; needs matplotlib")
    chosen = parser.parse_args(arguments)
    if chosen.command == "bench":
        _bench(bench, chosen)
        return
    print(json.dumps(build_info(), indent=2) if chosen.json else "\n".join(_lines(build_info())))


if __name__ == "__main__":
    main()
