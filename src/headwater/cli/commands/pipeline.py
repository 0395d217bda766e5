"""`headwater pipeline`: run and verify pipelines that carry tables into lakes and databases with Spark."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.cli.commands import pipeline_status
from headwater.cli.failure import FAILED, OK, UNREACHABLE, USAGE, Failure
from headwater.cli.remote import open_remote
from headwater.errors import Unavailable
from headwater.model.quantity import counted

if TYPE_CHECKING:
    from headwater.cli.output.pipeline_lines import JsonLines, ProgressDisplay
    from headwater.pipeline.run.spec import PipelineSpec

T = TypeVar("T")

FILE = "pipeline.toml"
SHOW_CURSOR = "\x1b[?25h"
STOPPING = "stops after the current commit; once more: at once"
FOREIGN = ("pyspark", "py4j")  # their errors are many lines long


def add(commands: Any) -> None:
    """Register `pipeline`."""
    group = commands.add_parser("pipeline", help="carry tables into lakes and databases").add_subparsers(
        dest="verb", required=True
    )
    run = _verb(group, "run", "carry the tables of a file, until stopped", _run)
    run.add_argument("file", metavar="FILE", help="the pipeline, in TOML (`init` writes a first one)")
    run.add_argument("--once", action="store_true", help="stop after the changes committed so far")
    run.add_argument("--verify", action="store_true", help="compare source and sink at the end")
    _add_master(run)
    run.add_argument("--metrics", metavar="HOST:PORT", help="serve metrics to Prometheus there, over that of the file")
    run.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format of progress (text)")
    verify = _verb(group, "verify", "compare source and sink range by range", _verify)
    verify.add_argument("file", metavar="FILE", help="the pipeline, in TOML")
    verify.add_argument("--repair", action="store_true", help="repair ranges that differ")
    _add_master(verify)
    verify.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format of the report (text)")
    init = _verb(group, "init", "write a first file, every key explained", _init)
    init.add_argument("file", nargs="?", default=FILE, metavar="FILE", help=f"where to write it ({FILE})")
    init.add_argument("--table", action="append", default=[], metavar="[DB.]TABLE", help="carry it; may be repeated")
    init.add_argument("--server", metavar="URL", help="the server to read from (default: that of `headwater sql`)")
    init.add_argument("--force", action="store_true", help="overwrite an existing file")
    pipeline_status.add(group, _verb)


def _verb(group: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = group.add_parser(name, help=text, allow_abbrev=False)
    parser.set_defaults(run=_with_extra(run))
    return parser


def _add_master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", metavar="URL", help="Spark's master, over that of the file (local[2], spark://…)")


def _with_extra(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return `run`, with a readable error for a package that is not installed."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "headwater":
                raise
            raise Failure(
                f"pipelines need the package {error.name}, which is not installed",
                hint="pip install headwater[spark]",
            ) from None

    return guarded


# --- run and verify --------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    spec, stop = pipeline_status.read_pipeline(args.file), threading.Event()
    from headwater.config.reader import checked
    from headwater.config.setting_types import ADDRESS
    from headwater.pipeline.runner import run

    if args.metrics is not None:
        spec = replace(spec, metrics=checked("--metrics", ADDRESS, args.metrics, shown=repr(args.metrics)))
    with _reached(spec, args), progress_display(args.output) as show, _signals(stop):
        show.say(None, f"{spec.name}: {counted(len(spec.tables), 'table')} of {spec.server}, carried by Spark")
        try:
            summary = _in_thread(
                lambda: run(spec, once=args.once, master=args.master, watcher=show, stop=stop, then_verify=args.verify)
            )
        except Exception as error:
            from headwater.pipeline.failure import is_gone

            if stop.is_set() and is_gone(error):
                return OK  # Java was asked to stop together with us
            raise
    return OK if summary.is_good else FAILED


def _verify(args: argparse.Namespace) -> int:
    spec, stop = pipeline_status.read_pipeline(args.file), threading.Event()
    from headwater.pipeline.verify.verify import verify

    stop.set()
    with _reached(spec, args), progress_display(args.output) as show, _signals(stop):
        reports = _in_thread(lambda: verify(spec, repair=args.repair, master=args.master, watcher=show))
    return OK if all(report.is_good for report in reports) else FAILED


@contextmanager
def _reached(spec: PipelineSpec, args: argparse.Namespace) -> Iterator[None]:
    """Report an unreachable server, with a hint on where its URL was set."""
    from headwater.pipeline.run.server_check import hint_of, is_unreachable

    try:
        yield
    except Unavailable as error:
        if not is_unreachable(error):
            raise
        message = f"{error.message} ({error.code})"
        raise Failure(message, hint=hint_of(spec, args.file), exit_code=UNREACHABLE) from None


def _in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in another thread: in the main thread, Spark would handle Ctrl-C itself."""
    with ThreadPoolExecutor(1, thread_name_prefix="headwater-pipeline") as threads:
        try:
            return threads.submit(work).result()
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in FOREIGN and not isinstance(error, ConnectionError):
                raise
            from headwater.pipeline.failure import cause_of

            raise cause_of(error) from None


