"""`headwater log show`: prints changes of a log file, with or without a running server."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_config_flags, load_config
from headwater.cli.failure import OK, USAGE, Failure
from headwater.cli.filters import natural
from headwater.cli.output.tables import add_output, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.log.disk.disk_log import DiskLog
    from headwater.model.change import Change, Transaction

SUFFIX = ".log.db"


def add(commands: Any) -> None:
    """Register `log`."""
    group = commands.add_parser("log", help="read a log file").add_subparsers(dest="verb", required=True)
    show = group.add_parser("show", help="print changes; without --after the newest", allow_abbrev=False)
    show.add_argument("file", nargs="?", metavar="FILE", help="the log file (DATA/DB.log.db)")
    add_config_flags(show)
    show.add_argument("--db", metavar="NAME", default="main", help="the database (main)")
    show.add_argument("--after", type=natural, metavar="N", help="start with the change after offset N")
    show.add_argument("--limit", type=natural, metavar="N", default=20, help="print at most N changes (20)")
    add_output(show)
    show.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    from headwater.log.disk.disk_log import DiskLog

    path = _path(args)
    with closing(DiskLog.open(path, read_only=True)) as log:
        latest = log.latest
        after = max(latest - args.limit, log.horizon - 1) if args.after is None else args.after
        found = _changes(log, after, min(after + args.limit, latest))
        db = path.name.removesuffix(SUFFIX)
        if args.output == "json":
            _print_json(db, found)
        else:
            _print(found, nothing="no changes yet" if latest < log.horizon else f"no changes after offset {after}")
    return OK


def _path(args: argparse.Namespace) -> Path:
    if args.file is not None and args.data is not None:
        raise Failure("give a log file or --data, not both", exit_code=USAGE)
    if args.file is not None:
        return Path(args.file)
    folder = Path(load_config(args).data)
    path = folder / f"{args.db}{SUFFIX}"
    others = sorted(each.name.removesuffix(SUFFIX) for each in folder.glob(f"*{SUFFIX}"))
    if others and not path.exists():
        hint = f"There are: {', '.join(others)}. Use --db {others[0]}."
        raise Failure(f"there is no log at {path}", hint=hint)
    return path


def _changes(log: DiskLog, after: int, upto: int) -> Iterator[tuple[Transaction, int, Change]]:
    for part in log.scan(after=after, upto=upto):
        for offset, change in enumerate(part.changes, part.first):
            yield part, offset, change


def _print_json(db: str, found: Iterator[tuple[Transaction, int, Change]]) -> None:
    """Print one change per line: a log can be larger than memory."""
    from headwater.cli.output.changes import as_json

    for part, offset, change in found:
        print(json.dumps(as_json(db, part, offset, change), ensure_ascii=False))


def _print(found: Iterator[tuple[Transaction, int, Change]], *, nothing: str) -> None:
    from headwater.cli.output.changes import images, time_of_day

    rows = [
        (offset, time_of_day(part.commit_ts_ms), change.op.word, change.table.name, images(change))
        for part, offset, change in found
    ]
    if rows:
        print_table(("offset", "time", "op", "table", "before → after"), rows)
    else:
        print(nothing)
