"""The replication slot: created, described, judged and dropped. Errors carry the SQL that fixes the cause.

The server keeps its WAL until the slot confirms it. The publication decides which changes the slot sends.
"""

from __future__ import annotations

import re
import time

import msgspec
import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from headwater.errors import ConfigError, HeadwaterError, SourceError, SourceUnfit
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of, lsn_text
from headwater.sources.postgres.connection import Connection, error_of, quoted
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.snapshot_visibility import snapshot_now

CREATE_SECONDS = 60  # the server creates a slot only after all open transactions have ended
LEAVE_SECONDS = 5.0


class Slot(msgspec.Struct, frozen=True):
    """A slot as the server describes it."""

    plugin: str
    database: str
    active_pid: int
    confirmed: int
    restart: int
    wal_status: str
    two_phase: bool
    lag_bytes: int  # WAL that the server keeps for the slot
    safe_bytes: int | None  # WAL that the server may still keep; None: no limit


class ServerIdentity(msgspec.Struct, frozen=True):
    """A server's system identifier and timeline, with the history of the timeline."""

    system: str
    timeline: int
    position: int  # the end of the server's WAL
    switches: dict[int, int] = {}  # older timelines, and the LSN at which each ended


class LogOrigin(msgspec.Struct, frozen=True):
    """The server and the position that our log was captured from."""

    system: str
    timeline: int
    database: str
    position: int  # the end of the last transaction in the log
    confirmed: int  # the highest LSN that the server may have received as confirmed


def slot_name(pattern: str, name: str) -> str:
    """Return `pattern` with the database `name`, in characters that slots allow; ConfigError if it is too long."""
    found = re.sub(r"[^a-z0-9_]", "_", pattern.replace("{name}", name).lower())
    if len(found) > 63:
        raise ConfigError(f"the name {found!r} is too long", hint="Shorten postgres.slot or postgres.publication.")
    return found


# --- which server ------------------------------------------------------------------------------------------


def identify(wire: PGconn) -> ServerIdentity:
    """Return the identity of the server behind a replication connection."""
    ((system, timeline, position, *_),) = command(wire, "IDENTIFY_SYSTEM")
    switches: dict[int, int] = {}
    if timeline != "1":
        ((_, history),) = command(wire, f"TIMELINE_HISTORY {int(timeline)}")
        for line in history.splitlines():
            parts = line.split("\t")
            if len(parts) >= 2 and parts[0].strip().isdigit():
                switches[int(parts[0])] = lsn_of(parts[1].strip())
    return ServerIdentity(system, int(timeline), lsn_of(position), switches)


def command(wire: PGconn, text: str) -> list[list[str]]:
    """Run a command on a replication connection, which takes no parameters; return the rows."""
    result = wire.exec_(text.encode())
    if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        raise wire_error(result, text.split(" ")[0])
    return [
        [(result.get_value(row, column) or b"").decode("utf-8", "replace") for column in range(result.nfields)]
        for row in range(result.ntuples)
    ]


def wire_error(result: PGresult, what: str) -> HeadwaterError:
    """Return our error for a command that a replication connection refused."""
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
    if not state:
        return SourceError(f"{what}: the connection was lost")
    found = error_of(state, message, what)
    found.extra["sqlstate"] = state
    return found


def find_slot(connection: Connection, slot: str) -> Slot | None:
    """Return the slot of that name, whoever created it; None if there is none."""
    row = connection.execute(
        """
        SELECT coalesce(plugin, ''), coalesce(database, ''), coalesce(active_pid, 0), confirmed_flush_lsn::text,
               restart_lsn::text, coalesce(wal_status, ''), two_phase,
               coalesce(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                 ELSE pg_current_wal_lsn() END, restart_lsn), 0)::bigint, safe_wal_size
        FROM pg_replication_slots WHERE slot_name = %s
        """,
        [slot],
    ).fetchone()
    if row is None:
        return None
    plugin, database, pid, confirmed, restart, *rest = row
    return Slot(plugin, database, pid, lsn_of(confirmed or "0/0"), lsn_of(restart or "0/0"), *rest)


def judge(known: LogOrigin, identity: ServerIdentity, slot: Slot | None, database: str) -> str:
    """Return why the server does not continue where our log ends; "" if it does."""
    if identity.system != known.system:
        return f"this is another server: its system identifier is {identity.system}, not {known.system}"
    if database != known.database:
        return f"this is another database of the server: {database!r}, not {known.database!r}"
    if known.timeline != identity.timeline:
        ended = identity.switches.get(known.timeline)
        if ended is None:
            return f"the server's timeline {identity.timeline} does not come from ours, {known.timeline}"
        if ended < known.position:
            return (
                f"a failover lost changes that our log has: the server's timeline left ours at {lsn_text(ended)}, and "
                f"our log ends at {lsn_text(known.position)}"
            )
    if identity.position < known.position:
        return (
            f"the server's WAL ends at {lsn_text(identity.position)}, before our log at {lsn_text(known.position)}: it "
            "was restored from a backup"
        )
    if slot is None:
        return "its replication slot is gone, and with it the changes after our log"
    if slot.wal_status == "lost":
        return "the server removed changes that its replication slot still needed (max_slot_wal_keep_size)"
    if slot.confirmed > identity.position:
        return (
            f"the replication slot starts at {lsn_text(slot.confirmed)}, beyond the end of the server's WAL at "
            f"{lsn_text(identity.position)}: it is of another history"
        )
    ours = max(known.position, shared(known, identity))
    if slot.confirmed > ours:
        return (
            f"the replication slot was re-created or advanced by somebody else: it starts at "
            f"{lsn_text(slot.confirmed)}, our log ends at {lsn_text(ours)}"
        )
    return ""


