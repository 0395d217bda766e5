"""The table, filters and start of a command that reads changes, from the command line to parameters of RPC."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from headwater.cli.failure import Failure
from headwater.cli.remote import Remote
from headwater.model.database_name import real_name

MAIN = "main"
EVERY = "*"  # in place of a table: all tables of a database
WORDS = ("latest", "earliest", "snapshot")
SPAN_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SPAN = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(SPAN_MS)})", re.ASCII)
_OFFSET = re.compile(r"offset:(\d{1,18})", re.ASCII)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the table and the filters."""
    parser.add_argument("table", metavar="[DB.]TABLE", help="a table; a database alone, or DB.*, is all its tables")
    parser.add_argument("--where", metavar="SQL", help="only rows for which this holds, such as 'total > 100'")
    parser.add_argument("--op", action="append", metavar="OP", help="only insert, update, delete … (a,b or repeated)")
    parser.add_argument("--columns", action="append", metavar="NAME", help="only these, and only when one changed")
    parser.add_argument("--pk", type=key, metavar="JSON", help='only the row with this key; [1, "a"] if it has parts')


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the flags for images and format."""
    parser.add_argument("--before", action="store_true", help="show the row as it was")
    parser.add_argument("--after", action="store_true", help="show the row as it is")
    parser.add_argument("--format", metavar="NAME", help="a format of the wire, such as debezium_json")


# --- values ----------------------------------------------------------------------------------------------


def key(text: str) -> list[Any]:
    """Return the parts of a key: a JSON array, a JSON value, or else a text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, list) else [value]


def moment(text: str, now_ms: int | None = None) -> int:
    """Return `10m` (ago), or an ISO time, local without a zone, in ms since 1970; ArgumentTypeError otherwise."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if found := _SPAN.fullmatch(text):
        return max(now - round(float(found[1]) * SPAN_MS[found[2]]), 0)
    try:
        return max(round(datetime.fromisoformat(text).timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):
        hint = "10m, 2h, 1d or 2026-01-31T12:00"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a time; write it as {hint}") from None


def start(text: str) -> str | dict[str, int]:
    """Return the start position as RPC takes it: a word, or an offset or a time; ArgumentTypeError otherwise."""
    if text in WORDS:
        return text
    if found := _OFFSET.fullmatch(text):
        return {"offset": int(found[1])}
    try:
        return {"ts": moment(text)}
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or as offset:N, {', '.join(WORDS)}") from None


def natural(text: str) -> int:
    """Return `text` as an integer of at least 0; ArgumentTypeError otherwise."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 on")
    return int(text)


def listed(given: Sequence[str] | None) -> list[str] | None:
    """Return the words of a flag that may be repeated and contain commas; None without the flag."""
    return None if given is None else [word.strip() for text in given for word in text.split(",")]


# --- the table -------------------------------------------------------------------------------------------


class FeedTarget(NamedTuple):
    """A table, or all tables of a database."""

    db: str
    table: str | None

    def __str__(self) -> str:
        return f"{self.db}.{self.table or EVERY}"


def find_target(remote: Remote, text: str) -> FeedTarget:
    """Return the table or database that `text` names; Failure if there is none, or the name is ambiguous."""
    databases = remote.call("schema.list_databases")["databases"]
    head, dot, tail = text.partition(".")
    db = real_name(head)
    if dot and db in databases:
        if tail != EVERY and tail not in _tables(remote, db):
            raise _missing(remote, f"there is no table {tail!r} in database {db!r}", text, [db])
        return FeedTarget(db, None if tail == EVERY else tail)
    is_table = MAIN in databases and text in _tables(remote, MAIN)
    is_database = real_name(text) in databases
    if is_table and is_database:
        hint = f"Write {MAIN}.{text} for the table, or '{text}.{EVERY}' for all of the database."
        raise Failure(f"{text!r} is a table of {MAIN!r}, and also a database", hint=hint)
    if is_table:
        return FeedTarget(MAIN, text)
    if is_database:
        return FeedTarget(real_name(text), None)
    what = f"there is no database {head!r}" if dot else f"there is no table {text!r} in {MAIN!r}, and no such database"
    raise _missing(remote, what, text, databases)


def _tables(remote: Remote, db: str) -> list[str]:
    found: list[str] = remote.call("schema.list_tables", db=db)["tables"]
    return found


def _missing(remote: Remote, what: str, text: str, databases: Sequence[str]) -> Failure:
    from difflib import get_close_matches

    named = [str(FeedTarget(db, table)) for db in databases for table in _tables(remote, db)]
    near = [name for name in named if name.partition(".")[2] == text] or get_close_matches(text, named, 3)
    if near:
        return Failure(what, hint=f"Did you mean {' or '.join(near)}?")
    return Failure(what, hint=f"There are: {', '.join(named[:20]) or 'no tables yet'}.")


# --- parameters ------------------------------------------------------------------------------------------


def filters(args: argparse.Namespace, target: FeedTarget) -> dict[str, Any]:
    """Return `target` and the filters among the flags as parameters of RPC."""
    from headwater.model.literal import from_json, to_lit

    pk = None if args.pk is None else [to_lit(from_json(value)) for value in args.pk]
    found = {
        "db": target.db,
        "table": target.table,
        "where": args.where,
        "ops": listed(args.op),
        "columns": listed(args.columns),
        "pk": pk,
        "format": args.format,
        "include": {"before": args.before, "after": args.after} if args.before or args.after else None,
    }
    return {name: value for name, value in found.items() if value is not None}
