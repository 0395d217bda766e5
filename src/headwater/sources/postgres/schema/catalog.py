"""PostgreSQL's catalogue: its tables and types, and a number that changes with every change of the schema."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from headwater.model.table import Table
from headwater.sources.postgres.capture.decode.pgoutput import Relation, RelationColumn
from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.schema.lock_free_catalog import COUNTS, published_sql
from headwater.sources.postgres.schema.relations import table_of
from headwater.sources.postgres.schema.shape_changes import is_same_shape
from headwater.sources.postgres.schema.table_facts import Catalogue, ColumnFact, TableFact
from headwater.sources.postgres.snapshot_visibility import Snapshot
from headwater.sources.postgres.types import TypeFact, Types

SETTLE_SECONDS = 2.0  # longest wait until a streamed commit is visible

# Name of collation `l` of pg_collation; `default` is resolved to the database's, whose columns depend on the version.
COLLATION = """CASE WHEN l.collname IS DISTINCT FROM 'default' THEN coalesce(l.collname, '') ELSE (
  SELECT CASE coalesce(to_jsonb(b) ->> 'datlocprovider', 'c') WHEN 'c' THEN b.datcollate
         ELSE coalesce(to_jsonb(b) ->> 'datlocale', to_jsonb(b) ->> 'daticulocale', b.datcollate) END
  FROM pg_database b WHERE b.datname = current_database()) END"""
# INCLUDE columns of an index are in no key, and a deferrable key is no replica identity.
_COLUMNS = """
SELECT c.oid, n.nspname, c.relname, c.relreplident::text, a.attname, a.atttypid, a.atttypmod, NOT a.attnotnull,
       a.attgenerated::text, a.attidentity <> '' OR d.sequence,
       d.present OR a.atthasmissing OR y.typdefault IS NOT NULL, {collation}, k.place,
       o.number IS NOT NULL, c.relfilenode <> c.oid
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_type y ON y.oid = a.atttypid
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
LEFT JOIN pg_index r ON r.indrelid = c.oid
  AND CASE c.relreplident WHEN 'd' THEN r.indisprimary WHEN 'i' THEN r.indisreplident ELSE false END AND r.indimmediate
LEFT JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
  ON k.number = a.attnum AND k.place <= i.indnkeyatts
LEFT JOIN LATERAL unnest(r.indkey::int2[]) WITH ORDINALITY o(number, place)
  ON o.number = a.attnum AND o.place <= r.indnkeyatts
LEFT JOIN LATERAL (
  SELECT count(*) > 0 AS present, coalesce(bool_or({counts}), false) AS sequence
  FROM pg_attrdef WHERE adrelid = c.oid AND adnum = a.attnum) d ON true
""".replace("{collation}", COLLATION).replace("{counts}", COUNTS)
_ONE = _COLUMNS + "WHERE c.oid = %s ORDER BY a.attnum"
_GENERATED = "SELECT to_jsonb(p) ->> 'pubgencols' FROM pg_publication p WHERE pubname = %s"  # since PostgreSQL 18

# The meaning of a statement may depend on these rows. Temporary tables concern only their own sessions.
_LASTING = "oid >= 16384 AND relpersistence <> 't'"
_OWN = "SELECT oid FROM pg_class WHERE {relations}"
_OF_RELATIONS = {
    "pg_class": "{relations}",
    "pg_attribute": f"attnum > 0 AND attrelid IN ({_OWN})",
    "pg_attrdef": f"adrelid IN ({_OWN})",
    "pg_index": f"indrelid IN ({_OWN})",
    "pg_inherits": f"inhrelid IN ({_OWN}) OR inhparent IN ({_OWN})",
    "pg_constraint": f"oid >= 16384 AND (conrelid = 0 OR conrelid IN ({_OWN}))",
    "pg_rewrite": f"oid >= 16384 AND ev_class IN ({_OWN})",
    "pg_policy": f"polrelid IN ({_OWN})",
    "pg_publication_rel": f"prrelid IN ({_OWN})",
}
_OF_ALL = {
    "pg_type": "oid >= 16384 AND (typrelid = 0 AND typelem = 0 OR typtype = 'd')",
    "pg_proc": "oid >= 16384 AND pronamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_temp_')",
    **dict.fromkeys(("pg_operator", "pg_cast", "pg_collation", "pg_enum"), "oid >= 16384"),
    **dict.fromkeys(("pg_opclass", "pg_range", "pg_extension", "pg_publication"), "true"),
    "pg_namespace": "nspname !~ '^pg_(toast_)?temp_'",
    "pg_aggregate": "aggfnoid >= 16384",
    "pg_publication_namespace": "true",
}
_FROM_15 = frozenset({"pg_publication_namespace"})


def _watched(name: str, condition: str) -> str:
    rows = "count(*) AS rows, sum(hashtextextended(xmin::text || '.' || ctid::text, 0)) AS sum"
    return f"SELECT '{name}' AS name, {rows} FROM {name} WHERE {condition}"


def schema_sql(version: int, relations: str = _LASTING) -> str:
    """Return a SELECT of a text that differs after every change of the meaning of statements, by any role.

    Each catalogue row is identified by the transaction that wrote it and its ctid: a change writes a new row.
    `relations` is a condition on pg_class: only those tables and views count.
    """
    watched = {name: each.replace("{relations}", relations) for name, each in _OF_RELATIONS.items()} | _OF_ALL
    parts = [_watched(name, each) for name, each in watched.items() if version >= 150000 or name not in _FROM_15]
    return (
        "SELECT string_agg(name || ' ' || rows || ' ' || coalesce(sum, 0), ',' ORDER BY name) FROM ("
        + " UNION ALL ".join(parts)
        + ") every_one"
    )


def number_of(text: str) -> int:
    """Return the text of `schema_sql` as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def schema_number(connection: Connection) -> int:
    """Return a number that changes with every change of the meaning of statements, as of the transaction's snapshot."""
    row = connection.execute(schema_sql(connection.info.server_version).encode()).fetchone()
    assert row is not None
    return number_of(str(row[0]))


