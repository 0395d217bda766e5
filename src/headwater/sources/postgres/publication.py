"""The publication says which changes the server sends: made, fitted to the settings, and watched.

It must be older than the slot, for the server reads it as it was at each change. What was committed while it was gone,
or was another, is never sent, and newer servers do not even say so. So the log remembers how its publication was
written: one that was written anew by somebody else ends the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import psycopg

from headwater.errors import SourceUnfit
from headwater.sources.postgres.connection import Connection, quoted
from headwater.sources.postgres.relations import split_name, table_name
from headwater.sources.postgres.slot import run_as_owner, table_oid

_SCHEMAS = 150000  # the first server that publishes whole schemas
LOCK_MS = 200  # for who alters the table that is to be published: then another time

# Row filters and column lists are there from PostgreSQL 15 on.
_PARTLY = """
SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s AND (to_jsonb(r) ->> 'prqual' IS NOT NULL OR to_jsonb(r) ->> 'prattrs' IS NOT NULL)
ORDER BY 1, 2
"""
_MISSING = """
SELECT c.oid::bigint, n.nspname, c.relname FROM unnest(%s::text[], %s::text[]) wanted (schema, name)
JOIN pg_namespace n ON n.nspname = wanted.schema
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.name AND c.relkind IN ('r', 'p')
JOIN pg_publication p ON p.pubname = %s AND NOT p.puballtables
WHERE c.relpersistence = 'p'
  AND NOT EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid)
"""


class Publication(msgspec.Struct, frozen=True):
    """Which rows of the catalogue say what is published, and who wrote them: of itself, and by oid of what it names."""

    itself: str
    members: Mapping[int, str]


def find_publication(connection: Connection, publication: str) -> Publication | None:
    """As it is now."""
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
    """Whether something that was published may have been left out since. A table that was dropped was not."""
    if now is None or now.itself != known.itself:
        return True
    gone = [oid for oid, written in known.members.items() if now.members.get(oid) != written]
    there = "SELECT 1 FROM pg_class WHERE oid = ANY(%s) UNION ALL SELECT 1 FROM pg_namespace WHERE oid = ANY(%s)"
    return bool(gone) and connection.execute(there, [gone, gone]).fetchone() is not None


def ensure_publication(connection: Connection, publication: str, tables: Sequence[str]) -> None:
    """Make it, or fit it to `tables`; none named means all."""
    row = connection.execute(
        "SELECT puballtables, pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot FROM pg_publication "
        "WHERE pubname = %s",
        [publication],
    ).fetchone()
    there = [_parts(name) for name in tables if table_oid(connection, name) is not None]
    named = ", ".join(map(_only, there))
    name = quoted(publication)
    if row is None:
        more = " WITH (publish_generated_columns = stored)" if connection.info.server_version >= 180000 else ""
        what = "FOR ALL TABLES" if not tables else f"FOR TABLE {named}" if named else ""
        run_as_owner(connection, f"CREATE PUBLICATION {name} {what}{more}")
        return
    whole, everything, by_root = row
    if by_root:
        raise SourceUnfit(
            f"the publication {publication} sends rows of partitions as their root's: one that is attached or detached "
            "with rows in it would be told by nothing",
            hint=f"Run: ALTER PUBLICATION {name} SET (publish_via_partition_root = false);",
        )
    if not everything:
        run_as_owner(connection, f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')")
    if whole and tables or not whole and not tables:
        want = "only the tables of postgres.tables" if tables else "all tables"
        raise SourceUnfit(
            f"the publication {publication} is not of {want}",
            hint=f"Run: DROP PUBLICATION {name}; and start again with a new postgres.publication and postgres.slot.",
        )
    published = _published(connection, publication)
    fitting = f"SET TABLE {named}" if named else f"DROP TABLE {', '.join(map(_only, published))}"
    partly = [table_name(*each) for each in connection.execute(_PARTLY, [publication]).fetchall()]
    if partly:
        raise SourceUnfit(
            f"the publication {publication} sends only some rows or columns of {', '.join(partly)}: changes of the "
            "others would be told by nothing",
            hint=f"Run: ALTER PUBLICATION {name} {fitting};",
        )
    if tables and {*there} != {*published}:
        run_as_owner(connection, f"ALTER PUBLICATION {name} {fitting}")


def add_missing(connection: Connection, publication: str, tables: Sequence[str]) -> dict[int, str]:
    """Publish those of `tables` that were made since; what the catalogue has of them now. Nobody is waited for: a table
    that somebody alters is left out this time. To be called outside a transaction."""
    wanted = [parts for name in tables if (parts := split_name(name)) is not None]
    schemas, names = [schema for schema, _ in wanted], [name for _, name in wanted]
    added = []
    for oid, schema, name in connection.execute(_MISSING, [schemas, names, publication]).fetchall():
        try:
            with connection.transaction():
                connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS}".encode())
                only = _only((schema, name))
                run_as_owner(connection, f"ALTER PUBLICATION {quoted(publication)} ADD TABLE {only}")
        except (
            psycopg.errors.LockNotAvailable,
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedObject,
            psycopg.errors.DuplicateObject,
        ):
            continue
        added.append(oid)
    found = find_publication(connection, publication) if added else None
    return {} if found is None else {oid: found.members[oid] for oid in added if oid in found.members}


def _only(table: tuple[str, str]) -> str:
    """A table without those that inherit from it, as SQL."""
    return f"ONLY {quoted(table[0])}.{quoted(table[1])}"


def _parts(name: str) -> tuple[str, str]:
    parts = split_name(name)
    assert parts is not None  # `table_oid` has asked
    return parts


def _published(connection: Connection, publication: str) -> list[tuple[str, str]]:
    rows = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid "
        "JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = %s",
        [publication],
    ).fetchall()
    return [(schema, name) for schema, name in rows]
