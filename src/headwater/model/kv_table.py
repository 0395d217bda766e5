"""The table `kv` of keys and values as raw bytes, for key-value APIs."""

from __future__ import annotations

from headwater.model.table import Column, Table

TABLE = "kv"
KEY, VALUE, EXPIRES = "key", "value", "expires_at_ms"
SHAPE = Table(
    TABLE,
    (Column(KEY, "bytes", nullable=False), Column(VALUE, "bytes", nullable=False), Column(EXPIRES, "i64")),
    (KEY,),
)


def holds_pairs(table: Table) -> bool:
    """Return whether `table` is named `kv` and has the columns and the key of a `kv` that Headwater creates."""
    kinds = {column.name: column.kind for column in table.columns}
    wanted = {column.name: column.kind for column in SHAPE.columns}
    same = all(kinds.get(name) in (kind, "any") for name, kind in wanted.items())
    return table.name == TABLE and table.key == SHAPE.key and same
