"""`headwater source`: list, attach and detach capture in a database, without a server."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_config_flags, add_databases, load_config, name_databases
from headwater.cli.failure import OK
from headwater.cli.output.tables import add_output, print_json, print_result
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config import Config
    from headwater.sources.registry import CapturedTable, CommandReport


def add(commands: Any) -> None:
    """Register `source`."""
    group = commands.add_parser("source", help="capture in databases").add_subparsers(dest="verb", required=True)
    tables = group.add_parser("list", help="list tables and whether they are captured", allow_abbrev=False)
    add_databases(tables)
    add_config_flags(tables)
    add_output(tables)
    tables.set_defaults(run=_list)
    attach = group.add_parser("attach", help="start capturing a database now, serve it later", allow_abbrev=False)
    attach.add_argument("database", nargs=1, metavar="DATABASE_URL", help="a SQLite file, postgresql://…, or NAME=URL")
    add_config_flags(attach)
    attach.add_argument("--table", action="append", metavar="NAME", help="capture only this table (may be repeated)")
    attach.add_argument("--wal", action="store_true", default=None, help="allow turning the file into WAL mode")
    attach.add_argument("--publish-all", action="store_true", default=None, help="PostgreSQL: publish FOR ALL TABLES")
    add_output(attach)
    attach.set_defaults(run=_attach)
    setup = group.add_parser(
        "setup", help="print the SQL that creates PostgreSQL logins for callers", allow_abbrev=False
    )
    setup.add_argument("database", nargs=1, metavar="DATABASE_URL", help="postgresql://… or NAME=URL")
    add_config_flags(setup)
    setup.add_argument("--reader", default="headwater_reader", metavar="ROLE", help="login for queries and filters")
    setup.add_argument("--writer", default="headwater_writer", metavar="ROLE", help="login for editors' statements")
    setup.add_argument(
        "--ddl-statements",
        action="store_true",
        help="also print the event trigger that shows DDL statements as they were run",
    )
    setup.set_defaults(run=_setup)
    detach = group.add_parser("detach", help="remove every trace of Headwater from a database", allow_abbrev=False)
    detach.add_argument("database", nargs=1, metavar="DATABASE_URL", help="a SQLite file, postgresql://…, or NAME=URL")
    add_config_flags(detach)
    add_output(detach)
    detach.set_defaults(run=_detach)


def urls(config: Config) -> dict[str, str]:
    """Return the URLs by name of the databases in the settings and in the data folder, or of `main` without any."""
    data = Path(config.data)
    found = {each.name: each.url or str(data / f"{each.name}.db") for each in config.databases}
    for log in sorted(data.glob("*.log.db")):
        name = log.name.removesuffix(".log.db")
        if (data / f"{name}.db").exists():
            found.setdefault(name, str(data / f"{name}.db"))
    return found or {"main": str(data / "main.db")}


def _list(args: argparse.Namespace) -> int:
    from msgspec.structs import asdict

    from headwater.sources import registry

    config = load_config(args)
    rows: list[CapturedTable] = []
    for name, url in urls(config).items():
        kind = registry.kind_name(url)
        rows += registry.kind(kind).list_tables(name, url, config.sources[kind])
    headers = registry.CapturedTable.__struct_fields__
    print_result(args.output, [asdict(row) for row in rows], headers, [*map(_cells, rows)], nothing="no tables")
    return OK


def _cells(row: CapturedTable) -> tuple[str, ...]:
    captured, version = "yes" if row.captured else "no", "" if row.schema is None else str(row.schema)
    return row.database, row.table, captured, version, ", ".join(row.key) or "none", row.note


def _attach(args: argparse.Namespace) -> int:
    """Install capture and store the backlog in the log, as a server does at its start; then stop and report."""
    from headwater.sources import registry

    tables = tuple(args.table) if args.table else None
    name, url, kind = _named(args)
    registry.kind(kind).check_attach(url)
    if args.output == "json":  # a program asks, and has `doctor` for what is not as it should be
        logging.getLogger("headwater.postgres.fitness").setLevel(logging.ERROR)
    own = {f"{kind}__tables": tables}
    config = load_config(args, sqlite__wal=args.wal, postgres__publish_all=args.publish_all, **own)
    _print(args, registry.kind(kind).attached(name, url, _first_status(config, name), tables or ()))
    return OK


def _named(args: argparse.Namespace) -> tuple[str, str, str]:
    """Return the name, the URL and the kind of the one database that the command names."""
    from headwater.sources import registry

    ((name, url),) = name_databases(args.database).items()
    return name, url, registry.kind_name(url)


def _print(args: argparse.Namespace, report: CommandReport) -> None:
    if args.output == "json":
        print_json(report.document)
    else:
        print(*report.lines, sep="\n")
    for note, hint in report.notes:
        print(f"note: {note}\nhint: {hint}", file=sys.stderr)


def _first_status(config: Config, name: str) -> dict[str, Any]:
    """Start and close the application without a server; return the status of the source `name` in between."""
    from headwater.app import App

    app = App(config)
    app.start()
    with closing(app):
        return app.get(name).status()


def _setup(args: argparse.Namespace) -> int:
    from headwater.sources import registry

    name, url, kind = _named(args)
    logins = {"reader": args.reader, "writer": args.writer}
    print(*registry.kind(kind).setup_sql(name, url, **logins, ddl_statements=args.ddl_statements), sep="\n")
    return OK


def _detach(args: argparse.Namespace) -> int:
    from headwater.sources import registry

    name, url, kind = _named(args)
    config = load_config(args)
    find_log = partial(_log_of, name, Path(config.data))
    _print(args, registry.kind(kind).detach(name, url, config.sources[kind], find_log))
    return OK


def _log_of(name: str, data: Path, generation: str | None) -> str | None:
    """Return the path of the log with `generation`, or, if that is None, of the log named `name`; None without one."""
    from headwater.log.disk.disk_log import DiskLog

    if generation is None:
        path = data / f"{name}.log.db"
        return str(path) if path.exists() else None
    for path in sorted(data.glob("*.log.db")):
        try:
            log = DiskLog.open(path, read_only=True)
        except HeadwaterError:
            continue  # a damaged log cannot say which generation it has
        with closing(log):
            if log.generation == generation:
                return str(path)
    return None
