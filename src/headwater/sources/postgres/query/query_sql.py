"""Rendering of queries into PostgreSQL's SQL. The text is complete: values are constants, arguments are $1, $2 …"""

from __future__ import annotations

import math
from decimal import Decimal
from uuid import UUID

from headwater.errors import InvalidRequest
from headwater.model.literal import U64, Date, DateTime, Embedding, Json, Time, Value
from headwater.model.predicate import Col, QueryExpression
from headwater.model.query.query import Aggregate, Query, SetOp, Star
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.table_shapes import ident
from headwater.sources.postgres.sql import PostgresExpressions
from headwater.sources.postgres.values import to_bound
from headwater.sources.query_text import QueryText

_TYPES: dict[type, str] = {
    float: "double precision",
    Decimal: "numeric",
    Date: "date",
    UUID: "uuid",
    Json: "jsonb",
    Embedding: "real[]",
    str: "",
}


def query_sql(query: Query) -> str:
    """Return the text of `query`; its parameters are numbered in the order of `query.parameters`."""
    return _QueryText().query(query)


def constant(value: Value) -> str:
    """Return a value as SQL text. Text is left untyped: PostgreSQL takes the type from the other operand."""
    match value:
        case None:
            return "NULL"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value) if value >= 0 else f"({value})"
        case U64():
            return str(value.v)
        case float() if math.isfinite(value) and math.copysign(1, value) > 0:
            return f"{value!r}::double precision"
        case bytes():
            return f"'\\x{value.hex()}'::bytea"
        case Time():
            return _quoted(value, "time with time zone" if value.iso[-6:-5] in "+-" else "time")
        case DateTime():
            return _quoted(value, "timestamp with time zone" if value.iso[-6:-5] in "+-" else "timestamp")
    return _quoted(value, _TYPES.get(type(value), ""))  # UNAVAILABLE has no type: the request is refused


def _quoted(value: Value, kind: str = "") -> str:
    bound = to_bound(value)
    assert bound is not None
    text = bound.decode().replace("'", "''")
    found = "E'" + text.replace("\\", "\\\\") + "'" if "\\" in text else f"'{text}'"
    return f"{found}::{kind}" if kind else found


class _QueryText(PostgresExpressions, QueryText):
    """A query text in PostgreSQL's dialect. Tables are written with their schema: the search path is not used."""

    with_word, parameter, no_limit = "WITH RECURSIVE", "$", "ALL"

    def __init__(self) -> None:
        super().__init__()
        self._withs: list[set[str]] = []  # names of WITH queries in scope

    def query(self, query: Query) -> str:
        self._withs.append({each.name for each in query.with_})  # each may read itself and the others
        try:
            return super().query(query)
        finally:
            self._withs.pop()

    def ident(self, name: str) -> str:
        return ident(name)

    def named(self, name: str) -> str:
        if any(name in known for known in self._withs):
            return ident(name)
        parts = split_name(name)
        if parts is None:
            raise InvalidRequest(f"{name!r} is not a table", hint="Write table, or schema.table.")
        return f"{ident(parts[0])}.{ident(parts[1])}"

    def set_op(self, body: SetOp) -> str:
        return f"({self.body(body.left)}) {body.kind.upper()}{' ALL' if body.all else ''} ({self.body(body.right)})"

    def col(self, col: Col) -> str:
        """Return a column as SQL, qualified if the query names its table."""
        return ident(col.name) if col.table is None else f"{_qualifier(col.table)}.{ident(col.name)}"

    def value(self, value: Value) -> str:
        return constant(value)

    def queried(self, expr: QueryExpression) -> str:
        """Return a parameter, aggregate or subquery as SQL; some aggregates have another name here."""
        match expr:
            case Star(str() as table):
                return f"{_qualifier(table)}.*"
            case Aggregate("total", (arg,), distinct):
                return f"coalesce(sum({'DISTINCT ' if distinct else ''}{self.expr(arg)}), 0)::double precision"
            case Aggregate("group_concat", (arg, *rest), distinct):
                by = self.expr(rest[0]) if rest else "','"
                return f"string_agg({'DISTINCT ' if distinct else ''}({self.expr(arg)})::text, {by})"
        return super().queried(expr)


def _qualifier(name: str) -> str:
    """Return the qualifier of a column: a table, or an alias."""
    parts = split_name(name) if "." in name else None
    return ident(name) if parts is None or parts[0] == "public" else f"{ident(parts[0])}.{ident(parts[1])}"
