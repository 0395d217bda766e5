"""Announcements of table changes that the stream does not carry: a table was dropped, was altered in a way its rows do
not show, is no longer sent (a detached partition, a table made unlogged) or was not sent for a while; or a definition
that queries use changed though no row did (see definition_changes).

An announcement is a message of ours in the server's WAL. So it has a position among the commits, and a crash repeats
it unchanged: the shape a row was delivered under never changes. The message carries a secret of the log, because any
role may write messages. While it is written, nobody can alter the tables whose shapes it carries; the oid of a dropped
table is never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import psycopg

from headwater.model.table import Table
from headwater.sources.postgres.capture.slot.slot import table_oid
from headwater.sources.postgres.capture.stream.transaction_assembly import SHAPES
from headwater.sources.postgres.connection import Connection, quoted
from headwater.sources.postgres.schema.catalog import Described, describe
from headwater.sources.postgres.schema.definition_changes import (
    Meanings,
    ObjectDefinition,
    moved,
    read_meanings,
    reattached,
    remarked,
    remembered,
    rewritten,
)
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.shape_changes import Announcement, Shapes, has_same_columns, is_same_shape

LOCK_MS = 200  # a waiting ALTER TABLE blocks all later readers of the table: give up and retry later

_READABLE = """
SELECT oid::bigint FROM pg_class WHERE oid = ANY (%s::oid[])
  AND has_table_privilege(oid, 'SELECT') AND has_schema_privilege(relnamespace, 'USAGE')
