"""The verbs of `headwater pipeline` that need no Spark: status, list, cancel and reset, from the meta store alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.failure import FAILED, OK, USAGE, Failure
from headwater.cli.output.pipeline_lines import described
from headwater.cli.output.tables import add_output, print_json, print_result
from headwater.errors import HeadwaterError
from headwater.model.quantity import amount, counted
from headwater.model.url_secrets import has_secrets

if TYPE_CHECKING:
    from headwater.client import Described
    from headwater.pipeline.run.progress import MetaStore
    from headwater.pipeline.run.spec import PipelineSpec
    from headwater.pipeline.run.task import RangeProgress, Task

SERVER_SECONDS = 3.0  # to answer how far behind a sink is
STATUS = ("pipeline", "table", "state", "stage", "ranges", "rows", "offset", "lag", "verified", "note")
LIST = ("pipeline", "tables", "state", "server", "sinks")

Verb = Callable[[Any, str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add(group: Any, verb: Verb) -> None:
    """Register the verbs."""
    status = verb(group, "status", "progress and state of tables", _status)
    status.add_argument("file", nargs="?", metavar="FILE", help="only the pipeline of this file")
    every = verb(group, "list", "every pipeline of the meta store", _list)
    cancel = verb(group, "cancel", "stop carrying, wherever it runs", _cancel)
    cancel.add_argument("--undo", action="store_true", help="allow it again")
    reset = verb(group, "reset", "forget progress: the next run takes a new snapshot", _reset)
    reset.add_argument("--yes", action="store_true", help="do not ask")
    reset.add_argument(
        "--force", action="store_true", help="also while a pipeline server works on it, which then stops"
    )
    for parser in (cancel, reset):
        parser.add_argument("name", metavar="NAME", help="the pipeline")
        parser.add_argument("table", nargs="?", metavar="TABLE", help="only this table: orders, or main.orders")
    for parser in (status, every, cancel, reset):
        parser.add_argument(
            "--meta",
            metavar="WHERE",
            help="the meta store: a pipeline's .toml, a SQLite file, a URL without a password",
        )
        add_output(parser)


# --- where it is -----------------------------------------------------------------------------------------


def _open(args: argparse.Namespace) -> MetaStore:
    """Open the meta store of the command; Failure if it does not exist."""
    from headwater.pipeline.run.progress import MetaStore
    from headwater.pipeline.run.spec import META_FILE

    where = _where(getattr(args, "file", None), args.meta) or META_FILE
    if "://" not in where and not Path(where).exists():
        raise Failure(
            f"there is no meta store {where}",
            hint="Name the pipeline's file with --meta FILE.toml, or go where it was run.",
            exit_code=USAGE,
        )
    return MetaStore.open(where)


def _where(file: str | None, meta: str | None) -> str | None:
    named = file if meta is None else meta
    if named is None:
        return None
    if meta is None or named.endswith(".toml"):
        return read_pipeline(named).meta
    if has_secrets(named):
        raise Failure("a URL with a password is seen by other users", hint="--meta FILE.toml", exit_code=USAGE)
    return named


def read_pipeline(file: str) -> PipelineSpec:
    """Return the pipeline that `file` describes."""
    from headwater.pipeline.run.spec import read_spec

    return read_spec(Path(file))


def _split(table: str | None) -> tuple[str | None, str | None]:
    """Return database and table of `main.orders`; None for a database that is not named."""
    db, dot, name = (table or "").partition(".")
    return (db, name) if dot else (None, table)


def _found(meta: MetaStore, args: argparse.Namespace) -> list[Task]:
    found = meta.tasks(args.name, *_split(args.table))
    if not found:
        what = f"pipeline {args.name!r}" if args.table is None else f"table {args.table!r} of pipeline {args.name!r}"
        raise Failure(f"the meta store has no {what}", hint="headwater pipeline list shows them all.")
    return found


# --- status ----------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    spec = None if args.file is None else read_pipeline(args.file)
    with _open(args) as meta:
        tasks = meta.tasks(None if spec is None else spec.name)
        heads = LogDescriptions(spec.token_file if spec else None)
        found = [_facts(task, meta.progress(task), heads.describe(task)) for task in tasks]
    print_result(args.output, found, STATUS, [_row(each) for each in found], nothing="nothing was carried yet")
    return OK


def _facts(task: Task, ranges: Sequence[RangeProgress], log: Described | None) -> dict[str, Any]:
    """Return the fields of a task for JSON output; `log` is the server's description of the table and its log.

    A sink is not behind by the changes of other tables that were made after the last change of its own.
    """
    offset = min((row.last_offset for row in ranges), default=0) or None
    is_behind = offset is not None and log is not None and offset < log.table_latest
    return {
        "pipeline": task.name,
        "db": task.db,
        "table": task.table,
        "state": state_of(task),
        "stage": _stage(ranges),
        "offset": offset,
        "latest": None if log is None else log.latest,
        "lag": None if offset is None or log is None else (log.latest - offset) * is_behind,
        "verified_through": task.verified_through,
        "rows_estimate": sum(max(row.rows, row.rows_estimate) for row in ranges),
        "owner": task.owner if task.is_owned else None,
        "owner_left_ms": task.owner_left_ms if task.is_owned else None,
        "server": task.server,
        "sink": task.sink,
        "error": task.error or None,
        "resnapshot": task.resnapshot,
        "updated_ms": task.updated_ms,
        "ranges": [described(row) for row in ranges],
    }


def state_of(task: Task) -> str:
    """Return the state of a task as one word: failed, stopping, cancelled, running or stopped."""
    if task.error and not task.is_owned:
        return "failed"
    if task.cancelled:
        return "stopping" if task.is_owned else "cancelled"
    return "running" if task.is_owned else "stopped"


def _stage(ranges: Sequence[RangeProgress]) -> str | None:
    """Return the stage of the table: that of its least advanced or failed range."""
    from headwater.pipeline.run.task import FAILED, STAGES

    stages = [row.stage for row in ranges]
    return FAILED if FAILED in stages else min(stages, key=STAGES.index, default=None)


class LogDescriptions:
    """Descriptions of the logs of tasks; a server that does not answer is asked only once."""

    def __init__(self, token_file: str | None) -> None:
        self._token_file = token_file
        self._silent: set[str] = set()

    def describe(self, task: Task) -> Described | None:
        """Return the task's table and its log; None if the server refuses or does not answer."""
        from headwater.client import Client

        if task.server in self._silent:
            return None
        try:
            with Client(task.server, token_file=self._token_file, timeout=SERVER_SECONDS, patience=0) as client:
                return client.describe(task.db, task.table)
        except HeadwaterError as error:
            if error.retryable:
                self._silent.add(task.server)
            return None


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    loaded = sum(row["stage"] == "log" for row in each["ranges"])
    return (
        each["pipeline"],
        f"{each['db']}.{each['table']}",
        each["state"],
        each["stage"] or "",
        f"{loaded}/{len(each['ranges'])}" if each["ranges"] else "",
        amount(each["rows_estimate"]) if each["ranges"] else "",
        "" if each["offset"] is None else amount(each["offset"]),
        amount(each["lag"]) if each["offset"] is not None else "",
        "never" if each["verified_through"] is None else f"at {amount(each['verified_through'])}",
        each["error"] or ("takes a new snapshot when it runs" if each["resnapshot"] else each["owner"] or ""),
    )


