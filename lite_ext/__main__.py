"""``python -m lite_ext info``: what this installation is."""

from __future__ import annotations

import argparse
import json
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process unless given."""
    parser = argparse.ArgumentParser(prog="python -m lite_ext", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="print versions, kernels and the backend in use")
    info.add_argument("--json", action="store_true", help="as JSON")
    chosen = parser.parse_args(arguments)
    print(json.dumps(build_info(), indent=2) if chosen.json else "\n".join(_lines(build_info())))


if __name__ == "__main__":
    main()
