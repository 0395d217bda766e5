"""Kinds of columns, one row each: the SQLite and PostgreSQL types declared for a kind, and the types read as it.

To add or fix a type, change its row here; `sqlite/types.py` and `postgres/types.py` convert the values.
"""

from __future__ import annotations

from typing import NamedTuple


class ColumnType(NamedTuple):
    """One kind of column. `sqlite` and `postgres` are the types that `schema.create_table` declares for it.

    A declared SQLite type implies an affinity, chosen so that a decimal or a JSON text never becomes a float.
    Types without a row get their kind by SQLite's affinity rules; in PostgreSQL they are str, their exact text:
    char(n) with its spaces, arrays, enums, ranges, intervals and money.
    """

    sqlite: str
    sqlite_reads: tuple[str, ...]
    postgres: str  # "" if there is none
    postgres_reads: tuple[str, ...]  # as format_type names them; a domain is read as its base type


COLUMN_TYPES = {
    "any": ColumnType("BLOB", ("JSONB",), "", ()),
    "bool": ColumnType("BOOLEAN", ("BOOLEAN", "BOOL"), "boolean", ("boolean",)),
    "i64": ColumnType("INTEGER", (), "bigint", ("bigint", "smallint", "integer", "oid", "xid", "cid")),
    "u64": ColumnType(
        "UNSIGNED INTEGER",
        ("UNSIGNED INTEGER", "UNSIGNED BIG INT", "BIGINT UNSIGNED", "INTEGER UNSIGNED"),
        "numeric(20,0)",
        ("xid8",),
    ),
    "f64": ColumnType("REAL", (), "double precision", ("double precision", "real")),
    "dec": ColumnType("DECIMAL_TEXT", ("DECIMAL_TEXT",), "numeric", ("numeric",)),
    "str": ColumnType("TEXT", (), "text", ("text",)),
    "bytes": ColumnType("BLOB", (), "bytea", ("bytea",)),
    "json": ColumnType("JSON_TEXT", ("JSON_TEXT", "JSON"), "jsonb", ("jsonb", "json")),
    "date": ColumnType("DATE_TEXT", ("DATE_TEXT", "DATE"), "date", ("date",)),
    "time": ColumnType("TIME_TEXT", ("TIME_TEXT", "TIME"), "time", ("time without time zone", "time with time zone")),
    "datetime": ColumnType(
        "DATETIME_TEXT",
        ("DATETIME_TEXT", "DATETIME", "TIMESTAMP"),
        "timestamp with time zone",
        ("timestamp with time zone", "timestamp without time zone"),
    ),
    "uuid": ColumnType("UUID_TEXT", ("UUID_TEXT", "UUID"), "uuid", ("uuid",)),
    "embedding": ColumnType("EMBEDDING_BLOB", ("EMBEDDING_BLOB",), "real[]", ()),
}