@contextmanager
def progress_display(output: str = "text") -> Iterator[ProgressDisplay | JsonLines]:
    """Open the display of a running pipeline: JSON, bars on a terminal, or else lines."""
    from headwater.cli.output.pipeline_lines import JsonLines, ProgressLines

    if output == "json":
        yield JsonLines()
    elif not sys.stdout.isatty():
        yield ProgressLines()
    else:
        from headwater.cli.output.pipeline_bars import ProgressBars

        with ProgressBars() as bars:
            yield bars


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C set `stop`; the second one ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if sys.stdout.isatty():
                print(SHOW_CURSOR, end="", flush=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()
        # Not by print: this may interrupt one.
        os.write(sys.stderr.fileno(), f"headwater pipeline {STOPPING}\n".encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- init ------------------------------------------------------------------------------------------------


def _init(args: argparse.Namespace) -> int:
    from headwater.pipeline.run.spec import TEMPLATE

    file = Path(args.file)
    with closing(open_remote(args)) as remote:
        server = remote.url  # the one that other commands use
    text = _with_server(TEMPLATE, server)
    text = _with_tables(text, args.table) if args.table else text
    try:
        with file.open("w" if args.force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise Failure(f"{file} exists already", hint="Overwrite it with --force.", exit_code=USAGE) from None
    then = "Then" if args.table else "Name your tables in it, then"
    print(f"{file} is written, for the server at {server}. {then}: headwater pipeline run {file}")
    return OK


def _with_server(template: str, url: str) -> str:
    """Return the template with `server` set to `url` and its comment kept."""
    before, line, after = re.split(r"^(server = .*)$", template, maxsplit=1, flags=re.MULTILINE)
    comment = line.index("#")
    return f"{before}{f'server = {json.dumps(url)} '.ljust(comment)}{line[comment:]}{after}"


def _with_tables(template: str, named: Sequence[str]) -> str:
    """Return the template with one [[table]] for each database in `named`, in place of its example."""
    head, entry = template.split("[[table]]\n")
    tables: dict[str, dict[str, None]] = {}
    for name in named:
        db, dot, table = name.partition(".")
        tables.setdefault(db if dot else "main", {})[table if dot else name] = None
    if len(tables) > 1:
        entry = entry.replace('"lake/{table}"', '"lake/{db}/{table}"')
    return head + "\n".join(_entry(entry, db, list(each)) for db, each in tables.items())


def _entry(example: str, db: str, tables: list[str]) -> str:
    """Return a [[table]] for `tables` of `db`, with the other lines of the example."""

    def toml(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    which = f"table = {toml(tables[0])}" if len(tables) == 1 else f"tables = {toml(tables)}"
    rest = [line for line in example.splitlines() if not line.startswith(("table = ", "# db = "))]
    return "\n".join(["[[table]]", f"db = {toml(db)}", which, *rest, ""])
