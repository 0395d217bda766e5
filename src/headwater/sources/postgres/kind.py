"""The PostgreSQL entry of the registry: opening, bulk reads, and the commands `source` and `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError, HeadwaterError
from headwater.model.quantity import byte_size, counted
from headwater.sources.capture_stream import LogNotes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.read import BulkAddress, PastShapes, ServerPositions
from headwater.sources.registry import CapturedTable, Check, CommandReport, Inspection, LogView, SourceKind

if TYPE_CHECKING:
    from headwater.sources.postgres.capture.slot.slot import DropResult
    from headwater.sources.postgres.read.bulk_reader import PostgresReader
    from headwater.sources.postgres.setup.inspection import InspectionResult
    from headwater.sources.postgres.source import PostgresSource

LEFT = "the publication is left, because the role does not own it"


class PostgresKind(SourceKind):
    """The kind of source for PostgreSQL databases."""

    settings = PostgresConfig

    def open(
        self, name: str, url: str, *, notes: LogNotes, settings: PostgresConfig, folder: Path, is_embedded: bool
    ) -> PostgresSource:
        """Return the source, which connects when its capture begins."""
        source: type[PostgresSource] = _module("source").PostgresSource
        return source(name, url, notes=notes, config=settings, folder=folder)

    def open_bulk_reader(
        self, name: str, address: BulkAddress, *, generation: str, log: PastShapes, server: ServerPositions
    ) -> PostgresReader:
        """Return a reader, which connects when it first reads; callers' conditions use their own login."""
        reader: type[PostgresReader] = _module("read.bulk_reader").PostgresReader
        return reader(name, address.address, server, log, judge=address.reader or address.address)

    # --- commands ----------------------------------------------------------------------------------------------------

    def list_tables(self, name: str, url: str, settings: PostgresConfig) -> list[CapturedTable]:
        findings = _module("setup.doctor").table_findings
        found = []
        for each in _module("setup.inspection").list_tables(name, url, settings):
            note = "; ".join([finding.problem for finding in findings(each)])
            note = note or ("" if each.is_published else "not captured yet")
            is_captured = each.is_published and each.is_logged
            found.append(CapturedTable(name, each.name, is_captured, None, list(each.key), note))
        return found

    def inspect(self, name: str, url: str, settings: PostgresConfig) -> Inspection:
        try:
            found: InspectionResult = _module("setup.inspection").inspect(name, url, settings)
        except HeadwaterError as error:
            return Inspection([Check(name, "fail", error.message, error.hint)], is_readable=False)
        fit = len([each for each in found.tables if _module("setup.doctor").is_fit(each)])
        checks = [
            Check(name, "ok", f"PostgreSQL {found.version}, database {found.database!r}"),
            Check(name, "ok", f"{counted(fit, 'table')} can be captured"),
        ]
        for each in found.findings:
            state = "fail" if each.fatal or each.refuses_writes else "warn"
            checks.append(Check(name, state, each.problem, each.remedy))

        def mismatch(log: LogView) -> tuple[str, str] | None:
            reason = found.mismatch(log.note("postgres"), log.latest, lambda after: log.scan(after=after))
            return (reason, "") if reason else None

        return Inspection([*checks, _slot_check(name, found)], found.slot is not None, mismatch)

    def attached(self, name: str, url: str, status: dict[str, Any], tables: tuple[str, ...]) -> CommandReport:
        """Return the report on the tables of the publication, and on the slot that was created."""
        found, slot = status["tables"], status["slot"]
        names = f": {', '.join(found)}" if found else ""
        lines = [
            f"capturing {counted(len(found), 'table')} as {name!r}{names}",
            f"the server keeps its WAL for the slot {slot} from now on: serve the database soon, or detach it",
        ]
        return CommandReport({"database": name, "slot": slot, "tables": found}, lines)

    def setup_sql(self, name: str, url: str, *, reader: str, writer: str, ddl_statements: bool) -> list[str]:
        """Return the SQL of the logins for callers, the settings that use them, and the SQL of the trigger."""
        lines = [
            f"-- Logins for SQL that callers send to Headwater. Run as an owner of the tables, in {name!r}:",
            *_module("setup.inspection").setup_sql(name, url, reader, writer),
            f"-- Then set both passwords (psql: \\password {reader}), and in the settings of Headwater:",
            f'-- [postgres]\n-- reader = "{reader}"\n-- writer = "{writer}"',
        ]
        if ddl_statements:
            who = "for everybody who reads a table that they alter"
            lines.append(f"-- DDL statements as they were run, {who}. As a superuser:")
            lines.append(_module("schema.ddl_trigger").INSTALL)
        return lines

    def detach(
        self, name: str, url: str, settings: PostgresConfig, find_log: Callable[[str | None], str | None]
    ) -> CommandReport:
        """Remove the slot and the publication; report a publication that the role may not drop: it keeps no WAL."""
        dropped: DropResult = _module("setup.detach").detach(name, url, config=settings)
        kept = find_log(None)
        what = "the slot" if dropped.left else "the slot and the publication"
        absent = f"{name!r} has no slot" if dropped.left else f"{name!r} was not attached"
        lines = [f"removed {what} of {name!r}" if dropped.changed else absent]
        lines += [f"its log is kept: {kept}"] if kept else []
        notes = []
        if dropped.left:
            hint = f"As the owner of the publication or a superuser run: {dropped.left}"
            notes.append((f"the slot is gone, and the server keeps no log for it; {LEFT}", hint))
        if dropped.left_trigger:
            hint = f"As a superuser run: {' '.join(dropped.left_trigger.split())}"
            notes.append(("the trigger that shows DDL statements is left, because the role does not own it", hint))
        return CommandReport({"database": name, "changed": dropped.changed, "log": kept}, lines, notes)


def _slot_check(name: str, found: InspectionResult) -> Check:
    if found.slot is None:
        return Check(name, "ok", "not captured yet; `headwater serve` or `headwater source attach` begins")
    kept = f"the server keeps {byte_size(found.slot.lag_bytes)} of its log for the slot {found.slot_name}"
    if found.holder:
        return Check(name, "ok", f"{kept}, which is read by {found.holder}")
    remedy = "Serve the database, or give the slot back: headwater source detach."
    return Check(name, "warn", f"{kept}, which nobody reads", remedy)


def _module(name: str) -> Any:
    """Import a module of this source; raise ConfigError if psycopg is not installed."""
    try:
        return import_module(f"headwater.sources.postgres.{name}")
    except ImportError:
        raise ConfigError("PostgreSQL needs the library psycopg", hint="pip install 'headwater[postgres]'") from None


KIND = PostgresKind()
