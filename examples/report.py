"""Print tables with ``rich``, which comes with transformers, or as plain text without it."""

from __future__ import annotations

from itertools import zip_longest

Section = list[list[str]]


class Mismatch(Exception):
    """What the example shows is not what lite_ext promises."""


WIDTH = 100  # when the output is not a terminal

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Console = None  # type: ignore[assignment, misc]


def echo(text: str) -> None:
    """Print a line as it is."""
    print(text, flush=True)


def print_table(title: str, header: list[str], sections: list[Section]) -> None:
    """Print ``sections`` of rows under ``header``, whose cells may hold several lines."""
    if Console is None:
        echo(plain_table(title, header, sections) + "\n")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(title=Text(title, style="bold"), title_justify="left", padding=(0, 1))
    for position, cell in enumerate(header):
        table.add_column(Text(cell), justify="left" if position == 0 else "right", no_wrap=position > 0)
    for section in sections:
        for row in section:
            table.add_row(*(Text(cell, style="green" if cell.endswith("*") else "") for cell in row))
        table.add_section()
    console.print(table, "")


def plain_table(title: str, header: list[str], sections: list[Section]) -> str:
    """Return the table as text."""
    heads = [list(line) for line in zip_longest(*(cell.split("\n") for cell in header), fillvalue="")]
    rows = heads + [row for section in sections for row in section]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]

    def line(row: list[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [title, *map(line, heads)]
    for section in sections:
        lines += [rule, *map(line, section)]
    return "\n".join(lines)
