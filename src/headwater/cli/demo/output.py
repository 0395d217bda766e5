"""Output of the demo: headings, sentences, changes as they arrive, and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from headwater.cli.demo.follower import ReceivedChange
from headwater.cli.output.changes import colour, line
from headwater.cli.output.tables import print_table

SHOWN = 8  # changes of one step; the others are counted


class Page:
    """Writes to standard output, with colours if it is a terminal."""

    def __init__(self) -> None:
        self._console: Any = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def heading(self, number: int, text: str) -> None:
        """Print the title of one step."""
        self._line("")
        self._line(f"{number}. {text}", "bold cyan")

    def say(self, text: str) -> None:
        """Print one sentence."""
        self._line(f"   {text}".rstrip())

    def proof(self, text: str) -> None:
        """Print a check that passed."""
        self._line(f"   ✓ {text}", "green")

    def arrivals(self, found: Sequence[ReceivedChange], *, live: bool = False) -> None:
        """Print the newest changes of a step, one line each, with their latency if a reader waited for them."""
        if len(found) > SHOWN:
            self._line(f"{'…':>19}  {len(found) - SHOWN} more before these", "dim")
        for arrival in found[-SHOWN:]:
            late = f"+{arrival.late_ms:.1f} ms" if live else ""
            self._line(f"{late:>11}{line(arrival.found)}", colour(arrival.found))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table."""
        if self._console is None:
            print()
        print_table(headers, rows)

    def _line(self, text: str, style: str = "") -> None:
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False, soft_wrap=True)
