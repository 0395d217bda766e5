"""The publication of a slot: created, fitted to the settings, and checked for alterations by others.

The publication must be older than the slot, because the server reads it as of each change. The server never sends
changes committed while the publication was missing or different, and newer servers do not report it. So the log
remembers the catalogue rows of its publication: a publication re-created by somebody else ends the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import psycopg

from headwater.errors import SourceUnfit
from headwater.sources.postgres.capture.slot.slot import run_as_owner, table_oid
from headwater.sources.postgres.connection import Connection, quoted, text_literal
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.schema.relations import split_name, table_name

_SCHEMAS = 150000  # the first server version that publishes whole schemas
LOCK_MS = 200  # wait for a concurrent ALTER of the table to publish; after a timeout the table is retried later
START_LOCK_MS = 2000  # the same at the start; an autovacuum yields after deadlock_timeout, 1 s by default

# Row filters and column lists exist since PostgreSQL 15.
_PARTLY = """
SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s AND (to_jsonb(r) ->> 'prqual' IS NOT NULL OR to_jsonb(r) ->> 'prattrs' IS NOT NULL)
ORDER BY 1, 2
"""
# Whether table `c` has a usable replica identity; without one PostgreSQL refuses updates and deletes of a published
# table. Whole rows are none if they have generated columns that publication `p` does not send: VIRTUAL ones never are,
# and STORED ones only by its setting, which a publication from before PostgreSQL 18 lacks.
_IDENTIFIED = """(c.relreplident = 'f' AND NOT EXISTS (SELECT FROM pg_attribute v WHERE v.attrelid = c.oid
  AND (v.attgenerated = 'v' OR v.attgenerated = 's' AND to_jsonb(p) ->> 'pubgencols' = 'n') AND NOT v.attisdropped)
  OR EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indimmediate
  AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END))"""
# Whether table `c` has a primary key that can be a replica identity. New partitions inherit it from their root.
KEYED = "EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)"
# `fit`: tables whose writers keep working once they are published. Publishing a partitioned table publishes its
# partitions, now and later, and PostgreSQL checks the replica identity of the partition, which inherits none. So every
# partition must have one, and a primary key must give one to those created later. `pg_partition_tree` would lock.
_FIT = f"""
refusing (oid) AS (
  SELECT a.relid::oid FROM pg_class c LEFT JOIN p ON true CROSS JOIN LATERAL pg_partition_ancestors(c.oid) a
  WHERE c.relispartition AND c.relkind = 'r' AND NOT {_IDENTIFIED}
), fit (oid) AS (
  SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN p ON true
  WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
    AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)'
    AND pg_has_role(c.relowner, 'USAGE')
    AND CASE c.relkind WHEN 'r' THEN {_IDENTIFIED} ELSE {KEYED} AND c.oid NOT IN (SELECT oid FROM refusing) END
)"""
# Tables that we publish where the settings name none: the fit ones, without partitions of what is or will be published.
_WANTED = """c.oid IN (SELECT oid FROM fit) AND NOT EXISTS (
  SELECT FROM pg_partition_ancestors(c.oid) a WHERE a.relid <> c.oid
    AND (a.relid IN (SELECT oid FROM fit) OR a.relid IN (SELECT oid FROM member)))"""


def unpublished_sql(publication: str, tables: Sequence[str], further: str = "") -> str:
    """Return a SELECT of oid, schema and name of the tables that `publication` lacks: of `tables`, or of all fit ones.

    The SELECT is empty for a publication FOR ALL TABLES. `further` are more conditions.
    """
    wanted = [parts for name in tables if (parts := split_name(name)) is not None]
    named = ", ".join(f"({text_literal(schema)}, {text_literal(name)})" for schema, name in wanted)
    condition = _WANTED
    if tables:
        condition = "c.relkind IN ('r', 'p') AND c.relpersistence = 'p'"
        condition += f" AND (n.nspname::text, c.relname::text) IN ({named})" if named else " AND false"
    return f"""