# --- list, cancel, reset ---------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    with _open(args) as meta:
        tasks = meta.tasks()
    found = [
        _pipeline(name, [task for task in tasks if task.name == name])
        for name in dict.fromkeys(task.name for task in tasks)
    ]
    rows = [[", ".join(v) if isinstance(v, list) else v for v in each.values()] for each in found]
    print_result(args.output, found, LIST, rows, nothing="no pipelines")
    return OK


def _pipeline(name: str, tasks: Sequence[Task]) -> dict[str, Any]:
    return {
        "pipeline": name,
        "tables": [f"{task.db}.{task.table}" for task in tasks],
        "states": list(dict.fromkeys(map(state_of, tasks))),
        "servers": list(dict.fromkeys(task.server for task in tasks)),
        "sinks": list(dict.fromkeys(task.sink for task in tasks)),
    }


def _cancel(args: argparse.Namespace) -> int:
    with _open(args) as meta:
        found = _found(meta, args)
        meta.cancel(args.name, *_split(args.table), undo=args.undo)
    running = [task for task in found if task.is_owned]
    outcome = "may run again" if args.undo else "is cancelled" if not running else "stops after its current commit"
    return _say(args, found, outcome)


def _reset(args: argparse.Namespace) -> int:
    with _open(args) as meta:
        found = _found(meta, args)
        if not args.yes and not _agreed(found):
            print("nothing was changed", file=sys.stderr)
            return FAILED
        meta.reset(args.name, *_split(args.table), force=args.force)
    return _say(args, found, "takes a new snapshot when it is run again")


def _agreed(tasks: Sequence[Task]) -> bool:
    if not sys.stdin.isatty():
        raise Failure(
            f"the next run would empty {counted(len(tasks), 'sink')}", hint="Confirm with --yes.", exit_code=USAGE
        )
    for task in tasks:
        print(f"{task.db}.{task.table} into {task.sink}")
    return input("Take new snapshots of these, emptying their sinks? [y/N] ").strip().lower() in ("y", "yes")


def _say(args: argparse.Namespace, tasks: Sequence[Task], outcome: str) -> int:
    if args.output == "json":
        print_json([{"pipeline": task.name, "db": task.db, "table": task.table} for task in tasks])
    else:
        for task in tasks:
            print(f"{task.db}.{task.table} of {task.name} {outcome}")
    return OK
