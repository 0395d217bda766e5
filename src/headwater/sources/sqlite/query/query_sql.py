"""Rendering queries into SQLite's SQL. The text says all: values stand in it as constants, arguments as ?1, ?2 …"""

from __future__ import annotations

import math

from headwater.errors import NotSupported
from headwater.model.literal import Value
from headwater.model.predicate import Col, Expr, Queried
from headwater.model.query.query import Query, SetOp
from headwater.sources.query_text import QueryText
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.sql import Expressions
from headwater.sources.sqlite.types import Stored, to_stored


def query_sql(query: Query) -> str:
    """The one text of `query`; its parameters are numbered as `query.parameters` names them."""
    return _QueryText().query(query)


def constant(value: Stored) -> str:
    """A stored value as SQL text: the very same value, and, like a bound one, without affinity or collation."""
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
        return "NULL"  # as SQLite stores it
    if math.isinf(value):
        return "9e999" if value > 0 else "-9e999"
    return repr(value)  # the shortest digits that give it back


def _text(value: str) -> str:
    # SQL text ends at a NUL. Not by CAST, which would give the value an affinity.
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\0")]
    return parts[0] if len(parts) == 1 else f"({' || char(0) || '.join(parts)})"


class _QueryText(QueryText, Expressions):
    """SQLite's own way where it has one."""

    database, parameter, no_limit = "SQLite", "?", "-1"

    def ident(self, name: str) -> str:
        """A name, quoted."""
        return ident(name)

    def expr(self, expr: Expr) -> str:
        """An expression."""
        return Expressions.expr(self, expr)

    def queried(self, expr: Queried) -> str:
        """What only queries hold."""
        return QueryText.queried(self, expr)

    def set_op(self, body: SetOp) -> str:
        """Two bodies as one."""
        if body.all and body.kind != "union":
            raise NotSupported(
                f"SQLite has no {body.kind.upper()} ALL", hint="Leave `all` out: equal rows then come once."
            )
        # SQLite reads A op B op C from the left and knows no brackets here: what stands right becomes a table.
        right = self.body(body.right)
        right = f"SELECT * FROM ({right})" if isinstance(body.right, SetOp) else right
        return f"{self.body(body.left)} {body.kind.upper()}{' ALL' if body.all else ''} {right}"

    def col(self, col: Col) -> str:
        """A column; of which table, the engine knows or asks."""
        return ident(col.name) if col.table is None else f"{ident(col.table)}.{ident(col.name)}"

    def value(self, value: Value) -> str:
        """A constant: what a column would hold of `value`."""
        return constant(to_stored(value))