WITH p AS (SELECT * FROM pg_publication WHERE pubname = {text_literal(publication)}),
member (oid) AS (SELECT r.prrelid FROM pg_publication_rel r JOIN p ON p.oid = r.prpubid), {_FIT}
SELECT c.oid::bigint, n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN p ON true
WHERE {condition} AND NOT coalesce(p.puballtables, false) AND c.oid NOT IN (SELECT oid FROM member) {further}
ORDER BY 2, 3
"""


class Publication(msgspec.Struct, frozen=True):
    """A publication as oid and xmin of its catalogue rows: `itself`, and its members by oid of table or schema."""

    itself: str
    members: Mapping[int, str]


def find_publication(connection: Connection, publication: str) -> Publication | None:
    """Return the publication as it is now; None if there is none."""
    row = connection.execute(
        "SELECT oid::bigint, oid || '.' || xmin::text FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    if row is None:
        return None
    oid, itself = row
    ask = "SELECT prrelid::bigint, oid || '.' || xmin::text FROM pg_publication_rel WHERE prpubid = %s"
    members = connection.execute(ask, [oid]).fetchall()
    if connection.info.server_version >= _SCHEMAS:
        ask = "SELECT pnnspid::bigint, oid || '.' || xmin::text FROM pg_publication_namespace WHERE pnpubid = %s"
        members += connection.execute(ask, [oid]).fetchall()
    return Publication(itself, dict(members))


def was_altered(connection: Connection, known: Publication, now: Publication | None) -> bool:
    """Return whether a published table may have been left out since `known`; a dropped table does not count."""
    if now is None or now.itself != known.itself:
        return True
    gone = [oid for oid, written in known.members.items() if now.members.get(oid) != written]
    there = "SELECT 1 FROM pg_class WHERE oid = ANY(%s) UNION ALL SELECT 1 FROM pg_namespace WHERE oid = ANY(%s)"
    return bool(gone) and connection.execute(there, [gone, gone]).fetchone() is not None


def is_of_all_tables(connection: Connection, publication: str) -> bool:
    """Return whether the publication is FOR ALL TABLES."""
    ask = "SELECT puballtables FROM pg_publication WHERE pubname = %s"
    return connection.execute(ask, [publication]).fetchone() == (True,)


def fit_publication(
    connection: Connection, publication: str, tables: Sequence[str], *, publish_all: bool = False
) -> list[str]:
    """Run `ensure_publication`, and while others lock tables change the publication table by table.

    Return the tables left out because they are locked; `add_missing` publishes them later. No table stays locked while
    this waits for another: an ALTER TABLE that waits for our lock blocks all writers. Call it outside a transaction.
    """
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS}".encode())
            ensure_publication(connection, publication, tables, publish_all=publish_all)
        return []
    except psycopg.errors.LockNotAvailable:
        ensure_publication(connection, publication, tables, publish_all=publish_all, leaves_tables=True)
    wanted = {_parts(name) for name in tables}
    for table in _published(connection, publication):
        if tables and table not in wanted:
            _alter(connection, publication, "DROP", table, START_LOCK_MS)
    _, refused = add_missing(connection, publication, tables, START_LOCK_MS)
    if refused is not None:
        raise refused
    left = connection.execute(unpublished_sql(publication, tables).encode()).fetchall()
    return [table_name(schema, name) for _, schema, name in left]


def ensure_publication(
    connection: Connection,
    publication: str,
    tables: Sequence[str],
    *,
    publish_all: bool = False,
    leaves_tables: bool = False,
) -> None:
    """Create the publication, or change it to publish `tables`; SourceUnfit with the SQL to run if we cannot.

    If `tables` is empty, the publication gets every table whose writers keep working once it is published; with
    `publish_all` it is FOR ALL TABLES, those without a key included. With `leaves_tables` its tables stay as they are.
    """
    row = connection.execute(
        "SELECT puballtables, pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot FROM pg_publication "
        "WHERE pubname = %s",
        [publication],
    ).fetchone()
    lacking = connection.execute(unpublished_sql(publication, tables).encode()).fetchall()
    added = [(schema, table) for _, schema, table in lacking]
    there = [_parts(name) for name in tables if table_oid(connection, name) is not None]
    name = quoted(publication)
    if row is None:
        more = " WITH (publish_generated_columns = stored)" if connection.info.server_version >= 180000 else ""
        named = "" if leaves_tables else ", ".join(map(_only, there if tables else added))
        what = "FOR ALL TABLES" if publish_all and not tables else f"FOR TABLE {named}" if named else ""
        run_as_owner(connection, f"CREATE PUBLICATION {name} {what}{more}")
        return
    whole, everything, by_root = row
    if by_root:
        raise SourceUnfit(
            f"the publication {publication} sends rows of partitions as rows of the root table: no change would report "
            "a partition that is attached or detached with rows in it",
            hint=f"Run: ALTER PUBLICATION {name} SET (publish_via_partition_root = false);",
        )
    if not everything:
        run_as_owner(connection, f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')")
    if whole and tables or publish_all and not whole and not tables:
        want = "only the tables of postgres.tables" if tables else "all tables"
        raise SourceUnfit(
            f"the publication {publication} is not for {want}",
            hint=f"Run: DROP PUBLICATION {name}; and start again with a new postgres.publication and postgres.slot.",
        )
    published = _published(connection, publication)
    named = ", ".join(map(_only, there if tables else published))
    fitting = f"SET TABLE {named}" if named else f"DROP TABLE {', '.join(map(_only, published))}"
    partly = [table_name(*each) for each in connection.execute(_PARTLY, [publication]).fetchall()]
    if partly:
        raise SourceUnfit(
            f"the publication {publication} sends only some rows or columns of {', '.join(partly)}: the other "
            "changes would be missing",
            hint=f"Run: ALTER PUBLICATION {name} {fitting};",
        )
    if tables and {*there} != {*published} and not leaves_tables:
        run_as_owner(connection, f"ALTER PUBLICATION {name} {fitting}")


def add_missing(
    connection: Connection, publication: str, tables: Sequence[str], lock_ms: int = LOCK_MS
) -> tuple[dict[int, str], SourceUnfit | None]:
    """Publish the tables that `unpublished_sql` selects.

    Return the catalogue rows of the added tables by oid, and the first refusal. This does not wait for locks longer
    than `lock_ms`: a table that somebody is altering is left out this time. Call it outside a transaction.
    """
    added, refused = [], None
    for oid, schema, name in connection.execute(unpublished_sql(publication, tables).encode()).fetchall():
        try:
            _alter(connection, publication, "ADD", (schema, name), lock_ms)
        except SourceUnfit as error:
            refused = refused or error
            continue
        except psycopg.Error:
            if connection.closed:
                raise
            continue  # the table is being altered, or no longer exists
        added.append(oid)
    found = find_publication(connection, publication) if added else None
    return {} if found is None else {oid: found.members[oid] for oid in added if oid in found.members}, refused


# The table was created by this transaction, and the role may alter the publication.
_CREATED_NOW = """
AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = -6
  AND a.xmin = pg_current_xact_id()::xid)
