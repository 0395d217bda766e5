"""What the demo shows: headings, sentences, changes as they arrive, and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from headwater.cli.changes import COLOURS, clock, images, numbered
from headwater.cli.output import print_table, printable
from headwater.model.change import Transaction

SHOWN = 8  # changes of one step; the others are counted


class Page:
    """Writes to standard output, with colours if it is a terminal."""

    def __init__(self) -> None:
        self._console: Any = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def heading(self, number: int, text: str) -> None:
        """The title of one step."""
        self._line("")
        self._line(f"{number}. {text}", "bold cyan")

    def say(self, text: str) -> None:
        """One sentence."""
        self._line(f"   {text}".rstrip())

    def proof(self, text: str) -> None:
        """Something that was checked and holds."""
        self._line(f"   ✓ {text}", "green")

    def changes(self, parts: Sequence[Transaction]) -> None:
        """The newest changes of a step, one line each."""
        found = [(part, offset, change) for part in parts for offset, change in numbered(part)]
        if len(found) > SHOWN:
            self._line(f"   {'…':>6}  {len(found) - SHOWN} more before these", "dim")
        for part, offset, change in found[-SHOWN:]:
            name = printable(change.table.name)
            line = f"   {offset:>6}  {clock(part)}  {change.op.word:<13}  {name:<9}  {images(change)}"
            self._line(line, COLOURS[change.op])

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, with room around it."""
        if self._console is None:
            print()
        print_table(headers, rows)

    def _line(self, text: str, style: str = "") -> None:
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False, soft_wrap=True)
