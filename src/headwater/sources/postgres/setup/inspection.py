"""Inspection of a database for the command line, whether served or not. Nothing in the database is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import psycopg

from headwater.errors import HeadwaterError, SourceUnfit
from headwater.model.change import Transaction
from headwater.sources.postgres.capture.slot import server_history
from headwater.sources.postgres.capture.slot.publication import ensure_publication
from headwater.sources.postgres.capture.slot.slot import ServerIdentity, Slot, find_slot, identify, judge, slot_name
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.doctor import Finding, TableFit, all_tables, examine
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.setup.logins import setup_sql as logins_sql

LOCK_SECONDS = 2  # longest wait of doctor for the lock of another session


class InspectionResult(msgspec.Struct, frozen=True):
    """The result of an inspection. `holder` is the process that reads the slot now; "" if none does."""

    version: str
    database: str
    slot_name: str
    slot: Slot | None
    holder: str
    identity: ServerIdentity | None  # None if no replication connection could be made
    findings: list[Finding]
    tables: list[TableFit]

    def mismatch(self, note: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return why a log with this note does not continue at the slot; "" if it does, or if the log is new."""
        known = server_history.load(note)
        if known is None:
            return "the log was not made from this database" if latest else ""
        if self.identity is None:
            return ""
        point = server_history.brought_up(known.point, read(known.point.offset))
        return judge(known.known(point), self.identity, self.slot, self.database)


def inspect(name: str, url: str, config: PostgresConfig) -> InspectionResult:
    """Inspect the database by an ordinary and a replication connection; raise if the ordinary one fails."""
    server = Server(name, url)
    slot, publication = slot_name(config.slot, name), slot_name(config.publication, name)
    with server.connect() as connection, server.errors():
        findings = examine(connection, server, slot, publication, config.tables, config.publish_all)
        findings += Logins(server, config).findings(connection)
        if not any(each.fatal for each in findings):
            findings += _publishing(connection, publication, config)
        identity, refused = _identity(server)
        if refused and not any(each.fatal for each in findings):
            findings.append(Finding(refused.message, refused.hint.removeprefix("Run: ")))
        found = find_slot(connection, slot)
        return InspectionResult(
            version=str(connection.info.parameter_status("server_version") or "").split(" ")[0],
            database=connection.info.dbname,
            slot_name=slot,
            slot=found,
            holder="" if found is None or not found.active_pid else _holder(connection, found.active_pid),
            identity=identity,
            findings=findings,
            tables=all_tables(connection, publication),
        )


def list_tables(name: str, url: str, config: PostgresConfig) -> list[TableFit]:
    """Return every table of the database, captured or not."""
    server = Server(name, url)
    with server.connect() as connection, server.errors():
        return all_tables(connection, slot_name(config.publication, name))


def setup_sql(name: str, url: str, reader: str, writer: str) -> list[str]:
    """Return the SQL that creates the logins for callers in this database."""
    server = Server(name, url)
    with server.connect() as connection, server.errors():
        return logins_sql(connection, reader, writer)


def _publishing(connection: Connection, publication: str, config: PostgresConfig) -> list[Finding]:
    """Return why the publication cannot be created or fitted: it is tried and rolled back."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(f"SET LOCAL lock_timeout = {LOCK_SECONDS * 1000}".encode())
            ensure_publication(connection, publication, config.tables, publish_all=config.publish_all)
    except SourceUnfit as error:
        return [Finding(error.message, error.hint.removeprefix("Run: "))]
    except psycopg.errors.LockNotAvailable:
        problem = "a table to be published is locked by another session: publishing it was not tried"
        return [Finding(problem, "SELECT pid, query FROM pg_stat_activity WHERE state <> 'idle';", fatal=False)]
    return []


def _holder(connection: Connection, pid: int) -> str:
    row = connection.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
    return f"process {pid} of the server ({row[0] if row and row[0] else 'no name given'})"


def _identity(server: Server) -> tuple[ServerIdentity | None, HeadwaterError | None]:
    """Return the server's identity from a replication connection; or the error if there is none."""
    try:
        wire = server.replicate()
    except HeadwaterError as error:
        return None, error
    try:
        return identify(wire), None
    finally:
        wire.finish()