AND pg_has_role(p.pubowner, 'USAGE')
"""


def publish_new(link: Link, publication: str, tables: Sequence[str]) -> list[int]:
    """Publish the tables that this transaction created and has not filled yet; return their oids.

    No row of these tables is missed: only rows written before a table is published are not sent. Other tables are
    left to `add_missing`, which has readers take a snapshot.
    """
    published = []
    for oid, schema, name in link.run(unpublished_sql(publication, tables, _CREATED_NOW)).texts():
        only = _only((schema or "", name or ""))
        if not link.run(f"SELECT 1 FROM {only} LIMIT 1").rows:
            link.run(f"ALTER PUBLICATION {quoted(publication)} ADD TABLE {only}")
            published.append(int(oid or 0))
    return published


def _alter(connection: Connection, publication: str, verb: str, table: tuple[str, str], lock_ms: int) -> None:
    """ADD or DROP a table, in a transaction that waits for each lock no longer than `lock_ms`."""
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = {lock_ms}".encode())
        run_as_owner(connection, f"ALTER PUBLICATION {quoted(publication)} {verb} TABLE {_only(table)}")


def _only(table: tuple[str, str]) -> str:
    """Return the table as SQL, without the tables that inherit from it."""
    return f"ONLY {quoted(table[0])}.{quoted(table[1])}"


def _parts(name: str) -> tuple[str, str]:
    parts = split_name(name)
    assert parts is not None  # `table_oid` has checked the name
    return parts


def _published(connection: Connection, publication: str) -> list[tuple[str, str]]:
    rows = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid "
        "JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = %s",
        [publication],
    ).fetchall()
    return [(schema, name) for schema, name in rows]