"""


def announce(
    connection: Connection, publication: str, shapes: Shapes, told: Meanings | None, *, all_tables: bool
) -> tuple[bool, dict[str, ObjectDefinition | None]]:
    """Announce how the catalogue differs from the log's end, and definitions from `told`, those announced before.

    Return whether everything was announced, otherwise the caller must retry; and the definitions announced.
    """
    means = read_meanings(connection)
    now = describe(connection, publication)
    meant = {} if told is None else moved(told, means, _fitting(shapes, now))
    # A table that is new in a publication of some tables may have had rows before.
    wanted = meant.keys() if all_tables else meant.keys() | now.tables.keys()
    is_late = not all_tables and any(shapes.oids.get(name, oid) != oid for name, oid in now.oids.items())
    replaced, unseen = ({}, {}) if told is None else (rewritten(told, means), remarked(told, means))
    if told is not None and not all_tables:
        unseen |= dict.fromkeys(reattached(told, means) & shapes.tables.keys(), "it was not published for a while")
    reshaped = {*unseen, *(name for name in replaced if _is_retyped(shapes, now, name))}
    found = _find_differences(connection, now, shapes, wanted, reshaped)
    # A table in `found` is announced by that alone, unless the stream may deliver its first announcement only now.
    others = {name: why for name, why in meant.items() if (name in shapes.tables) != _is_in(found, name)}
    rest = Announcement(
        moved=others,
        unseen={name: why for name, why in unseen.items() if _is_ours(shapes, now, name)},
        rewritten={name: xid for name, xid in replaced.items() if _is_ours(shapes, now, name)},
    )
    is_told = _announce(connection, publication, shapes, found, rest, reshaped)
    return is_told and not is_late, remembered(told or {}, means)


def _announce(
    connection: Connection,
    publication: str,
    shapes: Shapes,
    found: Announcement,
    rest: Announcement,
    reshaped: Collection[str],
) -> bool:
    ended = msgspec.structs.replace(rest, gone=found.gone, left=found.left)
    if not found.tables:
        _emit(connection, ended, shapes)
        return True
    try:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS}".encode())
            for table in found.tables.values():
                schema, name = split_name(table.name) or ("", "")
                connection.execute(f"LOCK TABLE ONLY {quoted(schema)}.{quoted(name)} IN ACCESS SHARE MODE".encode())
            wanted = {each.name for each in found.tables.values()}
            again = _find_differences(connection, describe(connection, publication), shapes, wanted, reshaped)
            locked = {oid: table for oid, table in again.tables.items() if oid in found.tables}
            _emit(connection, msgspec.structs.replace(rest, tables=locked, gone=again.gone, left=again.left), shapes)
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.LockNotAvailable,
        psycopg.errors.UndefinedTable,
    ):
        _emit(connection, rest, shapes)
        return False
    return True


def _emit(connection: Connection, found: Announcement, shapes: Shapes) -> None:
    if found == Announcement():
        return
    # Sent as bytes: a text would be streamed in the database's encoding.
    content = msgspec.json.encode(msgspec.structs.replace(found, secret=shapes.secret))
    connection.execute("SELECT pg_logical_emit_message(true, %s, %s::bytea)", [SHAPES, content])


def _find_differences(
    connection: Connection, now: Described, shapes: Shapes, wanted: Collection[str], reshaped: Collection[str]
) -> Announcement:
    """Return the differences between catalogue and log. Tables in `wanted` are included even if the log does not know
    them yet, tables in `reshaped` even if their next row would show it: a snapshot is due now, and only one."""
    ours = {oid: now.tables[name] for name, oid in now.oids.items() if shapes.oids.get(name, oid) == oid}
    missing = [(shapes.oids.get(name, 0), name) for name in shapes.tables if name not in now.tables]
    missing += [(oid, name) for name, oid in shapes.oids.items() if name in now.tables and oid not in ours]
    known = shapes.tables
    news = {
        oid: table
        for oid, table in ours.items()
        if _is_news(known, table, reshaped) or (table.name in wanted and table.name not in known)
    }
    if news:  # a role that may not read a table cannot lock it
        rows = connection.execute(_READABLE, [list(news)]).fetchall()
        news = {oid: news[oid] for (oid,) in rows}
    there = [each for each in missing if _is_there(connection, *each)]
    gone = [each for each in missing if each not in there]
    sent = {*now.oids.values()}  # renamed tables: the next row of each reports the new name
    return Announcement(news, gone, [each for each in there if each[0] not in sent])


def _is_there(connection: Connection, oid: int, name: str) -> bool:
    """Return whether table `oid` exists under any name; if the oid is unknown (0), whether a table `name` exists."""
    if not oid:
        return table_oid(connection, name) is not None
    return connection.execute("SELECT 1 FROM pg_class WHERE oid = %s", [oid]).fetchone() is not None


def _is_in(found: Announcement, name: str) -> bool:
    ended = (each for _, each in (*found.gone, *found.left))
    return name in ended or any(each.name == name for each in found.tables.values())


def _is_ours(shapes: Shapes, now: Described, name: str) -> bool:
    """Return whether the table is sent, and the log knows no other table by its name."""
    return name in now.tables and shapes.oids.get(name, now.oids[name]) == now.oids[name]


def _is_retyped(shapes: Shapes, now: Described, name: str) -> bool:
    """Return whether a column has another type than the log knows."""
    had, table = shapes.tables.get(name), now.tables.get(name)
    if had is None or table is None:
        return False
    were = {each.name: (each.kind, each.declared) for each in had.columns}
    return any(were.get(each.name, (each.kind, each.declared)) != (each.kind, each.declared) for each in table.columns)


def _fitting(shapes: Shapes, now: Described) -> set[str]:
    """Return the names of tables whose oid and columns are those that the log knows."""
    known = shapes.tables
    alike = {name for name, table in now.tables.items() if name in known and has_same_columns(known[name], table)}
    return {name for name in alike if shapes.oids.get(name, now.oids[name]) == now.oids[name]}


def _is_news(known: Mapping[str, Table], table: Table, reshaped: Collection[str]) -> bool:
    had = known.get(table.name)
    if had is None or is_same_shape(had, table):
        return False
    return table.name in reshaped or has_same_columns(had, table)
