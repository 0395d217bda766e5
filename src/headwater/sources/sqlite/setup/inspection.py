"""Inspection of a SQLite file from outside, served or not, for `headwater doctor` and `headwater source`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import apsw

from headwater.errors import HeadwaterError
from headwater.model.quantity import counted
from headwater.sources.file_lock import SUFFIX
from headwater.sources.registry import CapturedTable, Check, Inspection, LogView
from headwater.sources.sqlite.capture.trigger_installation import (
    capturable,
    check_format,
    is_installed,
    meta,
    read_layouts,
    read_parents,
    read_triggers,
)
from headwater.sources.sqlite.capture.trigger_plan import plan
from headwater.sources.sqlite.capture.triggers import CAPTURE
from headwater.sources.sqlite.connection import OURS, open_file, sqlite_errors
from headwater.sources.sqlite.settings import SqliteConfig

MAGIC = b"SQLite format 3\0"


def inspect(name: str, path: str, config: SqliteConfig) -> Inspection:
    """Check one database file; later checks are skipped if an earlier one makes them meaningless."""
    checks = [check for check in (_file(name, path), _holder(name, path)) if check]
    if not os.path.exists(path) or any(check.state == "fail" for check in checks):
        return Inspection(checks, is_readable=False)
    try:
        with closing(open_file(path, read_only=True)) as db, sqlite_errors(path):
            checks += _format(name, db, wal=config.wal, fresh=os.path.getsize(path) == 0)
            checks += _tables(name, db, config.tables)
            return _capture(name, db, config.tables, checks)
    except HeadwaterError as error:
        return Inspection([*checks, Check(name, "fail", error.message, error.hint)], is_readable=False)


def _file(name: str, path: str) -> Check:
    if not os.path.exists(path):
        return Check(name, "warn", f"there is no file {path}", "`headwater serve` creates it: check the name.")
    if not os.access(path, os.R_OK | os.W_OK):
        return Check(name, "fail", f"{path} cannot be read and written", f"chown or chmod u+rw {path}")
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        return Check(name, "fail", f"the folder of {path} cannot be written", "SQLite keeps its -wal file there.")
    # Runs before SQLite opens the file: closing a second descriptor would drop SQLite's locks.
    with open(path, "rb") as opened:
        head = opened.read(len(MAGIC))
    if head and head != MAGIC:
        return Check(name, "fail", f"{path} is not a SQLite database", "Name another file, or restore a backup.")
    return Check(name, "ok", path)


def _holder(name: str, path: str) -> Check | None:
    """Return a check that names the process that serves the file, by its lock file; None if none does."""
    try:
        opened = os.open(os.path.realpath(path) + SUFFIX, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return Check(name, "ok", f"served by process {os.read(opened, 64).decode(errors='replace')}")
    finally:
        os.close(opened)
    return None


def _format(name: str, db: apsw.Connection, *, wal: bool, fresh: bool) -> Iterator[Check]:
    encoding, mode = str(db.pragma("encoding")), str(db.pragma("journal_mode"))
    if encoding == "UTF-8":
        yield Check(name, "ok", "text is UTF-8")
    else:
        remedy = "Rebuild it: a new file with PRAGMA encoding = 'UTF-8', then copy every table."
        yield Check(name, "fail", f"text is stored as {encoding}", remedy)
    if mode == "wal":
        yield Check(name, "ok", "journal mode is WAL")
    elif wal or fresh:
        yield Check(name, "ok", f"journal mode is {mode}; `headwater serve` changes it to WAL")
    else:
        yield Check(name, "fail", f"journal mode is {mode}; capture needs WAL", "Start with --wal: detach undoes it.")


def _tables(name: str, db: apsw.Connection, tables: tuple[str, ...]) -> Iterator[Check]:
    shapes, refused = capturable(db, tables)
    yield Check(name, "ok", f"{counted(len(shapes), 'table')} can be captured")
    for table, reason in refused.items():
        yield Check(name, "warn", f"table {table} cannot be captured: {reason}", "Change it, or leave it uncaptured.")
    for table in sorted(set(tables) - set(shapes) - set(refused)):
        yield Check(name, "warn", f"sqlite.tables names {table}: it does not exist", "Create it, or correct the name.")
    for table, shape in shapes.items():
        if not shape.table.primary_key:
            remedy = "Give it a primary key: VACUUM renumbers its rows and readers take a new snapshot."
            yield Check(name, "warn", f"table {table} has no primary key", remedy)
        if not shape.key_is_plain:
            remedy = "The key of such a table is compared by SQLite only; a program without the collation cannot write."
            yield Check(name, "warn", f"the key of table {table} has a collation of its own", remedy)
    own = [trigger.name for trigger in read_triggers(db) if not trigger.name.startswith(OURS)]
    if own:
        yield Check(name, "ok", f"{counted(len(own), 'trigger')} of yours: {', '.join(own)}")


def _capture(name: str, db: apsw.Connection, tables: tuple[str, ...], checks: list[Check]) -> Inspection:
    if not is_installed(db):
        finding = "not captured yet; `headwater serve` or `headwater source attach` begins"
        other = ("the log is of a file that was captured; this one is not", "")
        return Inspection([*checks, Check(name, "ok", finding)], mismatch=lambda log: other if log.latest else None)
    check_format(db)
    active = [layout for layout in read_layouts(db).values() if layout.active]
    steps = plan(capturable(db, tables)[0], active, read_triggers(db), parents=read_parents(db))
    if steps:
        finding = f"the schema changed: capture of {counted(len(steps), 'table')} is out of date"
        checks.append(Check(name, "warn", finding, "A running server corrects it by itself; otherwise start one."))
    else:
        verb = "is" if len(active) == 1 else "are"
        checks.append(Check(name, "ok", f"{counted(len(active), 'table')} {verb} captured"))
    ((head,),) = db.execute(f"SELECT max(seq) FROM {CAPTURE}").fetchall()
    return Inspection(checks, is_captured=True, mismatch=partial(_mismatch, meta(db, "generation"), int(str(head))))


def _mismatch(generation: str, head: int, log: LogView) -> tuple[str, str] | None:
    if generation != log.generation:
        return "file and log are of different generations", "Check --data."
    if head < log.latest:
        return f"the file ends at change {head}, the log at {log.latest}", "Was an older copy restored?"
    return None


def list_tables(name: str, path: str) -> list[CapturedTable]:
    """Return the tables of the file, and whether they are captured."""
    with closing(open_file(path, read_only=True)) as db, sqlite_errors(path):
        layouts = read_layouts(db).values() if is_installed(db) else []
        shapes, refused = capturable(db, ())
    active = {layout.table.name: layout.table for layout in layouts if layout.active}
    found = []
    for table in sorted({*shapes, *refused}):
        now = active.get(table)
        key = now.primary_key if now else shapes[table].table.primary_key if table in shapes else ()
        note = refused.get(table, "" if now else "not captured yet")
        found.append(CapturedTable(name, table, now is not None, now.version if now else None, list(key), note))
    return found


def generation_of(path: str) -> str | None:
    """Return the generation that the file belongs to; None if it is not attached."""
    with closing(open_file(path, read_only=True)) as db, sqlite_errors(path):
        return meta(db, "generation") if is_installed(db) else None
