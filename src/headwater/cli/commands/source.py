"""`headwater source`: capture in a database, looked at, put in and taken out without a server."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.commands import postgres
from headwater.cli.commands.config import add_config_flags, add_databases, load_config, name_databases
from headwater.cli.failure import OK, USAGE, Failure
from headwater.cli.output.tables import add_output, counted, print_json, print_table
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config import Config


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


def places(config: Config) -> dict[str, str]:
    """Name to file, or URL of PostgreSQL, of every database the settings mean, those under the data folder included."""
    data = Path(config.data)
    found = {each.name: _place(each.url) if each.url else str(data / f"{each.name}.db") for each in config.databases}
    for log in sorted(data.glob("*.log.db")):
        name = log.name.removesuffix(".log.db")
        if (data / f"{name}.db").exists():
            found.setdefault(name, str(data / f"{name}.db"))
    return found or {"main": str(data / "main.db")}


def is_postgres(place: str) -> bool:
    """Whether it is one of PostgreSQL, not a file."""
    from headwater.app import POSTGRES_SCHEMES

    return place.startswith(POSTGRES_SCHEMES)


def _place(url: str) -> str:
    from headwater.app import SQLITE_SCHEMES

    for scheme in SQLITE_SCHEMES:
        if url.startswith(scheme):
            return url.removeprefix(scheme)
    if "://" in url and not is_postgres(url):
        scheme = url.split("://")[0]
        hint = "Give a SQLite file (app.db) or postgresql://…."
        raise Failure(f"there is no source for {scheme}:// yet", hint=hint, exit_code=USAGE)
    return url


def _list(args: argparse.Namespace) -> int:
    config = load_config(args)
    rows: list[dict[str, Any]] = []
    for name, place in places(config).items():
        rows += postgres.list_tables(name, place, config) if is_postgres(place) else _tables(name, place)
    if args.output == "json":
        print_json(rows)
    elif rows:
        print_table(tuple(rows[0]), [_cells(row) for row in rows])
    else:
        print("no tables")
    return OK


def _tables(name: str, path: str) -> list[dict[str, Any]]:
    from headwater.sources.sqlite.capture.trigger_installation import capturable, is_installed, read_layouts
    from headwater.sources.sqlite.connection import open_file, sqlite_errors

    if not os.path.exists(path):
        raise Failure(f"there is no file {path}", hint="`headwater serve` creates an embedded database.")
    db = open_file(path, read_only=True)
    try:
        with sqlite_errors(path):
            layouts = read_layouts(db).values() if is_installed(db) else []
            shapes, refused = capturable(db, ())
    finally:
        db.close()
    active = {layout.table.name: layout.table for layout in layouts if layout.active}
    found = []
    for table in sorted({*shapes, *refused}):
        now = active.get(table)
        key = now.primary_key if now else shapes[table].table.primary_key if table in shapes else ()
        found.append(
            {
                "database": name,
                "table": table,
                "captured": now is not None,
                "schema": now.version if now else None,
                "key": list(key),
                "note": refused.get(table, "" if now else "not captured yet"),
            }
        )
    return found


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    captured = "yes" if row["captured"] else "no"
    key = ", ".join(row["key"]) or "none"
    version = "" if row["schema"] is None else str(row["schema"])
    return row["database"], row["table"], captured, version, key, row["note"]


def _attach(args: argparse.Namespace) -> int:
    """What a server does first, and no more: prove, install, take in what is there, make it durable."""
    tables = tuple(args.table) if args.table else None
    ((name, url),) = name_databases(args.database).items()
    place = _place(url)
    if is_postgres(place):
        if args.output == "json":  # a program asks, and has `doctor` for what is not as it should be
            logging.getLogger("headwater.postgres.fitness").setLevel(logging.ERROR)
        found = _first_status(load_config(args, postgres__tables=tables, postgres__publish_all=args.publish_all), name)
        return postgres.print_attached(args, name, found)
    config = load_config(args, sqlite__wal=args.wal, sqlite__tables=tables)
    path = os.path.abspath(place)
    if not os.path.exists(path):
        raise Failure(f"there is no file {path}", hint="Name an existing SQLite file.")
    found = _first_status(config, name)
    missing = sorted(set(tables or ()) - set(found["tables"]))
    document = {"database": name, "file": path, "tables": found["tables"], "uncaptured": found["uncaptured"]}
    if args.output == "json":
        print_json(document)
    else:
        names = f": {', '.join(found['tables'])}" if found["tables"] else ""
        print(f"capturing {counted(len(found['tables']), 'table')} of {path} as {name!r}{names}")
        for table, reason in found["uncaptured"].items():
            print(f"not captured: {table}: {reason}")
        if missing:
            print(f"not there yet, captured once created: {', '.join(missing)}")
    return OK


def _first_status(config: Config, name: str) -> dict[str, Any]:
    """Start what a server starts, and stop it again; how the database `name` stood."""
    from headwater.app import App

    app = App(config)
    app.start()
    try:
        return app.get(name).status()
    finally:
        app.close()


def _setup(args: argparse.Namespace) -> int:
    ((name, url),) = name_databases(args.database).items()
    if not is_postgres(_place(url)):
        raise Failure("only PostgreSQL needs logins for callers", hint="SQLite files are served as they are.")
    return postgres.print_setup(args, name, url)


def _detach(args: argparse.Namespace) -> int:
    ((name, url),) = name_databases(args.database).items()
    place = _place(url)
    if is_postgres(place):
        return postgres.detach(args, name, place)
    path = os.path.abspath(place)
    if not os.path.exists(path):
        raise Failure(f"there is no file {path}", hint="Name an existing SQLite file.")
    generation = _generation(path)
    changed = generation is not None
    kept = _log_of(generation, Path(load_config(args).data)) if generation else None
    if changed:
        from headwater.config import SqliteConfig
        from headwater.sources.sqlite.setup.detach import detach

        detach(path, config=SqliteConfig(wal=True))
    if args.output == "json":
        print_json({"file": path, "changed": changed, "log": kept})
    else:
        print(f"removed every trace from {path}" if changed else f"{path} was not attached")
        if kept:
            print(f"its log is kept: {kept}")
    return OK


def _generation(path: str) -> str | None:
    """The history the file belongs to; None if it is not attached."""
    from headwater.sources.sqlite.capture.trigger_installation import is_installed, meta
    from headwater.sources.sqlite.connection import open_file, sqlite_errors

    db = open_file(path, read_only=True)
    try:
        with sqlite_errors(path):
            return meta(db, "generation") if is_installed(db) else None
    finally:
        db.close()


def _log_of(generation: str, data: Path) -> str | None:
    """The log of this history in the folder `data`, whatever name the database had; None if there is none."""
    from headwater.log.disk.disk_log import DiskLog

    for path in sorted(data.glob("*.log.db")):
        try:
            log = DiskLog.open(path, read_only=True)
        except HeadwaterError:
            continue  # a damaged log cannot say whose it is
        try:
            if log.generation == generation:
                return str(path)
        finally:
            log.close()
    return None
