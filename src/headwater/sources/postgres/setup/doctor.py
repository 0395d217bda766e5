"""Checks whether a database can be captured, and how well; each problem has the SQL that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headwater.errors import SourceUnfit
from headwater.sources.postgres.capture.slot.publication import KEYED, is_of_all_tables
from headwater.sources.postgres.capture.slot.slot import Slot, find_slot, table_oid
from headwater.sources.postgres.connection import Connection, Server, quoted, text_literal
from headwater.sources.postgres.schema.lock_free_catalog import published_sql
from headwater.sources.postgres.schema.relations import split_name, table_name

OLDEST = 140000  # the first server version that sends unfinished transactions
MOST_WARNINGS = 10
SENDERS = 2  # replication connections we need: the stream, and briefly one for IDENTIFY_SYSTEM
KEEP = "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf();"


class Finding(msgspec.Struct, frozen=True):
    """A problem of a server, and the SQL that fixes it."""

    problem: str
    remedy: str
    fatal: bool = True  # capture cannot run
    refuses_writes: bool = False  # capture runs, but PostgreSQL refuses writes of other clients
    is_logged: bool = False  # also logged when the server starts


class TableFit(msgspec.Struct, frozen=True):
    """A table in the catalogue, captured or not."""

    schema: str
    table: str
    identity: str  # d: by its primary key, i: by an index, f: whole old rows, n: nothing
    has_identity: bool  # whether the key or index that `identity` refers to exists
    is_logged: bool
    is_readable: bool
    is_published: bool
    may_toast: bool  # a column outside the key whose values may be stored in TOAST
    key: tuple[str, ...] = ()
    is_hidden: bool = False  # policies hide rows from the role
    is_owned: bool = True  # the role may publish it
    has_virtual: bool = False  # VIRTUAL generated columns, with which whole old rows are no replica identity
    has_unsent: bool = False  # the same for STORED ones, which the publication does not send
    above: tuple[int, ...] = ()  # of a partition: the oids of its partitioned tables, and its own

    @property
    def name(self) -> str:
        """Return the name of the table in the log."""
        return table_name(self.schema, self.table)

    @property
    def is_identified(self) -> bool:
        """Return whether PostgreSQL accepts updates and deletes of the table once it is published."""
        return self.has_identity or (self.identity == "f" and not self.has_virtual and not self.has_unsent)

    @property
    def full_name(self) -> str:
        """Return the schema and name of the table, quoted for SQL."""
        return f"{quoted(self.schema)}.{quoted(self.table)}"


def check(findings: Iterable[Finding]) -> None:
    """Raise SourceUnfit with all fatal findings, if there are any."""
    fatal = [each for each in findings if each.fatal]
    if fatal:
        problems = "; ".join(each.problem for each in fatal)
        raise SourceUnfit(problems, hint="Run: " + " ".join(each.remedy for each in fatal))


def warnings(findings: Iterable[Finding]) -> list[str]:
    """Return the warnings to log when the server starts, because other users of the database are affected. Pure."""
    texts = [f"{each.problem}; run: {each.remedy}" for each in findings if each.refuses_writes or each.is_logged]
    left = len(texts) - MOST_WARNINGS
    return texts if left <= 0 else [*texts[:MOST_WARNINGS], f"and {left} more: see `headwater doctor`"]


def examine(
    connection: Connection,
    server: Server,
    slot: str,
    publication: str,
    tables: Sequence[str],
    publish_all: bool = False,
) -> list[Finding]:
    """Return every problem that prevents or limits the capture of this database."""
    existing = find_slot(connection, slot)
    found = [*_settings(connection), *_room(connection, existing)]
    if not _rights(connection):
        found.append(Finding("the role may not replicate", f"ALTER ROLE {server.user} REPLICATION;"))
    if existing is not None:
        found += slot_findings(slot, existing, connection.info.dbname)
    for name in tables:
        if table_oid(connection, name) is None:
            found.append(Finding(f"there is no table {name!r}", f"CREATE TABLE {name} (…);", fatal=False))
    is_whole = is_of_all_tables(connection, publication)
    if is_whole and not publish_all and not tables:
        problem = f"the publication {publication} is FOR ALL TABLES: PostgreSQL refuses updates and deletes of every "
        problem += "table without a key, also of new ones"
        remedy = "-- keep it so with postgres.publish_all = true, or detach and attach the database again"
        found.append(Finding(problem, remedy, fatal=False, is_logged=True))
    return found + examine_tables(connection, server, publication, tables, publish_all)


def examine_tables(
    connection: Connection, server: Server, publication: str, tables: Sequence[str], publish_all: bool = False
) -> list[Finding]:
    """Return the problems of the tables that are, or will be, published, and why others are not."""
    named = [oid for name in tables if (oid := table_oid(connection, name)) is not None]
    found = []
    for schema, table in connection.execute(_KEYLESS_ROOTS, [named, publication]).fetchall():
        problem = f"{table_name(schema, table)} has no primary key: as long as it is published, PostgreSQL refuses "
        problem += "updates and deletes of partitions created later without a replica identity"
        remedy = f"ALTER TABLE {quoted(schema)}.{quoted(table)} ADD PRIMARY KEY (…); -- or of each new partition: "
        remedy += "ALTER TABLE … REPLICA IDENTITY FULL;"
        found.append(Finding(problem, remedy, fatal=False, is_logged=True))
    for each in wanted_tables(connection, publication, tables, named):
        found += table_findings(each, server.user, is_wanted=publish_all or bool(tables))
    return found


def _settings(connection: Connection) -> list[Finding]:
    found = []
    if connection.info.server_version < OLDEST:
        found.append(Finding("the server is older than PostgreSQL 14", "-- upgrade the server"))
    level, keep, standby = connection.execute(
        "SELECT current_setting('wal_level'), current_setting('max_slot_wal_keep_size'), pg_is_in_recovery()"
    ).fetchone() or ("", "", False)
    if level != "logical":
        remedy = "ALTER SYSTEM SET wal_level = logical; -- then restart the server"
        found.append(Finding(f"wal_level is {level}", remedy))
    if standby:
        found.append(Finding("the server is a standby", "-- connect to the primary"))
    if keep == "-1":
        problem = "nothing limits how much WAL the server keeps for a slot that is not read"
        found.append(Finding(problem, KEEP, fatal=False, is_logged=True))
    return found


def _room(connection: Connection, existing: Slot | None) -> list[Finding]:
    """Return the problems with the limited replication slots and connections."""
    slots, most_slots, senders, most_senders = connection.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int, "
        "(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'), "
        "current_setting('max_wal_senders')::int"
    ).fetchone() or (0, 1, 0, 1)
    found = []
    if existing is None and slots >= most_slots:
        remedy = f"ALTER SYSTEM SET max_replication_slots = {most_slots + 10}; -- then restart the server"
        found.append(Finding(f"all {most_slots} replication slots are taken", remedy))
    is_ours = existing is not None and existing.active_pid != 0
    if senders + SENDERS - is_ours > most_senders:
        remedy = f"ALTER SYSTEM SET max_wal_senders = {most_senders + 10}; -- then restart the server"
        problem = f"{senders} of {most_senders} connections for replication are taken, and we need {SENDERS}"
        found.append(Finding(problem, remedy, fatal=most_senders < SENDERS))
    return found


def _rights(connection: Connection) -> bool:
    row = connection.execute("SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    member = "SELECT 1 FROM pg_roles WHERE rolname = 'rds_replication' AND pg_has_role(current_user, oid, 'member')"
    return row == (True,) or connection.execute(member).fetchone() is not None


def slot_findings(name: str, slot: Slot, database: str) -> list[Finding]:
    """Return the problems of an existing slot. Pure."""
    drop = f"SELECT pg_drop_replication_slot({text_literal(name)});"
    found = []
    if slot.plugin != "pgoutput":
        found.append(Finding(f"the slot {name} is of {slot.plugin or 'physical replication'}", drop))
    elif slot.database != database:
        problem = f"the slot {name} is of the database {slot.database!r}, not of {database!r}"
        found.append(Finding(problem, f"{drop} -- or choose another name with postgres.slot"))
    if slot.two_phase:
        found.append(Finding(f"the slot {name} sends transactions when they are prepared", drop))
    if slot.wal_status in ("unreserved", "lost"):
        problem = f"the slot {name} is {slot.wal_status}: the server no longer keeps what it needs"
        found.append(Finding(problem, KEEP, fatal=False))
    return found


# --- tables --------------------------------------------------------------------------------------------------

_TABLES = """
SELECT n.nspname, c.relname, c.relreplident::text, r.indexrelid IS NOT NULL, c.relpersistence = 'p',
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       c.oid IN ({published}),
       EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         AND a.attstorage IN ('x', 'e') AND a.attgenerated = ''
         AND NOT coalesce(a.attnum = ANY ((r.indkey::int2[])[:r.indnkeyatts - 1]), false)),
       ARRAY(SELECT a.attname::text FROM pg_index k, unnest(k.indkey::int2[]) WITH ORDINALITY u(number, place)
         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = u.number
         WHERE k.indrelid = c.oid AND k.indisprimary AND u.place <= k.indnkeyatts ORDER BY u.place),
       row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE'),
       EXISTS (SELECT FROM pg_attribute v WHERE v.attrelid = c.oid AND v.attgenerated = 'v' AND NOT v.attisdropped),
       EXISTS (SELECT FROM pg_attribute v, pg_publication p WHERE v.attrelid = c.oid AND v.attgenerated = 's'
         AND NOT v.attisdropped AND p.pubname = %s AND to_jsonb(p) ->> 'pubgencols' = 'n'),
       ARRAY(SELECT a.relid::bigint FROM pg_partition_ancestors(c.oid) a)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_index r ON r.indrelid = c.oid
  AND CASE c.relreplident WHEN 'd' THEN r.indisprimary WHEN 'i' THEN r.indisreplident ELSE false END AND r.indimmediate
WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND c.oid >= 16384
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_toast'
"""
# Partitioned tables that are named, or published by their own name.
_KEYLESS_ROOTS = f"""
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'p' AND NOT {KEYED} AND (c.oid = ANY (%s::oid[]) OR c.oid IN (
  SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s))
ORDER BY 1, 2
""".encode()


def all_tables(connection: Connection, publication: str) -> list[TableFit]:
    """Return every table that holds rows: of a partitioned table, its partitions."""
    return _found(connection.execute(_tables_sql(connection, "ORDER BY 1, 2"), [publication] * 2).fetchall())


def whole_rows_remedy(connection: Connection, schema: str, table: str) -> str:
    """Return the SQL after which changes of the table carry whole rows; "" if they do already."""
    ask = _tables_sql(connection, "AND n.nspname = %s AND c.relname = %s")
    rows = connection.execute(ask, ["", "", schema, table]).fetchall()
    return "".join(_full(each) for each in _found(rows) if is_sparing(each))


def _tables_sql(connection: Connection, rest: str) -> bytes:
    return (_TABLES.replace("{published}", published_sql(connection.info.server_version, "%s")) + rest).encode()


def is_sparing(table: TableFit) -> bool:
    """Return whether an update may omit unchanged TOAST values. Pure."""
    return table.identity != "f" and table.may_toast


def _found(rows: list[tuple[Any, ...]]) -> list[TableFit]:
    return [msgspec.convert(dict(zip(TableFit.__struct_fields__, row, strict=True)), TableFit) for row in rows]


def wanted_tables(
    connection: Connection, publication: str, tables: Sequence[str], named: Sequence[int]
) -> list[TableFit]:
    """Return the tables that the settings name, or all if they name none, and those already published.

    `named` are the oids of `tables` that exist: the partitions of a partitioned table are named with it.
    """
    wanted = {split_name(name) for name in tables}
    return [
        each
        for each in all_tables(connection, publication)
        if not wanted or (each.schema, each.table) in wanted or {*each.above} & {*named} or each.is_published
    ]


def is_fit(table: TableFit) -> bool:
    """Return whether the table can be captured without making PostgreSQL refuse its writes. Pure."""
    return table.is_logged and table.is_owned and table.is_identified


def why_uncaptured(table: TableFit, tables: Sequence[str]) -> str:
    """Return why a table is not published. Pure."""
    if tables:
        return "it is not named in postgres.tables"
    if not table.is_logged:
        return "it is unlogged"
    if table.identity == "f" and not table.is_identified:
        return f"it has {_unsent(table)}"
    if not table.is_identified:
        return "it has neither a primary key nor another replica identity"
    return "it was not published yet" if table.is_owned else "it belongs to another role"


_VIRTUAL = "REPLICA IDENTITY FULL and a VIRTUAL generated column, which PostgreSQL cannot publish"
_UNSENT = "REPLICA IDENTITY FULL and a STORED generated column, which the publication does not send"


def _unsent(table: TableFit) -> str:
    """Return why whole old rows are no replica identity of the table."""
    return _VIRTUAL if table.has_virtual else _UNSENT


def _full(table: TableFit) -> str:
    full = f"ALTER TABLE {table.full_name} REPLICA IDENTITY FULL;"
    return f"-- make its VIRTUAL generated columns STORED ones, then run: {full}" if table.has_virtual else full


def _identity(table: TableFit) -> str:
    """Return the SQL that gives the table a replica identity."""
    if table.identity == "f" and not table.has_virtual:
        return "ALTER PUBLICATION … SET (publish_generated_columns = stored);"
    if not table.has_virtual and not table.has_unsent:
        return _full(table)
    by_key = "" if table.key else f"ALTER TABLE {table.full_name} ADD PRIMARY KEY (…); "
    return f"{by_key}ALTER TABLE {table.full_name} REPLICA IDENTITY DEFAULT;"


def table_findings(table: TableFit, role: str = "YOUR_ROLE", *, is_wanted: bool = False) -> list[Finding]:
    """Return the problems of a table. `is_wanted`: it will be published whether or not it has a key. Pure."""
    if not table.is_logged:
        remedy = f"ALTER TABLE {table.full_name} SET LOGGED;"
        return [Finding(f"{table.name} is unlogged: its changes are not in the server's log", remedy, fatal=False)]
    found = []
    if not table.is_identified:
        lacks = "no replica identity" if table.key else "neither a primary key nor another replica identity"
        lacks = _unsent(table) if table.identity == "f" else lacks
        if table.is_published or is_wanted:
            problem = f"{table.name} has {lacks}: PostgreSQL refuses its updates and deletes as long as it is published"
            found.append(Finding(problem, _identity(table), fatal=False, refuses_writes=True))
        else:
            problem = f"{table.name} has {lacks}: it is not captured, so that PostgreSQL still accepts its updates"
            found.append(Finding(problem, _identity(table), fatal=False, is_logged=True))
    elif is_sparing(table):
        problem = f"{table.name} sends only the key of the old row of an update, and no unchanged TOAST values"
        found.append(Finding(problem, _full(table), fatal=False))
    if not table.key and table.identity != "i":
        problem = f"{table.name} has no primary key: its rows cannot be distinguished, so only feeds are served"
        found.append(Finding(problem, f"ALTER TABLE {table.full_name} ADD PRIMARY KEY (…);", fatal=False))
    if not table.is_owned and not table.is_published:
        problem = f"{table.name} belongs to a role that {role} is not a member of, so it cannot be captured"
        remedy = f"ALTER PUBLICATION … ADD TABLE {table.full_name}; -- as its owner, who must own the publication too"
        found.append(Finding(problem, remedy, fatal=False, is_logged=True))
    if not table.is_readable:
        grant = f"GRANT USAGE ON SCHEMA {quoted(table.schema)} TO {role}; GRANT SELECT ON {table.full_name} TO {role};"
        found.append(Finding(f"{table.name} cannot be read by the role", grant, fatal=False))
    if table.is_hidden:
        problem = f"{table.name} has row security: no snapshot of it is given, because policies hide rows from the role"
        found.append(Finding(problem, f"ALTER ROLE {role} BYPASSRLS;", fatal=False))
    return found