_Row = tuple[Any, ...]  # of _COLUMNS


class Described(msgspec.Struct, frozen=True):
    """Tables as they are now, with the oid of each."""

    tables: dict[str, Table]
    oids: dict[str, int]


def describe(
    connection: Connection,
    publication: str,
    known: Callable[[str], Table | None] = lambda name: None,
    version: Callable[[str], int] = lambda name: 0,
) -> Described:
    """Return the published tables: the log's own Table where the shape is unchanged, else one with the next version."""
    types = read_types(connection)
    row = connection.execute(_GENERATED, [publication]).fetchone()
    sent = ("", "s") if row is not None and row[0] == "s" else ("",)
    tables: dict[str, Table] = {}
    oids: dict[str, int] = {}
    listed = published_sql(connection.info.server_version, "%s")
    rows = connection.execute(
        f"{_COLUMNS} WHERE c.oid IN ({listed}) ORDER BY c.oid, a.attnum".encode(), [publication]
    ).fetchall()
    for relation, fact in _relations(rows, sent):
        table = table_of(relation, fact, types)
        had = known(table.name)
        if had is not None and is_same_shape(had, table):
            table = had
        else:
            table = msgspec.structs.replace(table, version=version(table.name) + 1)
        tables[table.name], oids[table.name] = table, relation.oid
    return Described(tables, oids)


def _relations(rows: Sequence[_Row], sent: tuple[str, ...]) -> list[tuple[Relation, TableFact]]:
    """Return the rows of `_COLUMNS` by table, with only the columns that the stream carries."""
    by_table: dict[int, list[_Row]] = {}
    for row in rows:
        by_table.setdefault(row[0], []).append(row)
    return [(_relation(oid, found, sent), _fact(found)) for oid, found in by_table.items()]


def _relation(oid: int, rows: Sequence[_Row], sent: tuple[str, ...]) -> Relation:
    columns = tuple(
        RelationColumn(name, kind, typmod, is_key or identity == "f")
        for _, _, _, identity, name, kind, typmod, _, generated, *_, is_key, _ in rows
        if name is not None and generated in sent
    )
    _, schema, name, identity, *_ = rows[0]
    return Relation(oid, schema, name, identity, columns)


def _fact(rows: Sequence[_Row]) -> TableFact:
    keyed = sorted((row[12], row[4]) for row in rows if row[12] is not None)
    columns = {
        name: ColumnFact(nullable, generated != "", auto, default and generated == "", collation)
        for _, _, _, _, name, _, _, nullable, generated, auto, default, collation, *_ in rows
        if name is not None
    }
    return TableFact(tuple(name for _, name in keyed), columns, is_rewritten=bool(rows[0][-1]))


def read_types(connection: Connection) -> Types:
    """Return the name and the base type of every type by oid."""
    rows = connection.execute("SELECT oid, format_type(oid, NULL), typbasetype FROM pg_type").fetchall()
    return {oid: TypeFact(name, base) for oid, name, base in rows}


class CatalogReader(Catalogue):
    """PostgreSQL's system catalogue, read through a connection."""

    def __init__(self, connection: Connection, born_published: Collection[int] = ()) -> None:
        """Read through `connection`; `born_published`: oids of tables that were published before their first row."""
        self._connection, self._born_published = connection, born_published
        self._settled = 0  # the last transaction waited for

    def table(self, oid: int) -> TableFact | None:
        rows = self._connection.execute(_ONE, [oid]).fetchall()
        if not rows:
            return None
        return msgspec.structs.replace(_fact(rows), is_born_published=oid in self._born_published)

    def types(self) -> Types:
        return read_types(self._connection)

    def settle(self, xid: int) -> None:
        """Wait at most SETTLE_SECONDS: a standby may confirm the commit late. Facts unknown until then are announced
        later. Wait once per transaction, which may bring many tables."""
        if xid == self._settled:
            return
        self._settled = xid
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            row = self._connection.execute("SELECT pg_current_snapshot()::text").fetchone()
            if Snapshot.of(str(row[0] if row else "1:1:")).sees(xid):
                return
            time.sleep(0.005)
