"""The publication says which changes the server sends: made, fitted to the settings, and watched.

It must be older than the slot, for the server reads it as it was at each change. What was committed while it was gone,
or was another, is never sent, and newer servers do not even say so. So the log remembers how its publication was
written: one that was written anew by somebody else ends the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headwater.errors import SourceUnfit
from headwater.sources.postgres.connection import Connection, quoted
from headwater.sources.postgres.relations import split_name
from headwater.sources.postgres.slot import run_as_owner, table_oid

_SCHEMAS = 150000  # the first server that publishes whole schemas


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
    there = [name for name in tables if table_oid(connection, name) is not None]
    named = ", ".join(f"ONLY {quoted(schema)}.{quoted(table)}" for schema, table in map(_parts, there))
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
    if tables and {*map(_parts, there)} != {*_published(connection, publication)}:
        run_as_owner(connection, f"ALTER PUBLICATION {name} SET TABLE {named}")


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
