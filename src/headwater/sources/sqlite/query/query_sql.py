"""Rendering of queries into SQLite's SQL, with values as constants and arguments as ?1, ?2 …"""

from __future__ import annotations

import math

from headwater.errors import NotSupported
from headwater.model.literal import Value
from headwater.model.predicate import Col
from headwater.model.query.query import Query, SetOp
from headwater.sources.query_text import QueryText
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.sql import SqliteExpressions
from headwater.sources.sqlite.types import Stored, to_stored


def query_sql(query: Query) -> str:
    """Return the canonical text of `query`; its parameters are numbered in the order of `query.parameters`."""
    return _QueryText().query(query)


def constant(value: Stored) -> str:
    """Return a stored value as SQL text: exactly this value and, like a bound value, without affinity or collation."""
    match value:
        case None:
            return "NULL"
        case int():
            return str(int(value))
        case float():
            return _real(value)
        case bytes():
            return f"X'{value.hex()}'"
        case str():
            return _text(value)


def _real(value: float) -> str:
    if math.isnan(value):
        return "NULL"  # SQLite stores NaN as NULL
    if math.isinf(value):
        return "9e999" if value > 0 else "-9e999"
    return repr(value)  # the shortest digits that parse to this value


def _text(value: str) -> str:
    # SQL text ends at a NUL. CAST is no alternative: CAST would give the value an affinity.
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\0")]
    return parts[0] if len(parts) == 1 else f"({' || char(0) || '.join(parts)})"


class _QueryText(SqliteExpressions, QueryText):
    """Renderer of queries in SQLite's dialect."""

    parameter, no_limit = "?", "-1"

    def ident(self, name: str) -> str:
        return ident(name)

    def set_op(self, body: SetOp) -> str:
        if body.all and body.kind != "union":
            raise NotSupported(
                f"SQLite has no {body.kind.upper()} ALL", hint="Leave `all` out: duplicate rows are then returned once."
            )
        # SQLite evaluates A op B op C from the left, without brackets: a nested right operand becomes a table.
        right = self.body(body.right)
        right = f"SELECT * FROM ({right})" if isinstance(body.right, SetOp) else right
        return f"{self.body(body.left)} {body.kind.upper()}{' ALL' if body.all else ''} {right}"

    def col(self, col: Col) -> str:
        """Return a column; without a table name SQLite resolves it, or reports an ambiguous name."""
        return ident(col.name) if col.table is None else f"{ident(col.table)}.{ident(col.name)}"

    def value(self, value: Value) -> str:
        """Return `value` as a constant, in the form in which a column stores it."""
        return constant(to_stored(value))
