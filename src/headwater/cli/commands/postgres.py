"""The commands `source` and `doctor` where the database is PostgreSQL."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import load_config
from headwater.cli.failure import OK
from headwater.cli.output.tables import counted, print_json, size
from headwater.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    from headwater.cli.doctor_checks import Check
    from headwater.config import Config
    from headwater.sources.postgres.capture.slot.slot import Dropped
    from headwater.sources.postgres.setup.inspection import Inspection

LEFT = "the publication is left, because the role does not own it"


def _room(name: str) -> ModuleType:
    """A module of the source, whose library need not be installed."""
    from importlib import import_module

    try:
        return import_module(f"headwater.sources.postgres.{name}")
    except ImportError:
        raise ConfigError("PostgreSQL needs the library psycopg", hint="pip install 'headwater[postgres]'") from None


# --- source ----------------------------------------------------------------------------------------------


def list_tables(name: str, url: str, config: Config) -> list[dict[str, Any]]:
    """Its tables, and whether they are captured."""
    found = _room("setup.inspection").list_tables(name, url, config.postgres)
    findings = _room("setup.doctor").table_findings
    return [
        {
            "database": name,
            "table": each.name,
            "captured": each.is_published and each.is_logged,
            "schema": None,
            "key": list(each.key),
            "note": "; ".join([finding.problem for finding in findings(each)])
            or ("" if each.is_published else "not captured yet"),
        }
        for each in found
    ]


def print_attached(args: argparse.Namespace, name: str, found: dict[str, Any]) -> int:
    """What the publication holds, and that a slot was made."""
    if args.output == "json":
        print_json({"database": name, "slot": found["slot"], "tables": found["tables"]})
    else:
        names = f": {', '.join(found['tables'])}" if found["tables"] else ""
        print(f"capturing {counted(len(found['tables']), 'table')} as {name!r}{names}")
        print(f"the slot {found['slot']} keeps the server's log from now on: serve it soon, or detach it")
    return OK


def print_setup(args: argparse.Namespace, name: str, url: str) -> int:
    """Print the SQL that creates the logins for callers, and the settings that use them; with `--ddl-statements` also
    the SQL of the trigger. Nothing is changed."""
    print(f"-- Logins for SQL that callers send to Headwater. Run as an owner of the tables, in {name!r}:")
    for line in _room("setup.inspection").setup_sql(name, url, args.reader, args.writer):
        print(line)
    print(f"-- Then set both passwords (psql: \\password {args.reader}), and in the settings of Headwater:")
    print(f'-- [postgres]\n-- reader = "{args.reader}"\n-- writer = "{args.writer}"')
    if args.ddl_statements:
        print("-- DDL statements as they were run, for everybody who reads a table that they alter. As a superuser:")
        print(_room("setup.ddl_trigger").INSTALL)
    return OK


def detach(args: argparse.Namespace, name: str, url: str) -> int:
    """Remove the slot and the publication. One that only its owner may drop is told of: it keeps no log."""
    config = load_config(args)
    dropped: Dropped = _room("setup.detach").detach(name, url, config=config.postgres)
    path = Path(config.data) / f"{name}.log.db"
    kept = str(path) if path.exists() else None
    if args.output == "json":
        print_json({"database": name, "changed": dropped.changed, "log": kept})
    else:
        what = "the slot" if dropped.left else "the slot and the publication"
        absent = f"{name!r} has no slot" if dropped.left else f"{name!r} was not attached"
        print(f"removed {what} of {name!r}" if dropped.changed else absent)
        if kept:
            print(f"its log is kept: {kept}")
    if dropped.left:
        print(f"note: the slot is gone, and the server keeps no log for it; {LEFT}", file=sys.stderr)
        print(f"hint: As the owner of the publication or a superuser run: {dropped.left}", file=sys.stderr)
    if dropped.left_trigger:
        print("note: the trigger that shows DDL statements is left, because the role does not own it", file=sys.stderr)
        print(f"hint: As a superuser run: {' '.join(dropped.left_trigger.split())}", file=sys.stderr)
    return OK


# --- doctor ----------------------------------------------------------------------------------------------


def checks(name: str, url: str, log: Path, config: Config) -> Iterator[Check]:
    """One database and its log; see `checks.database`."""
    from headwater.cli.doctor_checks import Check

    try:
        found: Inspection = _room("setup.inspection").inspect(name, url, config.postgres)
    except HeadwaterError as error:
        yield Check(name, "fail", error.message, error.hint)
        return
    is_fit = _room("setup.doctor").is_fit
    yield Check(name, "ok", f"PostgreSQL {found.version}, database {found.database!r}")
    yield Check(name, "ok", f"{counted(len([each for each in found.tables if is_fit(each)]), 'table')} can be captured")
    for each in found.findings:
        yield Check(name, "fail" if each.fatal or each.refuses_writes else "warn", each.problem, each.remedy)
    yield from _slot(name, found)
    yield from _log(name, log, found)


def _slot(name: str, found: Inspection) -> Iterator[Check]:
    from headwater.cli.doctor_checks import Check

    slot = found.slot
    if slot is None:
        yield Check(name, "ok", "not captured yet; `headwater serve` or `headwater source attach` begins")
        return
    kept = f"the server keeps {size(slot.lag_bytes)} of its log for the slot {found.slot_name}"
    if found.holder:
        yield Check(name, "ok", f"{kept}, which is read by {found.holder}")
    else:
        remedy = "Serve the database, or give the slot back: headwater source detach."
        yield Check(name, "warn", f"{kept}, which nobody reads", remedy)


def _log(name: str, path: Path, found: Inspection) -> Iterator[Check]:
    from headwater.cli.doctor_checks import Check
    from headwater.log.disk.disk_log import DiskLog

    again = "Readers take a new snapshot after the next start, which begins a new generation."
    if not path.exists():
        if found.slot is not None:
            yield Check(name, "warn", f"its log {path} is missing", f"Check --data and the name. {again}")
        return
    try:
        log = DiskLog.open(path, read_only=True)
    except HeadwaterError as error:
        yield Check(name, "fail", error.message, error.hint)
        return
    try:
        holds = "no changes" if log.latest < log.horizon else f"offsets {log.horizon} to {log.latest}"
        yield Check(name, "ok", f"log {path}: {holds}, generation {log.generation}")
        reason = found.mismatch(log.note("postgres"), log.latest, lambda after: log.scan(after=after))
        if reason:
            yield Check(name, "warn", reason, again)
    except HeadwaterError as error:
        yield Check(name, "fail", error.message, error.hint)
    finally:
        log.close()
