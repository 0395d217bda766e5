"""The checks of `headwater doctor`: each looks at one thing and says ok, warn or fail, with the remedy."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headwater.cli.output.tables import counted
from headwater.errors import HeadwaterError

Connection = Any  # of the room sources/sqlite, whose library stays at home
MAGIC = b"SQLite format 3\0"
LITTLE_SPACE, NO_SPACE = 1 << 30, 64 << 20  # bytes: warn, fail


class Check(NamedTuple):
    """One finding. `state` is ok, warn or fail; `remedy` is what to do about the last two."""

    subject: str
    state: str
    finding: str
    remedy: str = ""


def machine(data: Path) -> Iterator[Check]:
    """The interpreter, the SQLite in it, and the data folder."""
    from headwater.sources.sqlite.connection import open_file

    yield Check("python", "ok", sys.version.split()[0])
    db = open_file(":memory:")
    ((version,),) = db.execute("SELECT sqlite_version()").fetchall()
    db.close()
    yield Check("sqlite", "ok", str(version))
    yield _folder(data)
    yield _space(data)


def _folder(data: Path) -> Check:
    if data.exists() and not data.is_dir():
        return Check("data", "fail", f"{data} is not a folder", "Name another folder with --data.")
    if not data.exists():
        return Check("data", "ok", f"{data} is not there yet; `headwater serve` creates it")
    if not os.access(data, os.W_OK | os.X_OK):
        return Check("data", "fail", f"{data} cannot be written", f"chown or chmod u+rwx {data}")
    return Check("data", "ok", str(data))


def _space(data: Path) -> Check:
    there = next(folder for folder in (data, *data.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    finding = f"{free / 1e9:.1f} GB free"
    if free < NO_SPACE:
        return Check("disk", "fail", finding, "Free space: writes are refused on a full disk.")
    if free < LITTLE_SPACE:
        return Check("disk", "warn", finding, "Free space, or lower log.retention_bytes.")
    return Check("disk", "ok", finding)


def database(name: str, path: str, log: Path, *, wal: bool, tables: tuple[str, ...]) -> Iterator[Check]:
    """One database file and its log. Later checks are left out when an earlier one makes them senseless."""
    early = [check for check in (_file(name, path), _holder(name, path)) if check]
    yield from early
    if not os.path.exists(path) or any(check.state == "fail" for check in early):
        return
    try:
        yield from _inside(name, path, log, wal=wal, tables=tables)
    except HeadwaterError as error:
        yield Check(name, "fail", error.message, error.hint)


def _file(name: str, path: str) -> Check:
    if not os.path.exists(path):
        return Check(name, "warn", f"there is no file {path}", "`headwater serve` creates it: check the name.")
    if not os.access(path, os.R_OK | os.W_OK):
        return Check(name, "fail", f"{path} cannot be read and written", f"chown or chmod u+rw {path}")
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        return Check(name, "fail", f"the folder of {path} cannot be written", "SQLite keeps its -wal file there.")
    # Before SQLite opens the file: closing a second descriptor would drop its locks.
    with open(path, "rb") as opened:
        head = opened.read(len(MAGIC))
    if head and head != MAGIC:
        return Check(name, "fail", f"{path} is not a SQLite database", "Name another file, or restore a backup.")
    return Check(name, "ok", path)


def _holder(name: str, path: str) -> Check | None:
    """Who serves the file now, told by the lock beside it."""
    from headwater.sources.sqlite.file_lock import SUFFIX

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


def _inside(name: str, path: str, log: Path, *, wal: bool, tables: tuple[str, ...]) -> Iterator[Check]:
    from headwater.sources.sqlite.connection import open_file, sqlite_errors

    db = open_file(path, read_only=True)
    try:
        with sqlite_errors(path):
            yield from _format(name, db, wal=wal, fresh=os.path.getsize(path) == 0)
            yield from _tables(name, db, tables)
            yield from _capture(name, db, log, tables)
    finally:
        db.close()


def _format(name: str, db: Connection, *, wal: bool, fresh: bool) -> Iterator[Check]:
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


def _tables(name: str, db: Connection, tables: tuple[str, ...]) -> Iterator[Check]:
    from headwater.sources.sqlite.capture.trigger_installation import capturable, read_triggers
    from headwater.sources.sqlite.connection import OURS

    shapes, refused = capturable(db, tables)
    yield Check(name, "ok", f"{counted(len(shapes), 'table')} can be captured")
    for table, reason in refused.items():
        yield Check(name, "warn", f"table {table} cannot be captured: {reason}", "Change the table, or live without.")
    for table in sorted(set(tables) - set(shapes) - set(refused)):
        yield Check(name, "warn", f"sqlite.tables names {table}, which is not there", "Create it, or correct the name.")
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


def _capture(name: str, db: Connection, log: Path, tables: tuple[str, ...]) -> Iterator[Check]:
    from headwater.sources.sqlite.capture.trigger_installation import (
        capturable,
        check_format,
        is_installed,
        read_layouts,
        read_triggers,
    )
    from headwater.sources.sqlite.capture.trigger_plan import plan

    if not is_installed(db):
        yield Check(name, "ok", "not captured yet; `headwater serve` or `headwater source attach` begins")
        yield from _log(name, log, None)
        return
    check_format(db)
    active = [layout for layout in read_layouts(db).values() if layout.active]
    steps = plan(capturable(db, tables)[0], active, read_triggers(db))
    if steps:
        finding = f"the schema moved: capture of {counted(len(steps), 'table')} is out of date"
        yield Check(name, "warn", finding, "A running server corrects it by itself; otherwise start one.")
    else:
        yield Check(name, "ok", f"{counted(len(active), 'table')} {'is' if len(active) == 1 else 'are'} captured")
    yield from _log(name, log, _facts(db))


def _facts(db: Connection) -> dict[str, Any]:
    from headwater.sources.sqlite.capture.trigger_installation import meta
    from headwater.sources.sqlite.capture.triggers import CAPTURE

    ((head,),) = db.execute(f"SELECT max(seq) FROM {CAPTURE}").fetchall()
    return {"generation": meta(db, "generation"), "head": int(str(head))}


def _log(name: str, path: Path, facts: dict[str, Any] | None) -> Iterator[Check]:
    from headwater.log.disk.disk_log import DiskLog

    again = "Readers take a new snapshot after the next start, which begins a new generation."
    if not path.exists():
        if facts:
            yield Check(name, "warn", f"its log {path} is missing", f"Check --data and the name. {again}")
        return
    log = DiskLog.open(path, read_only=True)
    try:
        holds = "no changes" if log.latest < log.horizon else f"offsets {log.horizon} to {log.latest}"
        yield Check(name, "ok", f"log {path}: {holds}, generation {log.generation}")
        if facts and facts["generation"] != log.generation:
            yield Check(name, "warn", "file and log are of different generations", f"Check --data. {again}")
        elif facts and facts["head"] < log.latest:
            finding = f"the file ends at change {facts['head']}, the log at {log.latest}"
            yield Check(name, "warn", finding, f"Was an older copy restored? {again}")
        elif facts is None and log.latest:
            yield Check(name, "warn", "the log is of a file that was captured; this one is not", again)
    finally:
        log.close()
