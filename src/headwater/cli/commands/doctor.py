"""`headwater doctor`: checks this machine, the databases and their logs, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_config_flags, add_databases, load_config
from headwater.cli.commands.source import urls
from headwater.cli.failure import FAILED, OK
from headwater.cli.output.tables import add_output, print_json, printable

if TYPE_CHECKING:
    from headwater.sources.registry import Check

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def add(commands: Any) -> None:
    """Register `doctor`."""
    parser = commands.add_parser("doctor", help="check machine, databases and logs", allow_abbrev=False)
    add_databases(parser)
    add_config_flags(parser)
    parser.add_argument("--wal", action="store_true", default=None, help="judge as `serve --wal` would")
    parser.add_argument("--publish-all", action="store_true", default=None, help="judge as `serve --publish-all` would")
    add_output(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from headwater.cli.doctor_checks import database, machine

    config = load_config(args, sqlite__wal=args.wal, postgres__publish_all=args.publish_all)
    data = Path(config.data)
    found = list(machine(data))
    for name, url in urls(config).items():
        found += database(name, url, data / f"{name}.log.db", config)
    if args.output == "json":
        print_json([check._asdict() for check in found])
    else:
        for check in found:
            _print(check)
    return FAILED if any(check.state == "fail" for check in found) else OK


def _print(check: Check) -> None:
    mark, colour = MARKS[check.state]
    lines = [f"{check.subject}: {check.finding}"] + ([f"  → {check.remedy}"] if check.remedy else [])
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        text = Text(mark, style=colour).append("  " + printable(lines[0]), style="default")
        Console(highlight=False).print(text, *(Text("    " + line) for line in lines[1:]), sep="\n")
    else:
        print(f"{mark}  {printable(lines[0])}", *("    " + line for line in lines[1:]), sep="\n")