def shared(known: LogOrigin, identity: ServerIdentity) -> int:
    """Return the LSN up to which we may have confirmed on this server's history. Confirmations to another server past
    the fork of the two timelines, or past the end of this server's WAL, say nothing about this server."""
    parted = known.confirmed
    if known.timeline != identity.timeline:
        parted = identity.switches.get(known.timeline, 0)
    return min(known.confirmed, parted, identity.position)


def table_oid(connection: Connection, name: str) -> int | None:
    """Return the oid of the table; None if there is no such table, ConfigError if `name` is not a table name."""
    parts = split_name(name)
    if parts is None:
        raise ConfigError(f"{name!r} is not a table name", hint="Write table, or schema.table.")
    row = connection.execute(
        "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        parts,
    ).fetchone()
    return None if row is None else int(row[0])


# --- creation and removal -----------------------------------------------------------------------------------


def run_as_owner(connection: Connection, statement: str) -> None:
    """Run a statement about a publication; raise SourceUnfit with the SQL to run if the role lacks the right."""
    try:
        connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege as error:
        message = error.diag.message_primary or "permission denied"
        hint = f"As a superuser run: {statement.strip()};  -- or name your own tables in postgres.tables."
        raise SourceUnfit(message, hint=hint) from error


def create_slot(connection: Connection, slot: str) -> int:
    """Create a slot and return its first LSN. Waits up to 60 s for open transactions; then SourceError."""
    connection.execute(f"SET statement_timeout = {CREATE_SECONDS * 1000}".encode())
    try:
        row = connection.execute("SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        position = lsn_of((row.fetchone() or ("0/0",))[0])
        if not _wait_until_visible(connection):
            drop_slot(connection, slot)
            raise _held_up(slot)
        return position
    except psycopg.errors.QueryCanceled as error:
        raise _held_up(slot) from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        hint = "Run: ALTER SYSTEM SET max_replication_slots = 20; -- then restart the server"
        raise SourceUnfit("all replication slots of the server are taken", hint=hint) from error
    finally:
        if not connection.closed:
            connection.execute("RESET statement_timeout")


def _held_up(slot: str) -> SourceError:
    return SourceError(
        f"the slot {slot} could not be created: a transaction has been open for more than {CREATE_SECONDS} seconds",
        hint="Find it: SELECT pid, query FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start;",
    )


def _wait_until_visible(connection: Connection) -> bool:
    """Wait for commits older than the new slot that are not visible yet because a standby must confirm them: neither
    the slot's stream nor the first read would have them. A snapshot lists them as open; return False on timeout."""
    running = snapshot_now(connection).open
    end = time.monotonic() + CREATE_SECONDS
    while running & snapshot_now(connection).open:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class DropResult(msgspec.Struct, frozen=True):
    """The result of dropping the slot and publication. `left` is the SQL that drops the publication if the role may
    not, else "".

    `left_trigger` is the SQL that drops the trigger for DDL statements if the role may not, else "".
    """

    changed: bool  # whether something existed and was dropped
    left: str = ""
    left_trigger: str = ""


def drop(connection: Connection, publication: str, slot: str) -> DropResult:
    """Drop the slot, which frees the WAL kept for us (see `drop_slot`); then the publication, if the role owns it."""
    dropped = drop_slot(connection, slot)
    if not connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [publication]).fetchone():
        return DropResult(dropped)
    statement = f"DROP PUBLICATION {quoted(publication)}"
    try:
        connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege:
        return DropResult(dropped, f"{statement};")
    return DropResult(changed=True)


def drop_slot(connection: Connection, slot: str) -> bool:
    """Drop the slot; return whether it existed. Waits up to 5 s while it is in use; then raises SourceError."""
    end = time.monotonic() + LEAVE_SECONDS
    while (found := find_slot(connection, slot)) is not None and found.active_pid and time.monotonic() < end:
        time.sleep(0.02)  # our own connection may be about to end
    if found is None:
        return False
    if found.active_pid:
        raise SourceError(
            f"the slot {slot} is in use by process {found.active_pid} of the server",
            hint="Stop the Headwater server that reads it, or choose another name with postgres.slot.",
        )
    connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    return True
