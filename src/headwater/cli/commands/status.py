"""`headwater status`: the databases of a running server in numbers."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from headwater.cli.failure import FAILED, OK
from headwater.cli.output.tables import add_output, print_result
from headwater.cli.remote import Remote, add_server, open_remote
from headwater.model.quantity import amount, byte_size

COLUMNS = ("database", "state", "generation", "horizon", "latest", "lag", "waiting", "log size", "error")
SLOT = ("slot",)  # where there is a PostgreSQL


def add(commands: Any) -> None:
    """Register `status`."""
    parser = commands.add_parser("status", help="show a running server's databases", allow_abbrev=False)
    add_server(parser)
    add_output(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with closing(open_remote(args)) as remote:
        found = databases(remote)
    healthy = bool(found) and all(each["ready"] and not each.get("error") for each in found.values())
    document = {"server": remote.url, "healthy": healthy, "databases": found}
    shown = COLUMNS + (SLOT if any("wal_status" in each for each in found.values()) else ())
    print_result(args.output, document, shown, [_row(name, each)[: len(shown)] for name, each in found.items()])
    return OK if healthy else FAILED


def databases(remote: Remote) -> dict[str, dict[str, Any]]:
    """Return the status of every database of `remote`, by name."""
    names = remote.call("schema.list_databases")["databases"]
    if not names:
        return {}
    found: dict[str, dict[str, Any]] = remote.call("stats.snapshot", db=names[0])["databases"]
    return found


def _row(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        "failing" if each.get("error") else "ready" if each["ready"] else "starting",
        each["generation"],
        amount(each["horizon"]),
        amount(each["latest"]),
        _lag(each),
        amount(each.get("capture_rows")),
        byte_size(each.get("log_bytes")),
        each.get("error") or "",
        _slot(each),
    )


def _lag(each: dict[str, Any]) -> str:
    changes, seconds = each.get("lag_changes"), each.get("lag_seconds")
    return amount(changes) if not seconds else f"{amount(changes)} ({seconds:.1f} s)"


def _slot(each: dict[str, Any]) -> str:
    if "wal_status" not in each:
        return ""
    left = "" if each.get("slot_safe_bytes") is None else f", {byte_size(each['slot_safe_bytes'])} left"
    return f"{each['wal_status']}, {byte_size(each.get('slot_lag_bytes'))} kept{left}"
