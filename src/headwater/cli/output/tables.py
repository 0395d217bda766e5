"""Output of commands: tables or JSON. Colours only on a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --output, the flag of all commands that print data."""
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="how to print (table)")


def print_json(document: Any) -> None:
    """Print one JSON document, indented on a terminal."""
    print(json.dumps(document, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, out: TextIO | None = None) -> None:
    """Print rows under headers: drawn by rich on a terminal, plain columns elsewhere."""
    target = sys.stdout if out is None else out
    headers = [printable(header) for header in headers]
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if target.isatty():
        _draw(headers, cells, target)
    else:
        target.write(plain_table(headers, cells))


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def print_result(
    output: str, document: Any, headers: Sequence[str], rows: Sequence[Sequence[Any]], *, nothing: str = ""
) -> None:
    """Print `document` for the output json, else a table; `nothing`, if given, in place of a table without rows."""
    if output == "json":
        print_json(document)
    elif rows or not nothing:
        print_table(headers, rows)
    else:
        print(nothing)


def plain_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns, two blanks apart."""
    lines = [list(headers), *map(list, cells)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headers))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(line.rstrip() + "\n" for line in padded)


def printable(text: str) -> str:
    """Return `text` without control characters: the value of a row must not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _draw(headers: Sequence[str], cells: Sequence[Sequence[str]], target: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(Text(header))
    for row in cells:
        table.add_row(*map(Text, row))
    Console(file=target, highlight=False).print(table)
